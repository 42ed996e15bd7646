#include "sketch.h"

#include <algorithm>

#include "elements.h"
#include "ieee.h"
#include "tensors.h"

namespace fastguard {

py::object sketch(py::Held tensors, Py_ssize_t number) {
  if (number < 1) throw py::value_error("at least one element of each");
  std::vector<View> views(tensors.size());
  int64_t total = 0;
  for (size_t i = 0; i < views.size(); ++i) {
    if (!is_plain_type(tensors.items()[i]) || !read_plain(tensors.items()[i], views[i])) return py::none();
    if (views[i].numel < 1 || views[i].layout || !views[i].data) return py::none();
    total += std::min<int64_t>(number, views[i].numel);
  }
  py::object found = py::bytearray(nullptr, size_t(total) * sizeof(double));
  auto out = reinterpret_cast<double*>(PyByteArray_AS_STRING(found.ptr()));
  const IEEEArithmetic exact;
  for (const View& view : views) {
    const int64_t count = std::min<int64_t>(number, view.numel);
    reader(view.dtype)(view.data, view.numel / count, count, out);
    out += count;
  }
  return found;
}

double dot(py::Bytes a, py::Bytes b) {
  const Py_ssize_t bytes = PyByteArray_GET_SIZE(a.ptr());
  if (bytes != PyByteArray_GET_SIZE(b.ptr()) || bytes % Py_ssize_t(sizeof(double)))
    throw py::value_error("as many numbers of each");
  auto x = reinterpret_cast<const double*>(PyByteArray_AS_STRING(a.ptr()));
  auto y = reinterpret_cast<const double*>(PyByteArray_AS_STRING(b.ptr()));
  const IEEEArithmetic exact;
  constexpr Py_ssize_t kLanes = 4;
  double sums[kLanes] = {};
  const Py_ssize_t count = bytes / Py_ssize_t(sizeof(double));
  Py_ssize_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (Py_ssize_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  for (; i < count; ++i) sums[0] += x[i] * y[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace fastguard
