#include "ieee.h"
#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

namespace {

// Short runs, and elements with a stride between them, put side by side a block at a time.
struct Gathered {
  const ActivationKernel kernel;
  const Limits& limits;
  const int size;
  Activation total;
  int64_t filled = 0;
  alignas(64) char buffer[kBlock * sizeof(double)];

  Gathered(ActivationKernel kernel, const Limits& limits, int size) : kernel(kernel), limits(limits), size(size) {}

  void add(const char* run, int64_t stride, int64_t count) {
    while (count > 0) {
      const int64_t n = count < kBlock - filled ? count : kBlock - filled;
      gather(buffer + filled * size, run, stride, n, size);
      filled += n;
      run += n * stride * size;
      count -= n;
      if (filled == kBlock) flush();
    }
  }

  void flush() {
    if (filled > 0) total.merge(kernel(buffer, filled, limits));
    filled = 0;
  }
};

}  // namespace

Activation piece_activation(ActivationKernel kernel, const View& view, int64_t shift, int64_t begin, int64_t end,
                            const Limits& limits) {
  const int size = int(itemsize(view.dtype));
  if (!view.layout) return kernel(view.data + (shift + begin) * size, end - begin, limits);

  Gathered short_runs(kernel, limits, size);
  Activation total;
  for_each_run(view, begin, end, [&](const char* run, int64_t stride, int64_t count) {
    if (stride == 1 && count >= kLongRun)
      total.merge(kernel(run + shift * size, count, limits));
    else
      short_runs.add(run + shift * size, stride, count);
  });
  short_runs.flush();
  total.merge(short_runs.total);
  return total;
}

Activation activation_stats(const View& view, const Limits& limits, int num_threads) {
  IEEEArithmetic ieee;  // for the merging; the workers have their own
  const ActivationKernel kernel = kernels().activation[0][int(view.dtype)];
  if (view.numel <= kChunk) return piece_activation(kernel, view, 0, 0, view.numel, limits);
  std::vector<Activation> partials(size_t((view.numel + kChunk - 1) / kChunk));
  for_each_item(int64_t(partials.size()), view.numel, num_threads, [&](int64_t i) {
    const int64_t end = (i + 1) * kChunk < view.numel ? (i + 1) * kChunk : view.numel;
    partials[size_t(i)] = piece_activation(kernel, view, 0, i * kChunk, end, limits);
  });
  Activation total;
  for (const Activation& a : partials) total.merge(a);
  return total;
}

}  // namespace fastguard
