// The exact loop of kernels.h for float64, whose keys are as wide as its lanes; included by isa.cpp after kernels.h.

static __attribute__((noinline)) void add_deviations_f64(const double* p, int64_t n, double mean, double& sum, double& sq) {
  constexpr int kLanes = 16, N = kLanes / kW64;
  f64v total[N] = {}, squares[N] = {};
  double tail[kLanes];
  __builtin_memset(tail, 0xff, sizeof(tail));  // NaN
  for (int64_t j = 0; j < n; j += kLanes) {
    const double* q = p + j;
    if (n - j < kLanes) {
      __builtin_memcpy(tail, q, size_t(n - j) * sizeof(*q));
      q = tail;
    }
    for (int i = 0; i < N; ++i) {
      const f64v value = load<f64v>(q + i * kW64);
      const i64v finite = ((i64v)value & 0x7fffffffffffffff) < 0x7ff0000000000000;
      const f64v d = (f64v)((i64v)(value - mean) & finite);
      total[i] += d;
      squares[i] += d * d;
    }
  }
  sum = fold<N>(total);
  sq = fold<N>(squares);
}

static Accumulation stats_f64_block(const double* p, int64_t n) {
  constexpr int kLanes = 16, N = kLanes / kW64;
  constexpr int64_t kInf = 0x7ff0000000000000, kNone = 0x7fffffffffffffff;
  f64v sq[N] = {}, sum[N] = {};
  i64v largest[N] = {}, smallest[N], nonzero[N] = {}, nans[N] = {}, infs[N] = {};
  for (int i = 0; i < N; ++i) smallest[i] = (i64v){} + kNone;

  double tail[kLanes] = {};
  for (int64_t j = 0; j < n; j += kLanes) {
    const double* q = p + j;
    if (n - j < kLanes) {
      __builtin_memcpy(tail, q, size_t(n - j) * sizeof(*q));
      q = tail;
    }
    for (size_t line = 0; line < sizeof(tail); line += 64) __builtin_prefetch((const char*)(q + 1024) + line);
#pragma GCC unroll 8
    for (int i = 0; i < N; ++i) {
      i64v bits = load<i64v>(q + i * kW64);
      i64v key = bits & kNone;
      i64v finite = key < kInf;
      nans[i] -= key > kInf;
      infs[i] -= key == kInf;
      f64v value = (f64v)(bits & finite);
      key &= finite;
      sum[i] += value;
      sq[i] += value * value;
      i64v is_nonzero = key > 0;
      largest[i] = key > largest[i] ? key : largest[i];
      key |= ~is_nonzero & kNone;
      smallest[i] = key < smallest[i] ? key : smallest[i];
      nonzero[i] -= is_nonzero;
    }
  }

  Accumulation a;
  a.sum_sq = fold<N>(sq);
  a.sum = fold<N>(sum);
  int64_t max_key = 0, min_key = kNone, num_nonzero = 0;
  for (int i = 0; i < N; ++i)
    for (int k = 0; k < kW64; ++k) {
      if (largest[i][k] > max_key) max_key = largest[i][k];
      if (smallest[i][k] < min_key) min_key = smallest[i][k];
      num_nonzero += nonzero[i][k];
      a.num_nans += nans[i][k];
      a.num_infs += infs[i][k];
    }
  __builtin_memcpy(&a.abs_max, &max_key, 8);
  if (min_key != kNone) __builtin_memcpy(&a.abs_min_nonzero, &min_key, 8);
  count(a, n, num_nonzero);
  a.sum_sq_dev = deviations(a, n - a.num_nans - a.num_infs, [=](double mean, double& sum, double& sq) {
    add_deviations_f64(p, n, mean, sum, sq);
  });
  return a;
}

static Accumulation stats_f64(const void* data, int64_t n) {
  const double* p = static_cast<const double*>(data);
  Accumulation total;
  for (int64_t j = 0; j < n; j += kBlock) total.merge(stats_f64_block(p + j, n - j < kBlock ? n - j : kBlock));
  return total;
}
