#include <atomic>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

uint64_t read_stream(const std::vector<View>& views, int num_threads, bool prefetch) {
  for (size_t i = 0; i < views.size(); ++i)
    if (views[i].layout)
      throw std::invalid_argument("tensor " + std::to_string(i) + " must be dense to be read as a stream.");
  auto kernel = kernels().read[prefetch];
  std::atomic<uint64_t> total{0};  // integers: the order of additions does not matter
  for_each_piece(make_plan(views), views, num_threads, false, [&](const Plan::Entry&, const Piece& piece) {
    const View& view = views[piece.tensor];
    const int64_t size = itemsize(view.dtype);
    total.fetch_add(kernel(view.data + piece.begin * size, (piece.end - piece.begin) * size),
                    std::memory_order_relaxed);
  });
  return total;
}

}  // namespace fastguard
