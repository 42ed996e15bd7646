#include "ieee.h"
#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

static void scale_piece(const Kernels& kernels, const View& view, int64_t begin, int64_t end, double factor) {
  auto kernel = kernels.scale[int(view.dtype)];
  const int size = int(itemsize(view.dtype));
  if (!view.layout) return kernel(view.data + begin * size, end - begin, factor);
  alignas(64) char buffer[kBlock * sizeof(double)];
  for_each_run(view, begin, end, [&](char* run, int64_t stride, int64_t count) {
    if (stride == 1) return kernel(run, count, factor);
    for (int64_t i = 0; i < count; i += kBlock) {
      int64_t n = count - i < kBlock ? count - i : kBlock;
      gather(buffer, run + i * stride * size, stride, n, size);
      kernel(buffer, n, factor);
      scatter(run + i * stride * size, buffer, stride, n, size);
    }
  });
}

template <class Factor>
static void scale_all(const std::vector<View>& views, int num_threads, Factor factor_of_tensor) {
  const Kernels& selected = kernels();
  int64_t elements = 0;
  for (const View& view : views) elements += view.numel;
  if (elements < kParallelMin) {
    IEEEArithmetic ieee;
    for (size_t t = views.size(); t-- > 0;)
      if (const double factor = factor_of_tensor(t); factor != 1.0) scale_piece(selected, views[t], 0, views[t].numel, factor);
    return;
  }
  for_each_piece(make_plan(views), views, num_threads, true, [&](const Plan::Entry&, const Piece& piece) {
    const double factor = factor_of_tensor(size_t(piece.tensor));
    if (factor != 1.0) scale_piece(selected, views[size_t(piece.tensor)], piece.begin, piece.end, factor);
  });
}

void scale(const std::vector<View>& views, double factor, int num_threads) {
  scale_all(views, num_threads, [&](size_t) { return factor; });
}

void scale_each(const std::vector<View>& views, const double* factors, int num_threads) {
  scale_all(views, num_threads, [&](size_t t) { return factors[t]; });
}

}  // namespace fastguard
