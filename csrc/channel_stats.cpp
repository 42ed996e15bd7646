// Activations by channel. Three ways through memory: rows of channels side by side ([..., C], channels_last), long runs of
// each channel in turn ([N, C, H, W]), and channel by channel (everything else). How the work is cut up depends on the
// shape and strides alone.
#include <algorithm>

#include "ieee.h"
#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

// In activation_stats.cpp: elements [begin, end) of a view, all moved by `shift` elements.
Activation piece_activation(ActivationKernel kernel, const View& view, int64_t shift, int64_t begin, int64_t end,
                            const Limits& limits);

namespace {

constexpr int kTableColumns = 4;

struct Channels {
  View rest;  // one channel: all other dimensions; its data are those of the first channel
  int64_t count, stride;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What groups of rows have added up for each channel. Not filled in at first: every item clears its own share.
class GroupSums {
 public:
  GroupSums(int64_t groups, int64_t count)
      : sum_abs_(new double[size_t(groups * count)]),
        counts_(new uint32_t[size_t(3 * groups * count)]),
        groups_(groups),
        count_(count) {}

  ChannelSums clear(int64_t group, int64_t begin, int64_t width) {
    const ChannelSums s = of(group, begin);
    std::fill_n(s.sum_abs, width, 0.0);
    for (uint32_t* counts : {s.num_near_zero, s.num_saturated, s.num_nonfinite}) std::fill_n(counts, width, 0u);
    return s;
  }

  void fold(int64_t channel, double* row) const {
    std::fill_n(row, kTableColumns, 0.0);
    for (int64_t g = 0; g < groups_; ++g) {
      const ChannelSums s = of(g, channel);
      row[0] += double(*s.num_near_zero);
      row[1] += double(*s.num_saturated);
      row[2] += double(*s.num_nonfinite);
      row[3] += *s.sum_abs;
    }
  }

 private:
  ChannelSums of(int64_t group, int64_t channel) const {
    uint32_t* counts = counts_.get() + 3 * group * count_ + channel;
    return {sum_abs_.get() + group * count_ + channel, counts, counts + count_, counts + 2 * count_};
  }

  std::unique_ptr<double[]> sum_abs_;
  std::unique_ptr<uint32_t[]> counts_;
  int64_t groups_, count_;
};

// Channels side by side. An item is a group of rows by a range of channels. Groups are few, because each has sums of
// its own: about 3 % of the bytes read, for 16 groups of 512 rows.
Activation side_by_side(const Channels& x, const Limits& limits, int num_threads, double* table) {
  constexpr int64_t kGroups = 16, kGroupRows = 64;
  const int64_t num_rows = x.rest.numel;
  int64_t group = std::max({kGroupRows, ceil_div(num_rows, kGroups), ceil_div(2 * kChunk, x.count)});
  group = ceil_div(group, kPanelRows) * kPanelRows;
  const int64_t groups = ceil_div(num_rows, group);
  const int64_t panels = ceil_div(x.count, kPanelWidth), least_panels = ceil_div(kChunk, kPanelWidth * num_rows);
  const int64_t range = std::max(ceil_div(panels * groups, kGroups), least_panels) * kPanelWidth;
  const int64_t ranges = ceil_div(x.count, range);
  const int size = int(itemsize(x.rest.dtype));
  auto kernel = kernels().channels[int(x.rest.dtype)];

  GroupSums sums(groups, x.count);
  std::vector<Activation> partials(size_t(groups * ranges));
  for_each_item(groups * ranges, num_rows * x.count, num_threads, [&](int64_t item) {
    const int64_t g = item / ranges, begin = item % ranges * range, width = std::min(range, x.count - begin);
    const int64_t last = std::min((g + 1) * group, num_rows);
    const ChannelSums own = sums.clear(g, begin, width);
    Activation total;
    const void* rows[kPanelRows];
    int filled = 0;
    for_each_run(x.rest, g * group, last, [&](const char* run, int64_t stride, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        rows[filled++] = run + (i * stride + begin) * size;
        if (filled < kPanelRows) continue;
        total.merge(kernel(rows, filled, width, limits, own));
        filled = 0;
      }
    });
    if (filled > 0) total.merge(kernel(rows, filled, width, limits, own));
    partials[size_t(item)] = total;
  });
  Activation total;
  for (const Activation& a : partials) total.merge(a);
  for (int64_t c = 0; c < x.count; ++c) sums.fold(c, table + c * kTableColumns);
  return total;
}

void fill_row(double* row, const Activation& a) {
  row[0] = double(a.num_near_zero);
  row[1] = double(a.num_saturated);
  row[2] = double(a.num_nans + a.num_infs);
  row[3] = a.sum_abs;
}

// Long runs, those of a group of outer indices for all channels of a range before the next outer index: where channels
// follow one another in memory, it is read from front to back.
Activation run_by_run(const Channels& x, const Limits& limits, int num_threads, double* table) {
  constexpr int64_t kGroups = 16, kItems = 64;
  const int64_t run = x.rest.layout->shape.back(), num_runs = x.rest.numel / run;
  const int64_t group = ceil_div(num_runs, kGroups), groups = ceil_div(num_runs, group);
  const int64_t range = std::max(ceil_div(x.count * groups, kItems), ceil_div(kChunk, run * group));
  const int64_t ranges = ceil_div(x.count, range);
  const int size = int(itemsize(x.rest.dtype));
  const ActivationKernel kernel = kernels().activation[1][int(x.rest.dtype)];

  std::vector<Activation> partials(size_t(groups * x.count));
  for_each_item(groups * ranges, x.rest.numel * x.count, num_threads, [&](int64_t item) {
    const int64_t g = item / ranges, first = item % ranges * range, last = std::min(first + range, x.count);
    const int64_t end = std::min((g + 1) * group, num_runs);
    for_each_run(x.rest, g * group * run, end * run, [&](const char* from, int64_t, int64_t count) {
      for (int64_t c = first; c < last; ++c)
        partials[size_t(g * x.count + c)].merge(kernel(from + c * x.stride * size, count, limits));
    });
  });
  Activation total;
  for (int64_t c = 0; c < x.count; ++c) {
    Activation channel;
    for (int64_t g = 0; g < groups; ++g) channel.merge(partials[size_t(g * x.count + c)]);
    fill_row(table + c * kTableColumns, channel);
    total.merge(channel);
  }
  return total;
}

Activation one_channel(const Channels& x, int64_t channel, int64_t begin, int64_t end, const Limits& limits) {
  const ActivationKernel kernel = kernels().activation[1][int(x.rest.dtype)];
  return piece_activation(kernel, x.rest, channel * x.stride, begin, end, limits);
}

// Channel by channel. An item is a chunk of a large channel, or several small channels.
Activation one_by_one(const Channels& x, const Limits& limits, int num_threads, double* table) {
  const int64_t per_channel = x.rest.numel, chunks = ceil_div(per_channel, kChunk);
  const int64_t together = chunks > 1 ? 1 : std::max<int64_t>(1, kChunk / per_channel);
  const int64_t ranges = ceil_div(x.count, together);
  std::vector<Activation> partials(size_t(ranges * chunks));
  // Chunk by chunk rather than channel by channel: small rows of few channels are read again while they are in cache.
  for_each_item(ranges * chunks, per_channel * x.count, num_threads, [&](int64_t item) {
    const int64_t chunk = item / ranges, range = item % ranges;
    Activation& partial = partials[size_t(range * chunks + chunk)];
    if (chunks > 1) {
      partial = one_channel(x, range, chunk * kChunk, std::min((chunk + 1) * kChunk, per_channel), limits);
      return;
    }
    for (int64_t c = range * together; c < std::min((range + 1) * together, x.count); ++c) {
      const Activation a = one_channel(x, c, 0, per_channel, limits);
      fill_row(table + c * kTableColumns, a);
      partial.merge(a);
    }
  });
  Activation total;
  for (int64_t r = 0; r < ranges; ++r) {
    Activation channel;
    for (int64_t k = 0; k < chunks; ++k) channel.merge(partials[size_t(r * chunks + k)]);
    if (chunks > 1) fill_row(table + r * kTableColumns, channel);
    total.merge(channel);
  }
  return total;
}

}  // namespace

Activation channel_stats(const Strided& x, int dim, const Limits& limits, int num_threads, double* table) {
  IEEEArithmetic ieee;  // for the merging; the workers have their own
  constexpr int64_t kSideBySide = 16;  // fewer channels leave lanes empty
  std::vector<int64_t> shape = x.shape, strides = x.strides;
  int64_t count = 1, stride = 1;
  if (!shape.empty()) {
    count = shape[size_t(dim)];
    stride = strides[size_t(dim)];
    shape.erase(shape.begin() + dim);
    strides.erase(strides.begin() + dim);
  }
  Channels channels{make_view(x.data, x.dtype, false, int(shape.size()), shape.data(), strides.data()), count, stride};
  if (count == 0 || channels.rest.numel == 0) {
    std::fill_n(table, count * kTableColumns, 0.0);
    return Activation();
  }
  if (stride == 1 && count >= kSideBySide) return side_by_side(channels, limits, num_threads, table);
  const Layout* layout = channels.rest.layout.get();
  if (layout && layout->strides.back() == 1 && layout->shape.back() >= kLongRun)
    return run_by_run(channels, limits, num_threads, table);
  return one_by_one(channels, limits, num_threads, table);
}

}  // namespace fastguard
