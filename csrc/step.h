// The CPU's way through one optimizer step, in one call.
#pragma once
#include <pybind11/pybind11.h>

namespace fastguard {

// take_step(param_groups, headers, index, found, step, num_threads, limits, skip_nonfinite, scales) -> int: collects the
// gradients, measures them, decides, clips, and writes the slot. A plain function of CPython's fast calls, since this
// is called at every step of a training. Arguments, and what comes back, as fastguard/_C.pyi says.
PyObject* take_step(PyObject* self, PyObject* const* args, Py_ssize_t count);

// note_loss(headers, index, loss) -> bool: puts a loss into the slot `index`, and says that it did. Not where the slot has
// one, nor for anything but a float and a tensor of one real element that can be read as it is. As take_step.
PyObject* note_loss(PyObject* self, PyObject* const* args, Py_ssize_t count);

}  // namespace fastguard
