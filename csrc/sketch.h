// A few elements of some tensors, to be compared from one step to the next.
#pragma once
#include "objects.h"

namespace fastguard {

// Up to `number` elements of each of `tensors`, evenly over its memory, as float64: a bytearray. None if one of them is empty,
// has gaps, or is odd.
py::object sketch(py::Held tensors, Py_ssize_t number);

// The sum of the products of two bytearrays of float64, of the same length.
double dot(py::Bytes a, py::Bytes b);

}  // namespace fastguard
