// A page of portable SIMD: compiler vector extensions, no intrinsics. Included once per instruction set, inside that
// set's namespace and target region (isa.h), with FG_VECTOR_BYTES defined as the width of its registers. Nothing
// here may be shared between instruction sets, hence no include guard and no standard library.

#define FG_INLINE static inline __attribute__((always_inline))

constexpr int kBytes = FG_VECTOR_BYTES;
constexpr int kW32 = kBytes / 4;  // 32-bit lanes in a register
constexpr int kW64 = kBytes / 8;

typedef float f32v __attribute__((vector_size(kBytes)));
typedef float f32half __attribute__((vector_size(kBytes / 2)));
typedef double f64v __attribute__((vector_size(kBytes)));
typedef double f64pair __attribute__((vector_size(2 * kBytes)));
typedef uint32_t u32v __attribute__((vector_size(kBytes)));
typedef int32_t i32v __attribute__((vector_size(kBytes)));
typedef uint16_t u16v __attribute__((vector_size(kBytes)));
typedef int16_t i16v __attribute__((vector_size(kBytes)));
typedef uint16_t u16half __attribute__((vector_size(kBytes / 2)));
typedef int16_t i16half __attribute__((vector_size(kBytes / 2)));
typedef uint64_t u64v __attribute__((vector_size(kBytes)));
typedef int64_t i64v __attribute__((vector_size(kBytes)));

// Unaligned load of a register's worth of bytes.
template <class V>
FG_INLINE V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

FG_INLINE u32v umax(u32v a, u32v b) { return a > b ? a : b; }
FG_INLINE u32v umin(u32v a, u32v b) { return a < b ? a : b; }

// The two halves of 32-bit floats, widened; lane i of the source is lane i of [low, high]. GCC makes two instructions of a
// whole register of 64 bytes and eight of its halves; with smaller registers the halves are better.
FG_INLINE void widen(f32v x, f64v& low, f64v& high) {
  if constexpr (kBytes == 64) {
    const f64pair both = __builtin_convertvector(x, f64pair);
    __builtin_memcpy(&low, &both, sizeof(low));
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&both) + sizeof(low), sizeof(high));
  } else {
    f32half h[2];
    __builtin_memcpy(h, &x, sizeof(x));
    low = __builtin_convertvector(h[0], f64v);
    high = __builtin_convertvector(h[1], f64v);
  }
}

// Sum of N registers of doubles by halves: lane i takes lane i + half until one is left. The order is a function of
// the number of logical lanes (N * kW64) alone, so every register width gives the same bits.
template <int N>
FG_INLINE double fold(f64v* v) {
  if constexpr (N > 1) {
    for (int i = 0; i < N / 2; ++i) v[i] += v[i + N / 2];
    return fold<N / 2>(v);
  } else {
    double lane[kW64];
    __builtin_memcpy(lane, v, sizeof(lane));
    for (int half = kW64 / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
}
