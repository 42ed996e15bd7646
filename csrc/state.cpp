#include "state.h"

#include <structmember.h>

#include <chrono>
#include <cstddef>
#include <cstring>

#include "slot.h"

namespace fastguard {

StepCalls step_calls;

namespace {

#define OBJECT(State, member, name) {name, T_OBJECT_EX, offsetof(State, member), 0, nullptr}
#define FLAG(State, member, name) {name, T_BOOL, offsetof(State, member), 0, nullptr}
#define SIZE(State, member, name) {name, T_PYSSIZET, offsetof(State, member), 0, nullptr}
#define NUMBER(State, member, name) {name, T_LONGLONG, offsetof(State, member), 0, nullptr}
#define REAL(State, member, name) {name, T_DOUBLE, offsetof(State, member), 0, nullptr}

PyMemberDef clock_members[] = {NUMBER(Clock, step, "step"), FLAG(Clock, may_wait, "may_wait"), {}};
PyMemberDef ring_members[] = {OBJECT(RingState, headers, "headers"),
                              OBJECT(RingState, found, "found"),
                              OBJECT(RingState, told, "told"),
                              OBJECT(RingState, made, "made"),
                              OBJECT(RingState, samples, "samples"),
                              SIZE(RingState, newest, "newest"),
                              SIZE(RingState, num_open, "num_open"),
                              SIZE(RingState, limit, "limit"),
                              SIZE(RingState, end, "end"),
                              SIZE(RingState, stride, "stride"),
                              REAL(RingState, calm, "calm"),
                              FLAG(RingState, is_over, "is_over"),
                              {}};
PyMemberDef run_members[] = {{"clock", T_OBJECT_EX, offsetof(RunState, clock), READONLY, nullptr},
                             OBJECT(RunState, ring, "ring"),
                             OBJECT(RunState, clip, "clip"),
                             OBJECT(RunState, skip_nonfinite, "skip_nonfinite"),
                             OBJECT(RunState, copies, "copies"),
                             NUMBER(RunState, wakes_at, "wakes_at"),
                             NUMBER(RunState, ends_at, "ends_at"),
                             NUMBER(RunState, marked, "marked"),
                             NUMBER(RunState, mark, "mark"),
                             REAL(RunState, buffers_at, "buffers_at"),
                             FLAG(RunState, is_short, "is_short"),
                             FLAG(RunState, has_more_to_do, "has_more_to_do"),
                             FLAG(RunState, marks_ends, "marks_ends"),
                             FLAG(RunState, waits, "waits"),
                             FLAG(RunState, asks_clip, "asks_clip"),
                             {}};
PyMemberDef hooks_members[] = {OBJECT(HooksState, run, "_run"),
                               OBJECT(HooksState, ledger, "_ledger"),
                               OBJECT(HooksState, handles, "_handles"),
                               OBJECT(HooksState, undo, "_undo"),
                               OBJECT(HooksState, rescue, "_rescue"),
                               OBJECT(HooksState, scales, "_scales"),
                               SIZE(HooksState, depth, "_depth"),
                               FLAG(HooksState, silent, "_silent"),
                               {}};
PyMemberDef ledger_members[] = {OBJECT(LedgerState, sinks, "sinks"),
                                OBJECT(LedgerState, due, "_due"),
                                OBJECT(LedgerState, log, "_only_log"),
                                OBJECT(LedgerState, file, "_only_file"),
                                OBJECT(LedgerState, history, "_history"),
                                NUMBER(LedgerState, num_noted, "_num_noted"),
                                FLAG(LedgerState, writes_lines, "writes_lines"),
                                FLAG(LedgerState, is_writing, "is_writing"),
                                {}};
PyMemberDef lines_members[] = {NUMBER(LineCounts, num_lines, "num_lines"),
                               NUMBER(LineCounts, num_timed, "num_lines_timed"),
                               REAL(LineCounts, seconds, "line_seconds"),
                               {}};
PyMemberDef log_members[] = {OBJECT(LogState, torn, "_torn"),
                             NUMBER(LogState, tensors_every, "tensors_every"),
                             REAL(LogState, look_at, "_look_at"),
                             {"_fd", T_INT, offsetof(LogState, fd), 0, nullptr},
                             FLAG(LogState, is_watched, "_is_watched"),
                             {}};
PyMemberDef guard_members[] = {OBJECT(GuardState, run, "_run"), FLAG(GuardState, is_loss_new, "_is_loss_new"), {}};
PyMemberDef schedule_members[] = {NUMBER(ScheduleState, training_from, "training_from"),
                                  NUMBER(ScheduleState, evaluation_from, "evaluation_from"),
                                  FLAG(ScheduleState, is_evaluation_due, "is_evaluation_due"),
                                  {}};

Clock& clock_of(PyObject* run) { return *reinterpret_cast<Clock*>(reinterpret_cast<RunState*>(run)->clock); }

// `run.step` and `run.may_wait` are those of its clock.
PyObject* get_step(PyObject* run, void*) { return PyLong_FromLongLong(clock_of(run).step); }

int set_step(PyObject* run, PyObject* value, void*) {
  if (!value) return PyErr_SetString(PyExc_TypeError, "`step` cannot be deleted"), -1;
  const long long step = PyLong_AsLongLong(value);
  if (step == -1 && PyErr_Occurred()) return -1;
  clock_of(run).step = step;
  return 0;
}

PyObject* get_may_wait(PyObject* run, void*) { return PyBool_FromLong(clock_of(run).may_wait); }

int set_may_wait(PyObject* run, PyObject* value, void*) {
  if (!value || !PyBool_Check(value)) return PyErr_SetString(PyExc_TypeError, "`may_wait` must be a bool"), -1;
  clock_of(run).may_wait = value == Py_True;
  return 0;
}

PyGetSetDef run_properties[] = {{"step", get_step, set_step, nullptr, nullptr},
                                {"may_wait", get_may_wait, set_may_wait, nullptr, nullptr},
                                {}};

PyObject* new_run(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* run = type->tp_alloc(type, 0);
  if (!run) return nullptr;
  PyObject* clock = clock_type.tp_alloc(&clock_type, 0);
  reinterpret_cast<RunState*>(run)->clock = clock;
  if (!clock) Py_CLEAR(run);
  return run;
}

PyObject* new_schedule(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *clock, *model;
  if (!PyArg_ParseTuple(args, "O!O", &clock_type, &clock, &model)) return nullptr;
  PyObject* reference = PyWeakref_NewRef(model, nullptr);
  PyObject* schedule = reference ? type->tp_alloc(type, 0) : nullptr;
  if (!schedule) return Py_XDECREF(reference), nullptr;
  auto state = reinterpret_cast<ScheduleState*>(schedule);
  Py_INCREF(clock);
  state->clock = clock;
  state->model = reference;
  return schedule;
}

template <class State>
PyTypeObject state_type(const char* name, PyMemberDef* members) {
  using Held = Holding<State::kNumObjects>;
  PyTypeObject type = empty_type();
  type.tp_name = name;
  type.tp_basicsize = sizeof(State);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;
  type.tp_members = members;
  type.tp_new = PyType_GenericNew;
  type.tp_traverse = Held::traverse;
  type.tp_clear = Held::clear;
  type.tp_dealloc = Held::dealloc;
  return type;
}

PyTypeObject plain_clock_type() {
  PyTypeObject type = empty_type();
  type.tp_name = "fastguard._C.Clock";
  type.tp_basicsize = sizeof(Clock);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_members = clock_members;
  type.tp_new = PyType_GenericNew;
  return type;
}

PyTypeObject full_run_type() {
  PyTypeObject type = state_type<RunState>("fastguard._C.RunState", run_members);
  type.tp_getset = run_properties;
  type.tp_new = new_run;
  return type;
}

PyTypeObject full_schedule_type() {
  PyTypeObject type = state_type<ScheduleState>("fastguard._C.ScheduleState", schedule_members);
  type.tp_new = new_schedule;
  return type;
}

}  // namespace

PyTypeObject clock_type = plain_clock_type();
PyTypeObject ring_type = state_type<RingState>("fastguard._C.RingState", ring_members);
PyTypeObject run_type = full_run_type();
PyTypeObject hooks_type = state_type<HooksState>("fastguard._C.HooksState", hooks_members);
PyTypeObject ledger_type = state_type<LedgerState>("fastguard._C.LedgerState", ledger_members);
PyTypeObject lines_type = state_type<LineCounts>("fastguard._C.LineCounts", lines_members);
PyTypeObject log_type = state_type<LogState>("fastguard._C.LogState", log_members);
PyTypeObject guard_type = state_type<GuardState>("fastguard._C.GuardState", guard_members);
PyTypeObject schedule_type = full_schedule_type();

double* header_at(PyObject* headers, Py_ssize_t index) {
  const Py_ssize_t bytes = kHeaderWords * Py_ssize_t(sizeof(double));
  if (!headers || !PyByteArray_CheckExact(headers) || index < 0 || index >= PyByteArray_GET_SIZE(headers) / bytes)
    return nullptr;
  return reinterpret_cast<double*>(PyByteArray_AS_STRING(headers) + index * bytes);
}

void forget_record(RingState& ring) {
  PyObject* made = ring.made;
  Py_INCREF(Py_None);
  ring.made = Py_None;
  Py_XDECREF(made);
}

PyObject* name_of(const char* text) {
  return py::steal(PyUnicode_InternFromString(text)).release();
}

py::object attribute(PyObject* object, PyObject* name) {
  return py::steal(PyObject_GetAttr(object, name));
}

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void set_step_calls(py::handle get_num_threads, py::handle is_grad_enabled, py::handle num_operations) {
  const auto held = [](py::handle callable) { return py::borrow(callable).release(); };  // for ever, as is the module
  step_calls = {held(get_num_threads), held(is_grad_enabled), held(num_operations)};
}

int torch_num_threads() {
  return int(py::integer(py::steal(PyObject_CallNoArgs(step_calls.get_num_threads))));
}

void add_type(PyObject* module, PyTypeObject& type) {
  const char* name = std::strrchr(type.tp_name, '.') + 1;
  if (PyType_Ready(&type) < 0 || PyObject_SetAttrString(module, name, reinterpret_cast<PyObject*>(&type)) != 0)
    throw py::error_already_set();
}

void add_state(PyObject* module) {
  for (PyTypeObject* type : {&clock_type, &ring_type, &run_type, &hooks_type, &ledger_type, &lines_type, &log_type, &guard_type,
                             &schedule_type})
    add_type(module, *type);
}

}  // namespace fastguard
