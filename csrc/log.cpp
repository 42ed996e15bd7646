#include "log.h"

#include "line.h"
#include "slot.h"

namespace fastguard {

namespace {

long long count_of(const py::object& number) {
  return py::integer(number);
}

// Whether something has been found out about the model since the log was told of it.
bool owes_a_note(const LedgerState& ledger) {
  static PyObject *model = name_of("model"), *num_changes = name_of("num_changes");
  return count_of(attribute(attribute(ledger.history, model).ptr(), num_changes)) != ledger.num_noted;
}

// Whether a write is all that a line takes: the file need not be looked after, and no table is due.
bool may_append(const LogState& log, long long step) {
  if (!log.is_watched || (log.tensors_every != 0 && step % log.tensors_every == 0)) return false;
  return seconds() < log.look_at;
}

bool is_told(PyObject* told, long long step) {
  PyObject* newest = PyList_GET_ITEM(told, 0);
  if (newest == Py_None) return false;
  return count_of(py::borrow(newest)) == step;
}

// Whether the record of the step has more than a line of C++ says.
bool is_sampled(const RingState& ring, long long step) {
  if (!ring.samples || !PyDict_CheckExact(ring.samples) || !PyDict_GET_SIZE(ring.samples)) return false;
  const int found = PyDict_Contains(ring.samples, py::cast(step).ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

}  // namespace

bool write_newest(LedgerState& ledger, RingState& ring) {
  constexpr long long kTimedEvery = 16;  // fastguard/sinks/sink.py has the same
  auto counts = state_as<LineCounts>(ledger.log, lines_type);
  auto log = state_as<LogState>(ledger.file, log_type);
  if (!counts || !log || ledger.is_writing || ledger.due != ledger.sinks || !ledger.history) return false;
  const double* header = header_at(ring.headers, ring.newest);
  if (!header || !ring.told || !PyList_CheckExact(ring.told) || PyList_GET_SIZE(ring.told) != 1) return false;
  const auto step = static_cast<long long>(header[kStep]);
  if (is_sampled(ring, step) || is_told(ring.told, step) || owes_a_note(ledger) || !may_append(*log, step)) return false;
  PyObject* table = PyList_GET_ITEM(ring.found, 0);
  if (!is_line(table, ring.told, log->torn)) return false;
  const bool is_timed = step % kTimedEvery == 0;
  const double started = is_timed ? seconds() : 0.0;
  if (!append_line(header, table, ring.told, log->fd, log->torn)) return false;
  ++counts->num_lines;
  if (is_timed) {
    ++counts->num_timed;
    counts->seconds += seconds() - started;
  }
  return true;
}

}  // namespace fastguard
