// A tensor as the pass sees it: a base address and the shortest list of dimensions that reaches every element once.
#pragma once
#include <cstdint>
#include <vector>

#include "stats.h"

namespace fastguard {

struct View {
  char* data = nullptr;
  int64_t numel = 0;  // real numbers: twice the elements of a complex tensor
  DType dtype = DType::f32;
  bool contiguous = true;  // one dense run starting at `data`, in whatever order of dimensions
  std::vector<int64_t> shape, strides;  // only when not contiguous; in elements, largest stride first
};

// Order does not matter for statistics or scaling, so dimensions are sorted by stride and merged where they join:
// channels_last, transposed and permuted tensors become dense runs.
View make_view(void* data, DType dtype, bool complex, int ndim, const int64_t* shape, const int64_t* strides);

// Whether two indices may reach one element, as in an expanded tensor; such a tensor cannot be scaled in place.
bool may_overlap(const View& view);

// Calls visit(address, stride, count) for the runs that make up elements [begin, end) of a view in its order.
template <class Visit>
void for_each_run(const View& view, int64_t begin, int64_t end, Visit visit) {
  const int size = int(itemsize(view.dtype));
  if (view.contiguous) return visit(view.data + begin * size, 1, end - begin);
  const int inner = int(view.shape.size()) - 1;
  std::vector<int64_t> index(view.shape.size());
  int64_t rest = begin, offset = 0;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % view.shape[d];
    rest /= view.shape[d];
    offset += index[d] * view.strides[d];
  }
  for (int64_t i = begin; i < end;) {
    int64_t count = view.shape[inner] - index[inner];
    if (count > end - i) count = end - i;
    visit(view.data + offset * size, view.strides[inner], count);
    i += count;
    offset += count * view.strides[inner];
    index[inner] += count;
    for (int d = inner; d > 0 && index[d] == view.shape[d]; --d) {
      offset += view.strides[d - 1] - index[d] * view.strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// Copies `count` elements with a stride between them to or from a dense buffer.
void gather(char* to, const char* from, int64_t stride, int64_t count, int size);
void scatter(char* to, const char* from, int64_t stride, int64_t count, int size);

}  // namespace fastguard
