// A step as a line of a log.
#pragma once
#include "objects.h"

namespace fastguard {

// The slot `index` of `headers`, with the rows in `table`, as a line of JSON: what fastguard.sinks.flatten_step gives, after
// `step` the `time`, in the very text that json.dumps would make of it. Names of tensors that are not finite are left out.
py::object json_line(py::Bytes headers, Py_ssize_t index, py::Bytes table, double time);

// That line as of now, written to a descriptor in one go. True if all of it was; then `told`, a list of one, has the number of
// the step, so that no interrupt comes in between. False if nothing was, or, where `torn`, a bytearray of one, is 1 then, some
// of it; nothing is if it is 1 before, or without a file. Holds the GIL: it is for files, not for what waits for a reader.
// `is_line` says whether the arguments are what they have to be. Throws.
bool append_line(const double* header, PyObject* table, PyObject* told, int file, PyObject* torn);
bool is_line(PyObject* table, PyObject* told, PyObject* torn);

}  // namespace fastguard
