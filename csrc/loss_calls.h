// What Python calls of loss_gradient.h.
#pragma once
#include "objects.h"

namespace fastguard {

// (number of a LossKind, its targets and their places as float64 bytes, how many rows there are, whether they are of a
// sample, what a mean squared error would be; least, largest, mean, spread and share of 0 and 1 among its targets); None
// if something would need preparing or does not fit. `samples` are of (values, dim, start, step of the places; start,
// step, count of the reach).
py::object py_kind_of_loss(py::List samples, py::handle gradient, int num_threads);

// None if inputs or targets cannot be read as they are.
py::object py_how_it_follows(py::handle x, bool is_floating, py::handle targets, Py_ssize_t each);
py::object py_how_near(py::handle x, bool is_floating, py::handle targets, Py_ssize_t each, bool are_floating);

}  // namespace fastguard
