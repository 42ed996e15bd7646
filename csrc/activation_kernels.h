// The loops over activations, for one instruction set; included by isa.cpp after kernels.h. Again two loops:
//
//   fast   float32 lanes, for data that is or widens to float32. What it adds up are deviations from a value close to
//          the data (the mean of a few elements), so that a mean far from zero costs no accuracy; sums and squares are
//          flushed to float64 every 16 additions. It tells, per block, whether its assumptions held.
//   exact  float64 lanes, two passes over a block in cache, any values and any dtype. Takes tails, tiny tensors,
//          float64, and every block in which the assumptions failed.

// How elements of each type become float32; `max` is the largest that is finite.
struct Value32 {
  typedef uint32_t raw;
  static constexpr float kMax = 0x1.fffffep127f;
  FG_INLINE f32v fast(const raw* p) { return load<f32v>(p); }
  FG_INLINE f32v exact(const raw* p) { return fast(p); }
  static double one(raw bits) { return double(F32::key_value(bits)); }
};

struct ValueB16 {
  typedef uint16_t raw;
  static constexpr float kMax = 0x1.fep127f;
  FG_INLINE f32v fast(const raw* p) { return (f32v)(__builtin_convertvector(load<u16half>(p), u32v) << 16); }
  FG_INLINE f32v exact(const raw* p) { return fast(p); }
  static double one(raw bits) { return double(F32::key_value(uint32_t(bits) << 16)); }
};

struct Value16 {
  typedef uint16_t raw;
  static constexpr float kMax = 65504.0f;
  // As F16::read. Inf becomes 65536 and NaN more than that, which is repaired where it matters.
  FG_INLINE f32v fast(const raw* p) {
    i32v wide = __builtin_convertvector(load<i16half>(p), i32v);
    return (f32v)((wide << 13) & (int32_t)0x8fffe000) * 0x1p112f;
  }
  FG_INLINE f32v exact(const raw* p) {
    i32v bits = (i32v)fast(p);
    return (f32v)(bits | (((bits & 0x7fffffff) >= 0x47800000) & 0x7f800000));
  }
  static double one(raw bits) {
    const uint32_t key = bits & 0x7fffu;
    const float magnitude = key >= F16::kInf ? F32::key_value((key << 13) | F32::kInf) : F16::key_value(key);
    return bits & 0x8000u ? -double(magnitude) : double(magnitude);
  }
};

struct Value64 {
  typedef double raw;
  static double one(raw x) { return x; }
};

// 16 elements as float64, in order.
constexpr int kExactLanes = 16, kExact32 = kExactLanes / kW32, kExact64 = kExactLanes / kW64;

template <class D>
FG_INLINE void load_exact(const typename D::raw* p, f64v* out) {
  if constexpr (sizeof(*p) == 8) {
    for (int i = 0; i < kExact64; ++i) out[i] = load<f64v>(p + i * kW64);
  } else {
    for (int i = 0; i < kExact32; ++i) widen(D::exact(p + i * kW32), out[2 * i], out[2 * i + 1]);
  }
}

// 1 for magnitudes other than zero, and for those below a limit. By arithmetic: registers of 64 bytes compare into masks,
// and more than two of those for each element are what the loops would wait for.
FG_INLINE i32v is_nonzero(i32v key) { return (i32v)umin((u32v)key, (u32v){} + 1u); }
FG_INLINE i32v is_below(i32v key, i32v limit) { return (i32v)((u32v)(key - limit) >> 31); }

// Counts the lanes in which `mask` is set. Wide registers have a masked addition, the others are quickest subtracting -1.
FG_INLINE void count_if(i32v& counts, i32v mask) {
  if constexpr (kBytes == 64)
    counts = mask ? counts + 1 : counts;
  else
    counts -= mask;
}

// Calls body(values) for 16 elements at a time; the last ones are filled up with NaN, which nothing but the count of
// NaNs takes notice of.
template <class D, class Body>
FG_INLINE void exact_steps(const typename D::raw* p, int64_t n, Body body) {
  f64v values[kExact64];
  int64_t j = 0;
  for (; j + kExactLanes <= n; j += kExactLanes) {
    load_exact<D>(p + j, values);
    body(values);
  }
  if (j == n) return;
  typename D::raw tail[kExactLanes];
  __builtin_memset(tail, 0xff, sizeof(tail));
  __builtin_memcpy(tail, p + j, size_t(n - j) * sizeof(*p));
  load_exact<D>(tail, values);
  body(values);
}

constexpr int64_t kMagnitude64 = 0x7fffffffffffffff, kInf64 = 0x7ff0000000000000;

struct Exact {
  f64v sum[kExact64] = {}, sum_abs[kExact64] = {}, smallest[kExact64], largest[kExact64];
  i64v zeros[kExact64] = {}, near_zero[kExact64] = {}, saturated[kExact64] = {}, nans[kExact64] = {}, infs[kExact64] = {};
};

FG_INLINE int64_t count(const i64v* v) {
  int64_t total = 0;
  for (int i = 0; i < kExact64; ++i)
    for (int k = 0; k < kW64; ++k) total += v[i][k];
  return total;
}

FG_INLINE void exact_add(Exact& e, const f64v* values, const Limits& limits) {
  for (int i = 0; i < kExact64; ++i) {
    const f64v x = values[i];
    const i64v key = (i64v)x & kMagnitude64, finite = key < kInf64, inf = key == kInf64;
    const f64v magnitude = (f64v)key, kept = (f64v)((i64v)x & finite);
    e.sum[i] += kept;
    e.sum_abs[i] += (f64v)((i64v)magnitude & finite);
    e.smallest[i] = finite & (x < e.smallest[i]) ? x : e.smallest[i];
    e.largest[i] = finite & (x > e.largest[i]) ? x : e.largest[i];
    e.zeros[i] -= key == 0;
    e.near_zero[i] -= magnitude < limits.near_zero;
    e.saturated[i] -= (x < limits.low) | (x > limits.high) | inf;
    e.nans[i] -= key > kInf64;
    e.infs[i] -= inf;
  }
}

// `n` <= kBlock elements, any values.
template <class D>
static Activation exact_activation(const typename D::raw* p, int64_t n, const Limits& limits) {
  Exact e;
  const f64v none = (f64v){} + __builtin_inf();
  for (int i = 0; i < kExact64; ++i) {
    e.smallest[i] = none;
    e.largest[i] = -none;
  }
  exact_steps<D>(p, n, [&](const f64v* values) __attribute__((always_inline)) { exact_add(e, values, limits); });

  Activation a;
  const int64_t filled = (n + kExactLanes - 1) / kExactLanes * kExactLanes - n;
  a.num_zeros = count(e.zeros);
  a.num_near_zero = count(e.near_zero);
  a.num_saturated = count(e.saturated);
  a.num_nans = count(e.nans) - filled;
  a.num_infs = count(e.infs);
  a.num_finite = n - a.num_nans - a.num_infs;
  if (a.num_finite == 0) return a;
  for (int i = 0; i < kExact64; ++i)
    for (int k = 0; k < kW64; ++k) {
      if (e.smallest[i][k] < a.min) a.min = e.smallest[i][k];
      if (e.largest[i][k] > a.max) a.max = e.largest[i][k];
    }
  a.min += 0.0;  // no negative zeros, of which others may stand first
  a.max += 0.0;
  a.sum_abs = fold<kExact64>(e.sum_abs);
  if (a.min == a.max) {
    a.mean = a.min;
    return a;
  }
  const double mean = fold<kExact64>(e.sum) / double(a.num_finite);

  f64v sum[kExact64] = {}, sq[kExact64] = {};
  exact_steps<D>(p, n, [&](const f64v* values) __attribute__((always_inline)) {
    for (int i = 0; i < kExact64; ++i) {
      const i64v finite = ((i64v)values[i] & kMagnitude64) < kInf64;
      const f64v d = (f64v)((i64v)(values[i] - mean) & finite);
      sum[i] += d;
      sq[i] += d * d;
    }
  });
  // What the rounding of the mean left over.
  const double rest = fold<kExact64>(sum), correction = rest / double(a.num_finite);
  a.mean = mean + correction;
  a.m2 = fold<kExact64>(sq) - rest * correction;
  if (a.m2 < 0) a.m2 = 0;
  if (a.m2 != a.m2) a.m2 = __builtin_inf();  // Inf - Inf: deviations whose squares float64 has not
  return a;
}

constexpr int kActLanes = 16, kAct32 = kActLanes / kW32, kAct64 = kActLanes / kW64;

// float64 sums of float32 lanes.
template <int N32>
FG_INLINE void flush_lanes(const f32v* run, f64v* total) {
  for (int i = 0; i < N32; ++i) {
    f64v low, high;
    widen(run[i], low, high);
    total[2 * i] += low;
    total[2 * i + 1] += high;
  }
}

// A value close to the data; not finite if something in the first elements is not.
template <class D>
FG_INLINE float level(const typename D::raw* p) {
  double sum = 0;
  for (int i = 0; i < 16; ++i) sum += D::one(p[i]);
  return float(sum / 16);
}

// Mean and m2 from the sums of `n` deviations from `shift` and of their squares; false if float32 did not do.
template <class D>
FG_INLINE bool settle(Activation& a, int64_t n, float shift, double sum, double sq, float smallest, float largest) {
  constexpr double kTiny = 0x1p-120, kHuge = 0x1p500;
  // Written so that a NaN fails: one among the data makes the squares NaN, an Inf or an overflow makes them Inf.
  if (!(sq < kHuge && largest <= D::kMax && smallest >= -D::kMax)) return false;
  a.num_finite = n;
  a.min = double(smallest) + 0.0;  // no negative zero
  a.max = double(largest) + 0.0;
  if (smallest == largest) {
    a.mean = a.min;
    return true;
  }
  // Squares that small have lost bits; and sums that nearly cancel were taken too far from the mean.
  if (sq < double(n) * kTiny || sum * sum > 0.75 * double(n) * sq) return false;
  a.mean = double(shift) + sum / double(n);
  a.m2 = sq - sum * (sum / double(n));
  return true;
}

template <class D, bool kAbs>
FG_INLINE bool fast_activation(const typename D::raw* p, int64_t n, const Limits& limits, Activation& a) {
  constexpr int kRun = kActLanes * 16;
  constexpr int kAhead = 8192 / sizeof(*p);
  const float first = level<D>(p);
  const f32v shift = (f32v){} + first, low = (f32v){} + limits.low32, high = (f32v){} + limits.high32;
  const i32v near_bits = (i32v){} + limits.near_bits;
  f64v sum[kAct64] = {}, sq[kAct64] = {}, sum_abs[kAct64] = {};
  f32v run_sum[kAct32] = {}, run_sq[kAct32] = {}, run_abs[kAct32] = {}, smallest[kAct32], largest[kAct32];
  i32v nonzero[kAct32] = {}, near_zero[kAct32] = {}, saturated[kAct32] = {};
  for (int i = 0; i < kAct32; ++i) smallest[i] = largest[i] = (f32v){} + float(D::one(p[0]));

  for (int64_t run = 0; run < n; run += kRun) {
    const int64_t end = n - run < kRun ? n : run + kRun;
    for (int64_t j = run; j < end; j += kActLanes) {
      for (size_t line = 0; line < kActLanes * sizeof(*p); line += 64)
        __builtin_prefetch((const char*)(p + j + kAhead) + line);
#pragma GCC unroll 8
      for (int i = 0; i < kAct32; ++i) {
        const f32v x = D::fast(p + j + i * kW32), d = x - shift;
        const i32v key = (i32v)x & 0x7fffffff;
        run_sum[i] += d;
        run_sq[i] += d * d;
        if constexpr (kAbs) run_abs[i] += (f32v)key;
        smallest[i] = x < smallest[i] ? x : smallest[i];
        largest[i] = x > largest[i] ? x : largest[i];
        nonzero[i] += is_nonzero(key);
        near_zero[i] += is_below(key, near_bits);
        count_if(saturated[i], (x < low) | (x > high));
      }
    }
    flush_lanes<kAct32>(run_sum, sum);
    flush_lanes<kAct32>(run_sq, sq);
    if constexpr (kAbs) flush_lanes<kAct32>(run_abs, sum_abs);
    for (int i = 0; i < kAct32; ++i) run_sum[i] = run_sq[i] = run_abs[i] = f32v{};
  }

  a.num_zeros = n;
  float least = smallest[0][0], most = largest[0][0];
  for (int i = 0; i < kAct32; ++i)
    for (int k = 0; k < kW32; ++k) {
      if (smallest[i][k] < least) least = smallest[i][k];
      if (largest[i][k] > most) most = largest[i][k];
      a.num_zeros -= nonzero[i][k];
      a.num_near_zero += near_zero[i][k];
      a.num_saturated += saturated[i][k];
    }
  if constexpr (kAbs) {
    a.sum_abs = fold<kAct64>(sum_abs);
    if (!(a.sum_abs < 0x1p500)) return false;
  }
  return settle<D>(a, n, first, fold<kAct64>(sum), fold<kAct64>(sq), least, most);
}

template <class D, bool kAbs>
static Activation activation(const void* data, int64_t n, const Limits& limits) {
  const typename D::raw* p = static_cast<const typename D::raw*>(data);
  Activation total;
  for (int64_t j = 0; j < n; j += kBlock) {
    const int64_t size = n - j < kBlock ? n - j : kBlock;
    int64_t done = 0;
    if constexpr (sizeof(*p) < 8) {
      Activation a;
      const int64_t whole = size / kActLanes * kActLanes;
      if (whole >= kFastSize && fast_activation<D, kAbs>(p + j, whole, limits, a)) {
        total.merge(a);
        done = whole;
      }
    }
    if (done < size) total.merge(exact_activation<D>(p + j + done, size - done, limits));
  }
  return total;
}
