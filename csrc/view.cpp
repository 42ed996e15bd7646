#include "view.h"

#include <algorithm>
#include <cstring>

namespace fastguard {

View make_view(void* data, DType dtype, bool complex, int ndim, const int64_t* shape, const int64_t* strides) {
  View view;
  view.data = static_cast<char*>(data);
  view.dtype = dtype;
  view.numel = complex ? 2 : 1;
  bool dense = true;
  for (int d = ndim - 1; d >= 0; --d) {
    int64_t expected = complex ? view.numel / 2 : view.numel;
    if (strides && shape[d] != 1 && strides[d] != expected) dense = false;
    view.numel = times(view.numel, shape[d]);
  }
  if (dense || view.numel <= 0) return view;

  struct Dim {
    int64_t size, stride;
  };
  std::vector<Dim> dims;
  for (int d = 0; d < ndim; ++d)
    if (shape[d] != 1) dims.push_back({shape[d], complex ? 2 * strides[d] : strides[d]});
  if (complex) dims.push_back({2, 1});
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) { return a.stride > b.stride; });
  std::vector<Dim> merged;
  for (const Dim& dim : dims) {
    if (!merged.empty() && merged.back().stride == dim.size * dim.stride) {
      merged.back().size *= dim.size;
      merged.back().stride = dim.stride;
    } else {
      merged.push_back(dim);
    }
  }
  if (merged.size() == 1 && merged[0].stride == 1) return view;
  view.layout = std::make_unique<Layout>();
  for (const Dim& dim : merged) {
    view.layout->shape.push_back(dim.size);
    view.layout->strides.push_back(dim.stride);
  }
  return view;
}

int64_t extent(const View& view) {
  if (!view.layout) return view.numel;
  int64_t last = 0;
  for (size_t d = 0; d < view.layout->shape.size(); ++d) last += (view.layout->shape[d] - 1) * view.layout->strides[d];
  return last + 1;
}

bool may_overlap(const View& view) {
  if (!view.layout) return false;
  const std::vector<int64_t>&shape = view.layout->shape, &strides = view.layout->strides;
  int64_t reach = 0;  // the farthest element that the inner dimensions address
  for (int d = int(shape.size()) - 1; d >= 0; --d) {
    if (strides[d] <= reach) return true;
    reach += (shape[d] - 1) * strides[d];
  }
  return false;
}

template <class T>
static void copy_from(char* to, const char* from, int64_t stride, int64_t count) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) out[i] = in[i * stride];
}

template <class T>
static void copy_to(char* to, const char* from, int64_t stride, int64_t count) {
  T* out = reinterpret_cast<T*>(to);
  const T* in = reinterpret_cast<const T*>(from);
  for (int64_t i = 0; i < count; ++i) out[i * stride] = in[i];
}

void gather(char* to, const char* from, int64_t stride, int64_t count, int size) {
  if (stride == 1) {
    std::memcpy(to, from, size_t(count) * size);
  } else if (size == 8) {
    copy_from<uint64_t>(to, from, stride, count);
  } else if (size == 4) {
    copy_from<uint32_t>(to, from, stride, count);
  } else {
    copy_from<uint16_t>(to, from, stride, count);
  }
}

void scatter(char* to, const char* from, int64_t stride, int64_t count, int size) {
  if (stride == 1) {
    std::memcpy(to, from, size_t(count) * size);
  } else if (size == 8) {
    copy_to<uint64_t>(to, from, stride, count);
  } else if (size == 4) {
    copy_to<uint32_t>(to, from, stride, count);
  } else {
    copy_to<uint16_t>(to, from, stride, count);
  }
}

}  // namespace fastguard
