#include <algorithm>
#include <cmath>

#include "ieee.h"
#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

// A dense piece goes to the kernel as it lies; the runs of a strided one are gathered block by block.
Accumulation stats_of(const Kernels& kernels, const View& view, int64_t begin, int64_t end) {
  const auto kernel = kernels.stats[int(view.dtype)];
  const int size = int(itemsize(view.dtype));
  if (!view.layout) return kernel(view.data + begin * size, end - begin);

  Accumulation total;
  alignas(64) char buffer[kBlock * sizeof(double)];
  for (int64_t block = begin; block < end; block += kBlock) {
    int64_t filled = 0, stop = block + kBlock < end ? block + kBlock : end;
    for_each_run(view, block, stop, [&](const char* run, int64_t stride, int64_t count) {
      gather(buffer + filled * size, run, stride, count, size);
      filled += count;
    });
    total.merge(kernel(buffer, filled));
  }
  return total;
}

// The norm where squares of float64 leave its range: they are taken of elements that were multiplied by a power of two.
static double rescaled_norm(const Kernels& kernels, const View& view, double abs_max) {
  const int exponent = std::min(std::max(-std::ilogb(abs_max), -1022), 1022);
  const double scale = std::ldexp(1.0, exponent);
  double buffer[kBlock], sum_sq = 0;
  for (int64_t block = 0; block < view.numel; block += kBlock) {
    int64_t filled = 0;
    for_each_run(view, block, std::min(block + kBlock, view.numel), [&](const char* run, int64_t stride, int64_t count) {
      gather(reinterpret_cast<char*>(buffer + filled), run, stride, count, sizeof(double));
      filled += count;
    });
    kernels.scale[int(DType::f64)](buffer, filled, scale);
    sum_sq += kernels.stats[int(DType::f64)](buffer, filled).sum_sq;
  }
  return std::ldexp(std::sqrt(sum_sq), -exponent);
}

Row row_of(const Kernels& kernels, const View& view, const Accumulation& a) {
  if (in_range(a.sum_sq)) return Row(a, std::sqrt(a.sum_sq));
  return Row(a, a.abs_max == 0 ? 0.0 : rescaled_norm(kernels, view, a.abs_max));
}

void tensor_rows(const std::vector<View>& views, int num_threads, Row* rows) {
  IEEEArithmetic ieee;  // for the merging; the workers have their own
  const Kernels& selected = kernels();
  Plan plan = make_plan(views);
  std::vector<Accumulation> partials(size_t(plan.num_partials));
  for_each_piece(plan, views, num_threads, false, [&](const Plan::Entry& entry, const Piece& piece) {
    const View& view = views[piece.tensor];
    Accumulation a = stats_of(selected, view, piece.begin, piece.end);
    if (entry.num_chunks > 1)
      partials[entry.first_partial + piece.chunk] = a;
    else
      rows[piece.tensor] = row_of(selected, view, a);
  });
  for (const Plan::Entry& entry : plan.entries) {
    if (entry.num_chunks == 1) continue;
    Accumulation a;
    for (int64_t c = 0; c < entry.num_chunks; ++c) a.merge(partials[entry.first_partial + c]);
    rows[entry.first_tensor] = row_of(selected, views[entry.first_tensor], a);
  }
}

Row tensor_stats(const std::vector<View>& views, int num_threads, double unscale, Row* rows) {
  tensor_rows(views, num_threads, rows);
  IEEEArithmetic ieee;
  Row total;
  for (size_t t = 0; t < views.size(); ++t) {
    if (unscale != 1.0) rows[t].multiply(unscale);
    total.merge(rows[t]);
  }
  return total;
}

}  // namespace fastguard
