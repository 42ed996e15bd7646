#include "log.h"

#include "line.h"
#include "slot.h"

namespace fastguard {

namespace {

// Names of attributes that are read at each line.
struct Names {
  PyObject *model = name_of("model"), *num_changes = name_of("num_changes"), *take_line = name_of("_take_line"),
           *look_at = name_of("_look_at"), *is_watched = name_of("_is_watched"), *tensors_every = name_of("tensors_every"),
           *fd = name_of("_fd"), *torn = name_of("_torn"), *num_lines = name_of("num_lines"),
           *num_timed = name_of("num_lines_timed"), *line_seconds = name_of("line_seconds");
};

const Names& names() {
  static const Names all;
  return all;
}

long long count_of(const py::object& number) {
  return py::integer(number);
}

double monotonic() {
  return py::number(py::steal(PyObject_CallNoArgs(step_calls.monotonic)));
}

// The JsonlSink in a SafeSink; null if it is another sink, or of a subclass, which may write in its own way.
py::object plain_log(PyObject* safe) {
  const py::object method = attribute(safe, names().take_line);
  if (!PyMethod_Check(method.ptr())) return py::object();
  PyObject* sink = PyMethod_GET_SELF(method.ptr());
  return reinterpret_cast<PyObject*>(Py_TYPE(sink)) == step_calls.log_type ? py::borrow(sink) : py::object();
}

// Whether something has been found out about the model since the log was told of it.
bool owes_a_note(const LedgerState& ledger) {
  return count_of(attribute(attribute(ledger.history, names().model).ptr(), names().num_changes)) != ledger.num_noted;
}

// Whether a write is all that a line takes: the file need not be looked after, and no table is due.
bool may_append(PyObject* log, long long step) {
  if (attribute(log, names().is_watched).ptr() != Py_True) return false;
  const long long every = count_of(attribute(log, names().tensors_every));
  if (every != 0 && step % every == 0) return false;
  const py::object look_at = attribute(log, names().look_at);
  return PyFloat_CheckExact(look_at.ptr()) && monotonic() < PyFloat_AS_DOUBLE(look_at.ptr());
}

void add_to(PyObject* object, PyObject* name, const py::object& amount) {
  const py::object sum = py::steal(PyNumber_Add(attribute(object, name).ptr(), amount.ptr()));
  if (PyObject_SetAttr(object, name, sum.ptr()) != 0) throw py::error_already_set();
}

bool is_told(PyObject* told, long long step) {
  PyObject* newest = PyList_GET_ITEM(told, 0);
  if (newest == Py_None) return false;
  return count_of(py::borrow(newest)) == step;
}

}  // namespace

bool write_newest(LedgerState& ledger, RingState& ring) {
  constexpr long long kTimedEvery = 16;  // fastguard/sinks/sink.py has the same
  PyObject* safe = ledger.log;
  if (!safe || safe == Py_None || ledger.is_writing || ledger.due != ledger.sinks || !ledger.history || !step_calls.monotonic)
    return false;
  const double* header = header_at(ring.headers, ring.newest);
  if (!header || !ring.told || !PyList_CheckExact(ring.told) || PyList_GET_SIZE(ring.told) != 1) return false;
  const auto step = static_cast<long long>(header[kStep]);
  if (is_told(ring.told, step) || owes_a_note(ledger)) return false;
  const py::object kept = py::borrow(safe);
  const py::object log = plain_log(safe);
  if (!log || !may_append(log.ptr(), step)) return false;
  const py::object torn = attribute(log.ptr(), names().torn);
  PyObject* table = PyList_GET_ITEM(ring.found, 0);
  if (!is_line(table, ring.told, torn.ptr())) return false;
  const bool is_timed = step % kTimedEvery == 0;
  const double started = is_timed ? monotonic() : 0.0;
  if (!append_line(header, table, ring.told, int(count_of(attribute(log.ptr(), names().fd))), torn.ptr())) return false;
  add_to(safe, names().num_lines, py::cast(1));
  if (is_timed) {
    add_to(safe, names().num_timed, py::cast(1));
    add_to(safe, names().line_seconds, py::cast(monotonic() - started));
  }
  return true;
}

}  // namespace fastguard
