// Elements of any dtype as doubles, one after the other: for looks that read little and do much with it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "stats.h"

namespace fastguard {

inline double widened(float x) { return x; }
inline double widened(double x) { return x; }

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline double widened(Brain x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline double widened(Half x) {
  if ((x.bits & 0x7c00) == 0x7c00) {
    const double size = x.bits & 0x3ff ? NAN : HUGE_VAL;
    return x.bits & 0x8000 ? -size : size;
  }
  // Exponent and fraction move to their float32 places; the multiplication repairs the bias, subnormals included.
  const uint32_t bits = uint32_t(x.bits & 0x7fff) << 13 | uint32_t(x.bits & 0x8000) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value * 0x1p112f;
}

// Reads `n` elements with a stride between them.
using Reader = void (*)(const char* from, int64_t stride, int64_t n, double* out);

template <class T>
void read_elements(const char* from, int64_t stride, int64_t n, double* out) {
  const T* in = reinterpret_cast<const T*>(from);
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) out[i] = widened(in[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = widened(in[i * stride]);
  }
}

inline Reader reader(DType dtype) {
  switch (dtype) {
    case DType::f64: return read_elements<double>;
    case DType::f16: return read_elements<Half>;
    case DType::bf16: return read_elements<Brain>;
    default: return read_elements<float>;
  }
}

}  // namespace fastguard
