// A step as a line of a log.
#pragma once
#include <pybind11/pybind11.h>

namespace fastguard {

namespace py = pybind11;

// The slot `index` of `headers`, with the rows in `table`, as a line of JSON: what fastguard.sinks.flatten_step gives, after
// `step` the `time`, in the very text that json.dumps would make of it. Names of tensors that are not finite are left out.
py::bytes json_line(const py::bytearray& headers, Py_ssize_t index, const py::bytearray& table, double time);

// That line as of now, written to a descriptor in one go: write_line(headers, index, table, told, file, torn), METH_FASTCALL.
// True if all of it was; then `told`, a list of one, has the number of the step, so that no interrupt comes in between.
// False if nothing was, or, where `torn`, a bytearray of one, is 1 then, some of it; nothing is if it is 1 before. Holds
// the GIL: it is for files, not for what waits for a reader.
PyObject* write_line(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace fastguard
