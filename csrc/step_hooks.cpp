#include "step_hooks.h"

#include <algorithm>
#include <cmath>

#include "buffers.h"
#include "callable.h"
#include "log.h"
#include "slot.h"
#include "step.h"

namespace fastguard {

namespace {

// What a step needs of the parts of a guard, borrowed from the hooks.
struct Parts {
  HooksState* hooks;
  RunState* run;
  RingState* ring;
  LedgerState* ledger;
  Clock* clock;

  explicit Parts(PyObject* callable) {
    hooks = reinterpret_cast<HooksState*>(reinterpret_cast<Callable*>(callable)->hooks);
    run = state_as<RunState>(hooks->run, run_type);
    ledger = state_as<LedgerState>(hooks->ledger, ledger_type);
    ring = run ? state_as<RingState>(run->ring, ring_type) : nullptr;
    clock = run ? state_as<Clock>(run->clock, clock_type) : nullptr;
  }
  bool are_there() const { return run && ring && ledger && clock; }
};

bool is_plain(const HooksState& hooks) {
  return !hooks.depth && hooks.undo == Py_None && hooks.rescue == Py_None && hooks.scales;
}

bool is_called_plainly(PyObject* args, PyObject* kwargs) {
  if (!PyTuple_CheckExact(args) || !PyDict_CheckExact(kwargs) || PyDict_GET_SIZE(kwargs)) return false;
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  return count == 1 || (count == 2 && PyTuple_GET_ITEM(args, 1) == Py_None);  // accelerate's wrapper calls step(None)
}

// Whether a GradScaler has left something with the optimizer.
bool has_scaler_attributes(PyObject* optimizer) {
  static PyObject *found_inf = name_of("found_inf"), *grad_scale = name_of("grad_scale");
  const py::object attributes = py::steal(PyObject_GenericGetDict(optimizer, nullptr));
  const bool found = PyDict_GetItemWithError(attributes.ptr(), found_inf) || PyDict_GetItemWithError(attributes.ptr(), grad_scale);
  if (PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// The norm that a fixed clip policy clips to; infinity without one.
py::object limit_of(PyObject* clip) {
  static PyObject* name = name_of("limit");
  return clip == Py_None ? py::cast(HUGE_VAL) : attribute(clip, name);
}

// Whether the look that is due within a batch is put off, as where the losses are about the best: see `Checkup`.
bool puts_off(RingState& ring) {
  if (ring.num_open >= ring.end || ring.stride < 1) return false;
  double sum = 0.0, count = 0.0;
  for (Py_ssize_t i = std::max(Py_ssize_t(0), ring.num_open - ring.stride); i < ring.num_open; ++i) {
    const double* header = header_at(ring.headers, i);
    if (!header || !(int(header[kFlags]) & kHasLoss)) continue;
    sum += header[kLoss];
    ++count;
  }
  if (count > 0.0 && !(sum <= ring.calm * count)) return false;
  ring.limit = std::min(ring.end, ring.limit + ring.stride);
  return true;
}

// Whether the next step may be taken here. As the conditions of `Hooks._before`.
bool may_take(const Parts& parts, PyObject* optimizer, PyObject* args, PyObject* kwargs) {
  if (!parts.are_there() || !is_plain(*parts.hooks) || !is_called_plainly(args, kwargs)) return false;
  const RunState& run = *parts.run;
  const long long step = parts.clock->step;
  if (!run.is_short || run.asks_clip || step >= run.wakes_at || double(step) >= run.buffers_at) return false;
  if (!run.clip || !run.skip_nonfinite) return false;
  RingState& ring = *parts.ring;
  if ((ring.num_open >= ring.limit && !puts_off(ring)) || !header_at(ring.headers, ring.num_open) || !is_step_list(ring.found)) return false;
  PyObject* handles = parts.hooks->handles;
  if (!handles || !PyList_CheckExact(handles) || !PyList_GET_SIZE(handles)) return false;
  return step_calls.get_num_threads && !has_scaler_attributes(optimizer);
}

// What is left to do where a step is no clean one.
PyObject* finish(const Parts& parts, PyObject* const* args, int outcome, double started) {
  static PyObject* name = name_of("_finish");
  const py::object bits = py::cast(outcome);
  // Python's clock may be another one: what the step has taken so far is what counts.
  const py::object elapsed = py::cast(seconds() - started);
  PyObject* const given[] = {reinterpret_cast<PyObject*>(parts.hooks), args[0], args[1], args[2], bits.ptr(), elapsed.ptr()};
  return PyObject_VectorcallMethod(name, given, 6, nullptr);
}

// Has the newest step written by `Ledger.write`, where a line does not say all of it.
void write_in_python(PyObject* ledger) {
  static PyObject* name = name_of("write");
  py::steal(PyObject_CallMethodNoArgs(ledger, name));
}

// The gradients of the step measured, clipped and in their slot; null with `left` set where that is for Python.
PyObject* take_here(const Parts& parts, PyObject* const* args, bool& left) {
  static PyObject* name = name_of("param_groups");
  left = true;
  if (!may_take(parts, args[0], args[1], args[2])) return nullptr;
  const py::object limit = limit_of(parts.run->clip);
  if (!PyFloat_CheckExact(limit.ptr())) return nullptr;
  RingState& ring = *parts.ring;
  const double started = seconds();
  if (ring.num_open && parts.ledger->writes_lines && !write_newest(*parts.ledger, ring)) {
    write_in_python(reinterpret_cast<PyObject*>(parts.ledger));
    if (!may_take(parts, args[0], args[1], args[2])) return nullptr;  // a sink has closed the guard, say
  }
  left = false;
  const py::object groups = attribute(args[0], name);
  Question question;
  question.groups = groups.ptr();
  question.headers = ring.headers;
  question.found = ring.found;
  question.limits = limit.ptr();
  question.index = ring.num_open;
  question.step = double(parts.clock->step);
  question.num_threads = 0;
  question.skip_nonfinite = PyObject_IsTrue(parts.run->skip_nonfinite) == 1;
  question.scales = PyObject_IsTrue(parts.hooks->scales) == 1;
  forget_record(ring);  // before the step is taken: its table is written over unless somebody else holds the record
  const int outcome = take(question);
  if (outcome != 0 || !copy_buffers(parts.run->copies)) return finish(parts, args, outcome, started);
  ring.newest = ring.num_open++;
  ++parts.clock->step;
  header_at(ring.headers, ring.newest)[kOverhead] = seconds() - started;
  Py_RETURN_NONE;
}

// As the end of `Hooks._before`: a step that raised leaves nothing to a scaler.
void abandon(const Parts& parts, PyObject* optimizer) {
  static PyObject *scaler = PyUnicode_InternFromString("_scaler"), *name = PyUnicode_InternFromString("abandon");
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* const hooks = reinterpret_cast<PyObject*>(parts.hooks);
  PyObject* given[] = {PyObject_GetAttr(hooks, scaler), optimizer};
  PyObject* done = given[0] ? PyObject_VectorcallMethod(name, given, 2, nullptr) : nullptr;
  if (!done) PyErr_WriteUnraisable(hooks);
  Py_XDECREF(given[0]);
  Py_XDECREF(done);
  PyErr_Restore(type, value, trace);
}

PyObject* before_step(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  if (PyVectorcall_NARGS(nargsf) != 3 || names) return call_python(self, args, nargsf, names);
  const Parts parts(self);
  bool left = false;
  PyObject* given = nullptr;
  try {
    given = take_here(parts, args, left);
  } catch (...) {
    py::raise_current();
  }
  if (PyErr_Occurred()) {
    abandon(parts, args[0]);
    return nullptr;
  }
  return left ? call_python(self, args, nargsf, names) : given;
}

// Notes how many operations autograd has recorded when the step ends. A loss recorded later belongs to the next step.
bool mark_end(const Parts& parts) {
  PyObject* count = PyObject_CallNoArgs(step_calls.num_operations);
  const long long number = count ? PyLong_AsLongLong(count) : -1;
  Py_XDECREF(count);
  if (PyErr_Occurred()) return false;
  parts.run->mark = number;
  parts.run->marked = parts.clock->step - 1;
  return true;
}

PyObject* after_step(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  const Parts parts(self);
  const HooksState& hooks = *parts.hooks;
  if (!parts.are_there() || hooks.depth || hooks.undo != Py_None || hooks.rescue != Py_None || parts.run->has_more_to_do ||
      parts.clock->step > parts.run->ends_at)
    return call_python(self, args, nargsf, names);
  if (parts.run->marks_ends && !hooks.silent) {
    if (!parts.run->is_short) return call_python(self, args, nargsf, names);  // a step that is no part of the run, say
    if (!mark_end(parts)) return nullptr;
  }
  parts.hooks->silent = 0;
  Py_RETURN_NONE;
}

PyTypeObject pre_hook_type = callable_type<before_step, true>("fastguard._C.StepPreHook");
PyTypeObject post_hook_type = callable_type<after_step, true>("fastguard._C.StepPostHook");

}  // namespace

void add_step_hooks(PyObject* module) {
  add_type(module, pre_hook_type);
  add_type(module, post_hook_type);
}

}  // namespace fastguard
