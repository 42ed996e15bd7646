// The part of a guard's state that Python and C++ share: attributes of Python classes that lie in C structs.
//
// Each struct is the base class of a Python class (see fastguard/kernels/cpu.py), whose methods read and write the members
// under the same names. C++ reads them without a dictionary, a frame or an allocation. The objects that a struct holds come
// first, straight after the head, so that one function visits those of every type. All of this needs the GIL.
#pragma once
#include "objects.h"

namespace fastguard {

// The step number of a run, and whether the host may read tensors. It outlives the run: hooks on the model hold it.
struct Clock {
  PyObject_HEAD
  long long step;
  char may_wait;
};

// fastguard.step.ring.Ring
struct RingState {
  static constexpr int kNumObjects = 5;
  PyObject_HEAD
  PyObject *headers, *found, *told, *made, *samples;
  Py_ssize_t newest, num_open, limit, end, stride;
  double calm;
  char is_over;
};

// fastguard.step.run.Run
struct RunState {
  static constexpr int kNumObjects = 5;
  PyObject_HEAD
  PyObject *clock, *ring, *clip, *skip_nonfinite, *copies;
  long long wakes_at, ends_at, marked, mark;
  double buffers_at;
  char is_short, has_more_to_do, marks_ends, waits, asks_clip;
};

// fastguard.step.hooks.Hooks
struct HooksState {
  static constexpr int kNumObjects = 6;
  PyObject_HEAD
  PyObject *run, *ledger, *handles, *undo, *rescue, *scales;
  Py_ssize_t depth;
  char silent;
};

// fastguard.step.ledger.Ledger
struct LedgerState {
  static constexpr int kNumObjects = 5;
  PyObject_HEAD
  PyObject *sinks, *due, *log, *file, *history;  // `log` is a SafeSink around `file`, which is a JsonlSink
  long long num_noted;
  char writes_lines, is_writing;
};

// fastguard.sinks.SafeSink: the lines that it was given
struct LineCounts {
  static constexpr int kNumObjects = 0;
  PyObject_HEAD
  long long num_lines, num_timed;
  double seconds;
};

// fastguard.sinks.JsonlSink
struct LogState {
  static constexpr int kNumObjects = 1;
  PyObject_HEAD
  PyObject* torn;
  long long tensors_every;
  double look_at;
  int fd;
  char is_watched;
};

// fastguard.step.guard.Guard
struct GuardState {
  static constexpr int kNumObjects = 1;
  PyObject_HEAD
  PyObject* run;
  char is_loss_new;
};

// See fastguard.observers.batches.schedule_for: from which steps on a forward pass is to be looked at.
struct ScheduleState {
  static constexpr int kNumObjects = 2;
  PyObject_HEAD
  PyObject *clock, *model;  // a Clock, and a weak reference
  long long training_from, evaluation_from;
  char is_evaluation_due;
};

extern PyTypeObject clock_type, ring_type, run_type, hooks_type, ledger_type, lines_type, log_type, guard_type, schedule_type;

// `object` as a State of that type, or null, also for null.
template <class State>
State* state_as(PyObject* object, PyTypeObject& type) {
  return object && PyObject_TypeCheck(object, &type) ? reinterpret_cast<State*>(object) : nullptr;
}

// The header of the slot `index`; null where `headers` is no bytearray that holds it.
double* header_at(PyObject* headers, Py_ssize_t index);

// The newest slot is about to change: a record that was made of it is no longer its record.
void forget_record(RingState& ring);

// An interned name, to be kept; an attribute. Both throw.
PyObject* name_of(const char* text);
py::object attribute(PyObject* object, PyObject* name);

// tp_traverse, tp_clear and tp_dealloc of a type whose instances hold `count` objects straight after the head.
template <int count>
struct Holding {
  static PyObject** objects(PyObject* self) { return reinterpret_cast<PyObject**>(self + 1); }
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    for (int i = 0; i < count; ++i) Py_VISIT(objects(self)[i]);
    return 0;
  }
  static int clear(PyObject* self) {
    for (int i = 0; i < count; ++i) Py_CLEAR(objects(self)[i]);
    return 0;
  }
  static void dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    Py_TYPE(self)->tp_free(self);
  }
};

// What C++ calls of torch at a step: built-in functions, whose calls make no frame.
struct StepCalls {
  PyObject *get_num_threads, *is_grad_enabled, *num_operations;
};
extern StepCalls step_calls;

// A static type to be filled in.
inline PyTypeObject empty_type() {
  const PyVarObject heads[] = {PyVarObject_HEAD_INIT(nullptr, 0)};
  PyTypeObject type = PyTypeObject();
  type.ob_base = heads[0];
  return type;
}

void set_step_calls(py::handle get_num_threads, py::handle is_grad_enabled, py::handle num_operations);

int torch_num_threads();  // asks torch; throws

double seconds();  // the clock of time.monotonic

// Adds the types to the module; `type` under the last part of its name.
void add_state(PyObject* module);
void add_type(PyObject* module, PyTypeObject& type);

}  // namespace fastguard
