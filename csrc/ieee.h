#pragma once
#include <cstdint>

namespace fastguard {

// torch.set_flush_denormal, or a library linked with -ffast-math, makes a thread read subnormals as zero. That is a
// setting of each thread, so sums would depend on who computes them. It is off while one of these lives.
class IEEEArithmetic {
#if defined(__x86_64__)
  unsigned saved_ = __builtin_ia32_stmxcsr();

 public:
  IEEEArithmetic() {
    if (saved_ & kFlush) __builtin_ia32_ldmxcsr(saved_ & ~kFlush);
  }
  ~IEEEArithmetic() {
    if (saved_ & kFlush) __builtin_ia32_ldmxcsr(saved_);
  }

 private:
  static constexpr unsigned kFlush = 0x8040;  // FTZ and DAZ
#elif defined(__aarch64__)
  uint64_t saved_;

 public:
  IEEEArithmetic() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_ & ~kFlush));
  }
  ~IEEEArithmetic() {
    if (saved_ & kFlush) asm volatile("msr fpcr, %0" : : "r"(saved_));
  }

 private:
  static constexpr uint64_t kFlush = uint64_t(1) << 24 | uint64_t(1) << 19;  // FZ and FZ16
#else
 public:
  IEEEArithmetic() {}
#endif
};

}  // namespace fastguard
