// A tensor as the pass sees it: a base address and the shortest list of dimensions that reaches every element once.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "stats.h"

namespace fastguard {

// Dimensions of a tensor that is not one dense run; in elements, largest stride first.
struct Layout {
  std::vector<int64_t> shape, strides;
};

// A tensor of real numbers as Python has it; strides in elements.
struct Strided {
  char* data = nullptr;
  DType dtype = DType::f32;
  std::vector<int64_t> shape, strides;
};

struct View {
  char* data = nullptr;
  int64_t numel = 0;               // real numbers: twice the elements of a complex tensor; see `kMostElements`
  std::unique_ptr<Layout> layout;  // null: one dense run starting at `data`, in whatever order of dimensions
  DType dtype = DType::f32;
};

// More could not be counted in float64: a view of them (expanded from a few, surely) has a `numel` of -1.
constexpr int64_t kMostElements = int64_t(1) << 53;

// numel * size, or -1 if that is too many; 0 times anything is 0.
inline int64_t times(int64_t numel, int64_t size) {
  int64_t product;
  if (numel == 0 || size == 0) return 0;
  return numel < 0 || __builtin_mul_overflow(numel, size, &product) || product > kMostElements ? -1 : product;
}

// Order does not matter for statistics or scaling, so dimensions are sorted by stride and merged where they join:
// channels_last, transposed and permuted tensors become dense runs.
View make_view(void* data, DType dtype, bool complex, int ndim, const int64_t* shape, const int64_t* strides);

// Elements from the first to the last one in memory, gaps included, of a view that has any.
int64_t extent(const View& view);

// Whether two indices may reach one element, as in an expanded tensor; such a tensor cannot be scaled in place.
bool may_overlap(const View& view);

// Calls visit(address, stride, count) for the runs that make up elements [begin, end) of a view in its order.
template <class Visit>
void for_each_run(const View& view, int64_t begin, int64_t end, Visit visit) {
  const int size = int(itemsize(view.dtype));
  if (!view.layout) return visit(view.data + begin * size, 1, end - begin);
  const std::vector<int64_t>&shape = view.layout->shape, &strides = view.layout->strides;
  const int inner = int(shape.size()) - 1;
  std::vector<int64_t> index(shape.size());
  int64_t rest = begin, offset = 0;
  for (int d = inner; d >= 0; --d) {
    index[d] = rest % shape[d];
    rest /= shape[d];
    offset += index[d] * strides[d];
  }
  for (int64_t i = begin; i < end;) {
    int64_t count = shape[inner] - index[inner];
    if (count > end - i) count = end - i;
    visit(view.data + offset * size, strides[inner], count);
    i += count;
    offset += count * strides[inner];
    index[inner] += count;
    for (int d = inner; d > 0 && index[d] == shape[d]; --d) {
      offset += strides[d - 1] - index[d] * strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// Copies `count` elements with a stride between them to or from a dense buffer.
void gather(char* to, const char* from, int64_t stride, int64_t count, int size);
void scatter(char* to, const char* from, int64_t stride, int64_t count, int size);

}  // namespace fastguard
