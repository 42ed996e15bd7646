#include "isa.h"

#include <atomic>
#include <cstddef>
#include <stdexcept>

#if !defined(__GNUC__)
#error "fastguard's kernels need GCC or Clang (compiler vector extensions)"
#endif

// One source, compiled once per instruction set. Regions of target pragmas rather than compiler flags, so that
// nothing outside them (standard library templates, say) is ever compiled for an instruction set that the machine
// may lack.
#if defined(__x86_64__) && defined(__linux__)
#define FG_X86_SETS 1
#if defined(__clang__)
#define FG_TARGET_V4 \
  _Pragma("clang attribute push(__attribute__((target(\"arch=x86-64-v4,prefer-512-bit\"))), apply_to = function)")
#define FG_TARGET_V3 _Pragma("clang attribute push(__attribute__((target(\"arch=x86-64-v3\"))), apply_to = function)")
#define FG_TARGET_END _Pragma("clang attribute pop")
#else
#define FG_TARGET_V4 \
  _Pragma("GCC push_options") _Pragma("GCC target(\"arch=x86-64-v4\",\"prefer-vector-width=512\")")
#define FG_TARGET_V3 _Pragma("GCC push_options") _Pragma("GCC target(\"arch=x86-64-v3\")")
#define FG_TARGET_END _Pragma("GCC pop_options")
#endif
#endif

namespace fastguard {

#ifdef FG_X86_SETS
FG_TARGET_V4
namespace v4 {
#define FG_VECTOR_BYTES 64
#define FG_ISA_NAME "x86-64-v4"
#include "vector.h"
#include "kernels.h"
#include "kernels_f64.h"
#include "scale_kernels.h"
#include "activation_kernels.h"
#include "channel_kernels.h"
#include "kernel_table.h"
#undef FG_INLINE
#undef FG_VECTOR_BYTES
#undef FG_ISA_NAME
}  // namespace v4
FG_TARGET_END

FG_TARGET_V3
namespace v3 {
#define FG_VECTOR_BYTES 32
#define FG_ISA_NAME "x86-64-v3"
#include "vector.h"
#include "kernels.h"
#include "kernels_f64.h"
#include "scale_kernels.h"
#include "activation_kernels.h"
#include "channel_kernels.h"
#include "kernel_table.h"
#undef FG_INLINE
#undef FG_VECTOR_BYTES
#undef FG_ISA_NAME
}  // namespace v3
FG_TARGET_END
#endif

namespace baseline {
#define FG_VECTOR_BYTES 16
#define FG_ISA_NAME "baseline"
#include "vector.h"
#include "kernels.h"
#include "kernels_f64.h"
#include "scale_kernels.h"
#include "activation_kernels.h"
#include "channel_kernels.h"
#include "kernel_table.h"
#undef FG_INLINE
#undef FG_VECTOR_BYTES
#undef FG_ISA_NAME
}  // namespace baseline

const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> sets = [] {
    std::vector<const Kernels*> v;
#ifdef FG_X86_SETS
    __builtin_cpu_init();
    bool v3_runs = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                   __builtin_cpu_supports("bmi2");
    bool v4_runs = v3_runs && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
    if (v4_runs) v.push_back(&v4::kKernels);
    if (v3_runs) v.push_back(&v3::kKernels);
#endif
    v.push_back(&baseline::kKernels);
    return v;
  }();
  return sets;
}

static std::atomic<const Kernels*> selected{nullptr};

const Kernels& kernels() {
  const Kernels* k = selected.load(std::memory_order_relaxed);
  return k ? *k : *supported_kernels().front();
}

void select_kernels(const std::string& name) {
  std::string known;
  for (const Kernels* k : supported_kernels()) {
    if (name == k->name) return selected.store(k);
    known += (known.empty() ? "" : ", ") + std::string(k->name);
  }
  throw std::invalid_argument("instruction set must be one of [" + known + "] on this machine, got '" + name + "'");
}

}  // namespace fastguard
