// Steps into the running aggregates of a history, many in one call.
#pragma once
#include "objects.h"

namespace fastguard {

// Takes `entries[start:end]`, each a fastguard.records.Entry, into a fastguard.records.TrainingHistory, and leaves it to the
// bit as TrainingHistory._push does. Stops at the first step that is not a usual one, and returns its place. No Python code
// runs in between, so an interrupt cannot leave the history half changed.
Py_ssize_t fold(py::handle history, py::List entries, Py_ssize_t start, Py_ssize_t end, py::handle bucket_type,
                py::handle summary_type);

// The first `count` headers as tuples of the given type, which has the fields of fastguard.records.slot.Header.
py::object read_headers(py::Bytes headers, Py_ssize_t count, py::handle type);

}  // namespace fastguard
