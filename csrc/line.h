// A step as a line of a log.
#pragma once
#include <pybind11/pybind11.h>

namespace fastguard {

namespace py = pybind11;

// The slot `index` of `headers`, with the rows in `table`, as a line of JSON: what fastguard.sinks.flatten_step gives, after
// `step` the `time`, in the very text that json.dumps would make of it. Names of tensors that are not finite are left out.
py::bytes json_line(const py::bytearray& headers, Py_ssize_t index, const py::bytearray& table, double time);

}  // namespace fastguard
