// The loops over channels that lie side by side, for one instruction set; included by isa.cpp after
// activation_kernels.h. A panel is up to kPanelRows rows by kPanelWidth channels. The fast loop goes down 16 channels at
// a time: what belongs to a channel stays in a lane, and is added to the channel's sums once for all rows.

constexpr int kTile = 16, kTile32 = kTile / kW32, kTile64 = kTile / kW64;

struct PanelSums {
  float sum_abs[kPanelWidth];
  int32_t near_zero[kPanelWidth], saturated[kPanelWidth];
};

struct PanelTotals {
  f64v sum[kTile64] = {}, sq[kTile64] = {};
  f32v smallest[kTile32], largest[kTile32];
  i32v nonzero[kTile32] = {}, near_zero[kTile32] = {}, saturated[kTile32] = {};
};

// Where to fetch ahead: further on in the same rows, and past their end in the rows that come next.
struct Ahead {
  int64_t left;  // bytes from the start of the panel to the end of a row
  int64_t jump;  // bytes from there to the start of the row that comes as many rows later as are read together
};

// All kPanelRows rows, unless kFewer: then the loop over them is one at run time.
template <class D, bool kFewer>
FG_INLINE void fast_tile(const void* const* rows, int fewer, int64_t at, Ahead ahead, float level, const Limits& limits,
                         PanelTotals& t, PanelSums& sums) {
  const int num_rows = kFewer ? fewer : kPanelRows;
  constexpr int64_t kAhead = 1024;
  const int64_t there = at * int64_t(sizeof(typename D::raw)) + kAhead;
  const int64_t offset = there < ahead.left ? there : there + ahead.jump;
  const f32v shift = (f32v){} + level, low = (f32v){} + limits.low32, high = (f32v){} + limits.high32;
  const i32v near_bits = (i32v){} + limits.near_bits;
  f32v run_sum[kTile32] = {}, run_sq[kTile32] = {}, run_abs[kTile32] = {};
  i32v near_zero[kTile32] = {}, saturated[kTile32] = {};
#pragma GCC unroll 8
  for (int r = 0; r < num_rows; ++r) {
    const typename D::raw* p = static_cast<const typename D::raw*>(rows[r]) + at;
    __builtin_prefetch(static_cast<const char*>(rows[r]) + offset);
#pragma GCC unroll 4
    for (int i = 0; i < kTile32; ++i) {
      const f32v x = D::fast(p + i * kW32), d = x - shift;
      const i32v key = (i32v)x & 0x7fffffff;
      run_sum[i] += d;
      run_sq[i] += d * d;
      run_abs[i] += (f32v)key;
      t.smallest[i] = x < t.smallest[i] ? x : t.smallest[i];
      t.largest[i] = x > t.largest[i] ? x : t.largest[i];
      t.nonzero[i] += is_nonzero(key);
      near_zero[i] += is_below(key, near_bits);
      count_if(saturated[i], (x < low) | (x > high));
    }
  }
  flush_lanes<kTile32>(run_sum, t.sum);
  flush_lanes<kTile32>(run_sq, t.sq);
  for (int i = 0; i < kTile32; ++i) {
    t.near_zero[i] += near_zero[i];
    t.saturated[i] += saturated[i];
  }
  __builtin_memcpy(sums.sum_abs + at, run_abs, sizeof(run_abs));
  __builtin_memcpy(sums.near_zero + at, near_zero, sizeof(near_zero));
  __builtin_memcpy(sums.saturated + at, saturated, sizeof(saturated));
}

// `width` is a multiple of kTile. False when a check failed; `a` is then meaningless, and `sums` too.
template <class D>
FG_INLINE bool fast_panel(const void* const* rows, int num_rows, int64_t width, Ahead ahead, const Limits& limits,
                          Activation& a, PanelSums& sums) {
  PanelTotals t;
  double level_sum = 0;
  for (int r = 0; r < num_rows; ++r) level_sum += level<D>(static_cast<const typename D::raw*>(rows[r]));
  const float shift = float(level_sum / num_rows);
  const float first = float(D::one(*static_cast<const typename D::raw*>(rows[0])));
  for (int i = 0; i < kTile32; ++i) t.smallest[i] = t.largest[i] = (f32v){} + first;
  if (num_rows == kPanelRows)
    for (int64_t at = 0; at < width; at += kTile) fast_tile<D, false>(rows, num_rows, at, ahead, shift, limits, t, sums);
  else
    for (int64_t at = 0; at < width; at += kTile) fast_tile<D, true>(rows, num_rows, at, ahead, shift, limits, t, sums);

  a.num_zeros = num_rows * width;
  float least = first, most = first;
  for (int i = 0; i < kTile32; ++i)
    for (int k = 0; k < kW32; ++k) {
      if (t.smallest[i][k] < least) least = t.smallest[i][k];
      if (t.largest[i][k] > most) most = t.largest[i][k];
      a.num_zeros -= t.nonzero[i][k];
      a.num_near_zero += t.near_zero[i][k];
      a.num_saturated += t.saturated[i][k];
    }
  // Sums of magnitudes must not overflow either.
  if (!(most < 0x1p120f && least > -0x1p120f)) return false;
  return settle<D>(a, num_rows * width, shift, fold<kTile64>(t.sum), fold<kTile64>(t.sq), least, most);
}

// Adds a panel up in float64, row by row.
template <class D>
static Activation exact_panel(const void* const* rows, int num_rows, int64_t begin, int64_t width, const Limits& limits,
                              const ChannelSums& sums) {
  Activation total;
  for (int r = 0; r < num_rows; ++r) {
    const typename D::raw* p = static_cast<const typename D::raw*>(rows[r]) + begin;
    total.merge(exact_activation<D>(p, width, limits));
    for (int64_t c = 0; c < width; ++c) {
      const double x = D::one(p[c]), magnitude = x < 0 ? -x : x;
      const bool finite = magnitude < __builtin_inf(), inf = magnitude == __builtin_inf();
      sums.sum_abs[begin + c] += finite ? magnitude : 0;
      sums.num_near_zero[begin + c] += magnitude < limits.near_zero;
      sums.num_saturated[begin + c] += (x < limits.low) | (x > limits.high) | inf;
      sums.num_nonfinite[begin + c] += !finite;
    }
  }
  return total;
}

// `num_rows` <= kPanelRows rows of any width, to whose channels `sums` belong.
template <class D>
static Activation channels(const void* const* rows, int num_rows, int64_t width, const Limits& limits,
                           const ChannelSums& sums) {
  Activation total;
  int64_t done = 0;
  if constexpr (sizeof(typename D::raw) < 8) {
    PanelSums panel;
    constexpr int64_t kSize = sizeof(typename D::raw);
    const int64_t span = static_cast<const char*>(rows[num_rows - 1]) - static_cast<const char*>(rows[0]);
    const int64_t jump = num_rows > 1 ? span / (num_rows - 1) * num_rows - width * kSize : 0;
    const void* shifted[kPanelRows];
    for (const int64_t whole = width / kTile * kTile; done < whole; done += kPanelWidth) {
      const int64_t size = whole - done < kPanelWidth ? whole - done : kPanelWidth;
      for (int r = 0; r < num_rows; ++r) shifted[r] = static_cast<const typename D::raw*>(rows[r]) + done;
      Activation a;
      if (!fast_panel<D>(shifted, num_rows, size, {(width - done) * kSize, jump}, limits, a, panel)) {
        total.merge(exact_panel<D>(rows, num_rows, done, size, limits, sums));
        continue;
      }
      total.merge(a);
      for (int64_t c = 0; c < size; ++c) {
        sums.sum_abs[done + c] += double(panel.sum_abs[c]);
        sums.num_near_zero[done + c] += uint32_t(panel.near_zero[c]);
        sums.num_saturated[done + c] += uint32_t(panel.saturated[c]);
      }
    }
    done = width / kTile * kTile;
  }
  for (; done < width; done += kPanelWidth)
    total.merge(exact_panel<D>(rows, num_rows, done, width - done < kPanelWidth ? width - done : kPanelWidth, limits, sums));
  return total;
}
