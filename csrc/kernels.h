// The loops over one contiguous piece of a tensor, for one instruction set. Included by isa.cpp once per set (see
// vector.h). Two loops give the statistics:
//
//   fast   32 float32 lanes; squares and sums are flushed to 32 float64 lanes every 16 additions, so that rounding
//          stays below 3e-7 of a norm even if every addition rounds the same way. It asks, per block, whether its own
//          assumptions held: all finite, no square near overflow or underflow, mean not dominating the spread.
//   exact  16 float64 lanes; a float32 product is exact there. Non-finite elements are counted and replaced by zero.
//          Takes tails, tiny tensors, and every block in which the fast loop's assumptions failed.
//
// Both decide on bit patterns and integer keys, never on float comparisons that a NaN could slip through.

constexpr int kFastLanes = 32;
constexpr int kFast32 = kFastLanes / kW32, kFast64 = kFastLanes / kW64;

// Keys of 16 bits stay that wide. None is negative, and every instruction set compares signed numbers.
template <class V, class Key, int N>
struct FastKeys {
  static constexpr Key kMagnitude = Key(~(Key(1) << (8 * sizeof(Key) - 1)));
  V largest[N] = {}, least[N];
};
typedef FastKeys<i32v, int32_t, kFast32> FastKeys32;
typedef FastKeys<i16v, int16_t, kFast32 / 2> FastKeys16;

struct F32 {
  typedef uint32_t raw;
  typedef FastKeys32 FastKeys;
  static constexpr uint32_t kInf = 0x7f800000u;
  static constexpr uint32_t kFastMin = 0x2a000000u;  // 2^-43: smaller squares would lose bits to underflow
  static constexpr uint32_t kFastMax = 0x5e000000u;  // 2^61: sixteen squares still fit in float32
  FG_INLINE void read(const raw* p, f32v& value, u32v& key) {
    value = load<f32v>(p);
    key = (u32v)value & 0x7fffffffu;
  }
  static float key_value(uint32_t key) {
    float f;
    __builtin_memcpy(&f, &key, 4);
    return f;
  }
};

struct BF16 {
  typedef uint16_t raw;
  typedef FastKeys16 FastKeys;
  static constexpr uint32_t kInf = F32::kInf >> 16;
  static constexpr uint32_t kFastMin = F32::kFastMin >> 16;
  static constexpr uint32_t kFastMax = F32::kFastMax >> 16;
  FG_INLINE void read(const raw* p, f32v& value, u32v& key) {
    u32v wide = __builtin_convertvector(load<u16half>(p), u32v);
    value = (f32v)(wide << 16);
    key = wide & 0x7fffu;
  }
  FG_INLINE f32v lower(u32v words) { return (f32v)(words << 16); }
  FG_INLINE f32v upper(u32v words) { return (f32v)(words & 0xffff0000u); }
  static float key_value(uint32_t key) { return F32::key_value(key << 16); }
};

struct F16 {
  typedef uint16_t raw;
  typedef FastKeys16 FastKeys;
  static constexpr uint32_t kInf = 0x7c00u;
  static constexpr uint32_t kFastMin = 0;  // the square of the smallest float16 is 3.6e-15
  static constexpr uint32_t kFastMax = kInf - 1;
  // Exponent and fraction move to their float32 places; the multiplication by 2^112 repairs the bias, subnormals
  // included, without a rounding. The sign extension fills bits that the mask clears again.
  FG_INLINE void read(const raw* p, f32v& value, u32v& key) {
    i32v wide = __builtin_convertvector(load<i16half>(p), i32v);
    value = (f32v)((wide << 13) & (int32_t)0x8fffe000) * 0x1p112f;
    key = (u32v)wide & 0x7fffu;
  }
  FG_INLINE f32v lower(u32v words) { return upper(words << 16); }
  FG_INLINE f32v upper(u32v words) { return (f32v)(((i32v)words >> 3) & (int32_t)0x8fffe000) * 0x1p112f; }
  static float key_value(uint32_t key) { return F32::key_value(key << 13) * 0x1p112f; }
};

template <class D>
FG_INLINE void fold_keys(const u32v* largest, const u32v* smallest, int n, uint32_t& max_key, uint32_t& min_key) {
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < kW32; ++k) {
      if (largest[i][k] > max_key) max_key = largest[i][k];
      if (smallest[i][k] < min_key) min_key = smallest[i][k];
    }
}

// `min_key` is the smallest key minus one, modulo 2^32: zero turns into the largest number, and needs no branch.
template <class D>
FG_INLINE void finish(Accumulation& a, uint32_t max_key, uint32_t min_key) {
  a.abs_max = D::key_value(max_key);
  a.abs_min_nonzero = min_key == 0xffffffffu ? 0 : D::key_value(min_key + 1);
}

// `num_nonzero` elements are finite and not zero.
FG_INLINE void count(Accumulation& a, int64_t n, int64_t num_nonzero) {
  a.numel = n;
  a.num_zeros = n - num_nonzero - a.num_nans - a.num_infs;
}

// The sum of squared deviations from the mean of `n` finite elements, of which all else is known. E[x^2] - E[x]^2 cancels
// where the mean is nearly all of the root mean square: then `again(mean, sum, sq)` has to add up deviations themselves.
template <class Again>
FG_INLINE double deviations(const Accumulation& a, int64_t n, Again again) {
  if (n <= 1 || a.abs_max == 0) return 0;
  const double size = double(n), mean = a.sum / size, dev = a.sum_sq - a.sum * mean;
  if (dev > 0x1p-10 * a.sum_sq && a.sum_sq < __builtin_inf()) return dev;
  const bool same_magnitudes = a.abs_max == a.abs_min_nonzero && a.num_zeros == 0;
  if (same_magnitudes && __builtin_fabs(mean) > (1 - 1 / size) * a.abs_max) return 0;  // and signs
  double sum = 0, sq = 0;
  again(mean, sum, sq);
  const double settled = sq - sum * (sum / size);  // what the rounding of the mean left over
  return settled == settled ? (settled > 0 ? settled : 0) : __builtin_inf();
}

template <class D>
static __attribute__((noinline)) void add_deviations(const typename D::raw* p, int64_t n, double mean, double& sum, double& sq) {
  constexpr int kLanes = 16, N32 = kLanes / kW32, N64 = kLanes / kW64;
  f64v total[N64] = {}, squares[N64] = {};
  typename D::raw tail[kLanes];
  __builtin_memset(tail, 0xff, sizeof(tail));  // NaN
  for (int64_t j = 0; j < n; j += kLanes) {
    const typename D::raw* q = p + j;
    if (n - j < kLanes) {
      __builtin_memcpy(tail, q, size_t(n - j) * sizeof(*q));
      q = tail;
    }
    for (int i = 0; i < N32; ++i) {
      f32v value;
      u32v key;
      D::read(q + i * kW32, value, key);
      const f32v finite = (f32v)((u32v)(key < D::kInf) & 0x3f800000u);  // 1, or 0;
      f64v part[2], kept[2];
      widen((f32v)((u32v)value & (u32v)(key < D::kInf)), part[0], part[1]);
      widen(finite, kept[0], kept[1]);
      for (int k = 0; k < 2; ++k) {
        const f64v d = part[k] - mean * kept[k];  // 0 for what is not finite
        total[2 * i + k] += d;
        squares[2 * i + k] += d * d;
      }
    }
  }
  sum = fold<N64>(total);
  sq = fold<N64>(squares);
}

// `n` <= kBlock elements, any values.
template <class D>
static Accumulation exact_block(const typename D::raw* p, int64_t n) {
  constexpr int kLanes = 16;
  constexpr int N32 = kLanes / kW32, N64 = kLanes / kW64;
  f64v sq[N64] = {}, sum[N64] = {};
  u32v largest[N32] = {}, smallest[N32], nonzero[N32] = {}, nans[N32] = {}, infs[N32] = {};
  const u32v one = (u32v){} + 1u;
  for (int i = 0; i < N32; ++i) smallest[i] = ~(u32v){};

  typename D::raw tail[kLanes] = {};  // zeros change no sum, no extreme and no count of non-zeros
  for (int64_t j = 0; j < n; j += kLanes) {
    const typename D::raw* q = p + j;
    if (n - j < kLanes) {
      __builtin_memcpy(tail, q, size_t(n - j) * sizeof(*q));
      q = tail;
    }
#pragma GCC unroll 4
    for (int i = 0; i < N32; ++i) {
      f32v value;
      u32v key;
      D::read(q + i * kW32, value, key);
      u32v finite = (u32v)(key < D::kInf);
      nans[i] -= (u32v)(key > D::kInf);
      infs[i] -= (u32v)(key == D::kInf);
      value = (f32v)((u32v)value & finite);
      key &= finite;
      f64v low, high;
      widen(value, low, high);
      sum[2 * i] += low;
      sum[2 * i + 1] += high;
      sq[2 * i] += low * low;
      sq[2 * i + 1] += high * high;
      largest[i] = umax(largest[i], key);
      smallest[i] = umin(smallest[i], key - 1u);
      nonzero[i] += umin(key, one);
    }
  }

  Accumulation a;
  a.sum_sq = fold<N64>(sq);
  a.sum = fold<N64>(sum);
  uint32_t max_key = 0, min_key = 0xffffffffu;
  fold_keys<D>(largest, smallest, N32, max_key, min_key);
  int64_t num_nonzero = 0;
  for (int i = 0; i < N32; ++i)
    for (int k = 0; k < kW32; ++k) {
      num_nonzero += nonzero[i][k];
      a.num_nans += nans[i][k];
      a.num_infs += infs[i][k];
    }
  finish<D>(a, max_key, min_key);
  count(a, n, num_nonzero);
  a.sum_sq_dev = deviations(a, n - a.num_nans - a.num_infs, [=](double mean, double& sum, double& sq) {
    add_deviations<D>(p, n, mean, sum, sq);
  });
  return a;
}

// Pieces below this many elements are not worth the fast loop's checks.
constexpr int64_t kFastSize = 256;

struct FastSums {
  f64v sq[kFast64] = {}, sum[kFast64] = {};
  f32v run_sq[kFast32], run_sum[kFast32];
};

FG_INLINE void fast_value(FastSums& f, int i, f32v value) {
  f.run_sum[i] += value;
  f.run_sq[i] += value * value;
}

// Adds kFastLanes elements. Those of which `dropped` has all bits are zeros that are not there.
template <class D>
FG_INLINE void fast_add(FastSums& f, FastKeys32& keys, const uint32_t* p, const u32v* dropped = nullptr) {
#pragma GCC unroll 8
  for (int i = 0; i < kFast32; ++i) {
    const u32v bits = load<u32v>(p + i * kW32);
    const i32v key = (i32v)(bits & 0x7fffffffu), present = dropped ? key | (i32v)(dropped[i] >> 1) : key;
    fast_value(f, i, (f32v)bits);
    keys.largest[i] = key > keys.largest[i] ? key : keys.largest[i];
    keys.least[i] = present < keys.least[i] ? present : keys.least[i];
  }
}

// Two elements lie in a word. Half of the lanes take the lower ones, the others the upper ones, which needs no shuffle.
template <class D>
FG_INLINE void fast_add(FastSums& f, FastKeys16& keys, const uint16_t* p, const u32v* dropped = nullptr) {
#pragma GCC unroll 4
  for (int i = 0; i < kFast32 / 2; ++i) {
    const u32v words = load<u32v>(p + i * 2 * kW32);
    fast_value(f, i, D::lower(words));
    fast_value(f, i + kFast32 / 2, D::upper(words));
    const i16v key = (i16v)words & (int16_t)0x7fff;
    const i16v present = dropped ? key | ((i16v)dropped[i] & (int16_t)0x7fff) : key;
    keys.largest[i] = key > keys.largest[i] ? key : keys.largest[i];
    keys.least[i] = present < keys.least[i] ? present : keys.least[i];
  }
}

template <class Keys>
FG_INLINE void fold_fast(const Keys& keys, uint32_t& max_key, uint32_t& least_key) {
  auto largest = keys.largest[0], least = keys.least[0];
  for (const auto& v : keys.largest) largest = v > largest ? v : largest;
  for (const auto& v : keys.least) least = v < least ? v : least;
  max_key = uint32_t(largest[0]);
  least_key = uint32_t(least[0]);
  for (size_t k = 1; k < sizeof(largest) / sizeof(largest[0]); ++k) {
    if (uint32_t(largest[k]) > max_key) max_key = uint32_t(largest[k]);
    if (uint32_t(least[k]) < least_key) least_key = uint32_t(least[k]);
  }
}

// Counts the elements of a block that are not zero, and finds the smallest. `tail` as in `fast_block`.
template <class D>
static __attribute__((noinline)) int64_t count_nonzero(const typename D::raw* p, int64_t n, const typename D::raw* tail,
                                                       uint32_t& min_key) {
  u32v smallest = ~(u32v){}, nonzero = {};
  for (int64_t j = 0; j < n; j += kFastLanes) {
    const typename D::raw* q = j + kFastLanes <= n ? p + j : tail;
#pragma GCC unroll 8
    for (int i = 0; i < kFast32; ++i) {
      f32v value;
      u32v key;
      D::read(q + i * kW32, value, key);
      smallest = umin(smallest, key - 1u);
      nonzero += umin(key, (u32v){} + 1u);
    }
  }
  int64_t num_nonzero = 0;
  for (int k = 0; k < kW32; ++k) {
    if (smallest[k] < min_key) min_key = smallest[k];
    num_nonzero += nonzero[k];
  }
  return num_nonzero;
}

FG_INLINE void fast_flush(FastSums& f) {
#pragma GCC unroll 8
  for (int i = 0; i < kFast32; ++i) {
    f64v low, high;
    widen(f.run_sum[i], low, high);
    f.sum[2 * i] += low;
    f.sum[2 * i + 1] += high;
    widen(f.run_sq[i], low, high);
    f.sq[2 * i] += low;
    f.sq[2 * i + 1] += high;
    f.run_sum[i] = f.run_sq[i] = f32v{};
  }
}

// Nothing, then everything, of so many bytes each.
constexpr int kTailBytes = kFastLanes * 4;
struct TailMask {
  char bytes[2 * kTailBytes] = {};
  constexpr TailMask() {
    for (int i = kTailBytes; i < 2 * kTailBytes; ++i) bytes[i] = -1;
  }
};
static constexpr TailMask kTailMaskBytes;
static constexpr const char* kTailMask = kTailMaskBytes.bytes;

// `n` <= kBlock elements. False when a check failed; `a` is then meaningless.
template <class D>
FG_INLINE bool fast_block(const typename D::raw* p, int64_t n, Accumulation& a) {
  constexpr int kRun = kFastLanes * 16;
  // Far enough ahead that a stream from memory never waits: 1.27 of a plain read stream without it, 1.09 with.
  constexpr int kAhead = 8192 / sizeof(*p);
  FastSums f;
  typename D::FastKeys keys;
  for (auto& least : keys.least) least = keys.largest[0] + keys.kMagnitude;  // of zeros so far
  for (int i = 0; i < kFast32; ++i) f.run_sum[i] = f.run_sq[i] = f32v{};
  int64_t j = 0;
  for (int64_t run = 0; run + kFastLanes <= n; run += kRun) {
    const int64_t end = n - run < kRun ? n - kFastLanes + 1 : run + kRun;
    for (; j < end; j += kFastLanes) {
      for (size_t line = 0; line < kFastLanes * sizeof(*p); line += 64)
        __builtin_prefetch((const char*)(p + j + kAhead) + line);
      fast_add<D>(f, keys, p + j);
    }
    fast_flush(f);
  }
  constexpr int kSize = kFastLanes * sizeof(*p), kWords = kSize / kBytes;
  typename D::raw tail[kFastLanes];
  if (j < n) {
    // The last elements once more, and zeros for those that were read: these change no sum and no extreme.
    const char *last = (const char*)(p + n - kFastLanes), *kept = kTailMask + kTailBytes - kSize + (n - j) * sizeof(*p);
    u32v dropped[kWords];
    for (int i = 0; i < kWords; ++i) {
      const u32v mask = load<u32v>(kept + i * kBytes), words = load<u32v>(last + i * kBytes) & mask;
      dropped[i] = ~mask;
      __builtin_memcpy((char*)tail + i * kBytes, &words, kBytes);
    }
    fast_add<D>(f, keys, tail, dropped);
    fast_flush(f);
  }

  uint32_t max_key, least_key;
  fold_fast(keys, max_key, least_key);
  if (max_key > D::kFastMax || (max_key < D::kFastMin && max_key != 0)) return false;
  a.sum_sq = fold<kFast64>(f.sq);
  a.sum = fold<kFast64>(f.sum);
  // Where the mean is nearly all of the root mean square, E[x^2] - E[x]^2 cancels: read again exactly.
  a.sum_sq_dev = a.sum_sq - a.sum * (a.sum / double(n));
  if (a.sum_sq_dev < 0.01 * a.sum_sq) return false;
  uint32_t min_key = least_key - 1;  // of zero: none
  const int64_t num_nonzero = least_key ? n : max_key ? count_nonzero<D>(p, n, tail, min_key) : 0;
  finish<D>(a, max_key, min_key);
  count(a, n, num_nonzero);
  return true;
}

// exact_block in a third of its time, for a block without finite elements. False, with `a` meaningless, if there is one.
template <class D>
static bool none_finite(const typename D::raw* p, Accumulation& a) {
  constexpr int kAhead = 8192 / sizeof(*p);
  u32v least[kFast32], infs[kFast32] = {};
  for (int i = 0; i < kFast32; ++i) least[i] = ~(u32v){};
  for (int64_t j = 0; j < kBlock; j += kFastLanes) {
    for (size_t line = 0; line < kFastLanes * sizeof(*p); line += 64)
      __builtin_prefetch((const char*)(p + j + kAhead) + line);
#pragma GCC unroll 8
    for (int i = 0; i < kFast32; ++i) {
      f32v value;
      u32v key;
      D::read(p + j + i * kW32, value, key);
      least[i] = umin(least[i], key);
      infs[i] -= (u32v)(key == D::kInf);
    }
  }
  for (int i = 0; i < kFast32; ++i)
    for (int k = 0; k < kW32; ++k) {
      if (least[i][k] < D::kInf) return false;
      a.num_infs += infs[i][k];
    }
  a.num_nans = kBlock - a.num_infs;
  count(a, kBlock, 0);
  return true;
}

template <class D>
static Accumulation stats(const void* data, int64_t n) {
  constexpr uint32_t kMagnitude = sizeof(typename D::raw) == 4 ? 0x7fffffffu : 0x7fffu;
  const typename D::raw* p = static_cast<const typename D::raw*>(data);
  Accumulation total;
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t size = n - j < kBlock ? n - j : kBlock;
    Accumulation a;
    if (size == kBlock && (p[j] & kMagnitude) >= D::kInf && none_finite<D>(p + j, a)) {
      total.merge(a);
      continue;
    }
    a = Accumulation();
    if (size < kFastSize || !fast_block<D>(p + j, size, a)) a = exact_block<D>(p + j, size);
    total.merge(a);
  }
  return total;
}
