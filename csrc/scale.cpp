#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

void scale(const std::vector<View>& views, double factor, int num_threads) {
  const Kernels& selected = kernels();
  for_each_piece(make_plan(views), views, num_threads, true, [&](const Plan::Entry&, const Piece& piece) {
    const View& view = views[piece.tensor];
    auto kernel = selected.scale[int(view.dtype)];
    const int size = int(itemsize(view.dtype));
    alignas(64) char buffer[kBlock * sizeof(double)];
    for_each_run(view, piece.begin, piece.end, [&](char* run, int64_t stride, int64_t count) {
      if (stride == 1) return kernel(run, count, factor);
      for (int64_t i = 0; i < count; i += kBlock) {
        int64_t n = count - i < kBlock ? count - i : kBlock;
        gather(buffer, run + i * stride * size, stride, n, size);
        kernel(buffer, n, factor);
        scatter(run + i * stride * size, buffer, stride, n, size);
      }
    });
  });
}

}  // namespace fastguard
