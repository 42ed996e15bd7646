// The loops that scale, and one that only reads, for one instruction set; included by isa.cpp after kernels.h.
//
// Scaling: one rounding, to nearest even, from a float32 product (float64 for float64). Written element by element
// and without branches; the compiler vectorises it for the width of this instruction set.

// Calls body(begin, end) for stretches of 256 bytes, and fetches ahead of them as the fast loop does: an eighth less
// time for float32 where memory is fast, nothing where it is slow. 16-bit elements are bound by their arithmetic.
template <class T, class Body>
FG_INLINE void stretches(T* p, int64_t n, Body body) {
  constexpr int64_t kStretch = 256 / sizeof(T), kAhead = 8192 / sizeof(T);
  int64_t i = 0;
  for (; i + kStretch <= n; i += kStretch) {
    for (int line = 0; line < 256; line += 64) __builtin_prefetch((char*)(p + i + kAhead) + line, 1);
    body(i, i + kStretch);
  }
  body(i, n);
}

static void scale_f32(void* data, int64_t n, double factor) {
  float* p = static_cast<float*>(data);
  const float c = float(factor);
  stretches(p, n, [=](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t i = begin; i < end; ++i) p[i] *= c;
  });
}

static void scale_f64(void* data, int64_t n, double factor) {
  double* p = static_cast<double*>(data);
  stretches(p, n, [=](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t i = begin; i < end; ++i) p[i] *= factor;
  });
}

FG_INLINE uint32_t float_bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

static void scale_bf16(void* data, int64_t n, double factor) {
  uint16_t* p = static_cast<uint16_t*>(data);
  const float c = float(factor);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u = float_bits(F32::key_value(uint32_t(p[i]) << 16) * c);
    uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    bool nan = (u & 0x7fffffffu) > F32::kInf;
    p[i] = uint16_t(nan ? (u >> 16) | 0x40u : rounded);
  }
}

static void scale_f16(void* data, int64_t n, double factor) {
  uint16_t* p = static_cast<uint16_t*>(data);
  const float c = float(factor);
  for (int64_t i = 0; i < n; ++i) {
    uint32_t h = p[i], key = h & 0x7fffu;
    uint32_t special = (key << 13) | F32::kInf;  // Inf and NaN keep their fraction
    float x = key >= F16::kInf ? F32::key_value(special) : F16::key_value(key);
    float y = x * c;
    uint32_t u = float_bits(y), sign = (h ^ (float_bits(c) >> 16)) & 0x8000u, magnitude = u & 0x7fffffffu;
    uint32_t normal = magnitude - (112u << 23);
    normal = (normal + 0xfffu + ((normal >> 13) & 1u)) >> 13;
    normal = normal < F16::kInf ? normal : F16::kInf;
    // Adding 0.5 aligns a float16 subnormal with float32's last bit, so that the addition does the rounding.
    uint32_t subnormal = float_bits(F32::key_value(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t out = magnitude < 0x38800000u ? subnormal : normal;
    out = magnitude > F32::kInf ? 0x7e00u : out;
    p[i] = uint16_t(sign | out);
  }
}

// Nothing but a read: the 64-bit words of a piece added up, the last one filled with zeros. No pass over the same bytes
// can be quicker, so the benchmarks compare with it. Whether prefetching helps depends on the machine: both are offered.
template <bool kPrefetch>
static uint64_t read_words(const void* data, int64_t num_bytes) {
  constexpr int kRegisters = 8;
  constexpr int64_t kStep = kRegisters * kBytes, kAhead = 8192;
  const char* p = static_cast<const char*>(data);
  u64v sum[kRegisters] = {};
  int64_t j = 0;
  for (; j + kStep <= num_bytes; j += kStep) {
    if constexpr (kPrefetch)
      for (int64_t line = 0; line < kStep; line += 64) __builtin_prefetch(p + j + kAhead + line);
#pragma GCC unroll 8
    for (int i = 0; i < kRegisters; ++i) sum[i] += load<u64v>(p + j + i * kBytes);
  }
  for (int i = 1; i < kRegisters; ++i) sum[0] += sum[i];
  uint64_t total = 0;
  for (int k = 0; k < kW64; ++k) total += sum[0][k];
  for (; j < num_bytes; j += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, p + j, size_t(num_bytes - j < 8 ? num_bytes - j : 8));
    total += word;
  }
  return total;
}
