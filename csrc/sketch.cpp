#include "sketch.h"

#include <algorithm>
#include <cstring>

#include "ieee.h"
#include "tensors.h"

namespace fastguard {

namespace {

double from_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (exponent == 0) return (sign ? -1.0 : 1.0) * double(fraction) * 0x1p-24;
  const uint32_t wide = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return double(value);
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

double element(const char* from, DType dtype) {
  switch (dtype) {
    case DType::f32: return double(load<float>(from));
    case DType::f64: return load<double>(from);
    case DType::f16: return from_half(load<uint16_t>(from));
    default: {
      const uint32_t wide = uint32_t(load<uint16_t>(from)) << 16;
      float value;
      std::memcpy(&value, &wide, sizeof(value));
      return double(value);
    }
  }
}

}  // namespace

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
    const int64_t count = std::min<int64_t>(number, view.numel), step = view.numel / count * itemsize(view.dtype);
    for (int64_t i = 0; i < count; ++i) *out++ = element(view.data + i * step, view.dtype);
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
