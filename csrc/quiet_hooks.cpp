#include "state.h"
#include "step_hooks.h"

#include <structmember.h>

namespace fastguard {

namespace {

// What a QuietHooks has beyond an OrderedDict, whose size only the running Python knows.
struct Quiet {
  PyObject *schedule, *is_awaited;  // a ScheduleState; a Python function that knows more. None or null: plain hooks
};

Py_ssize_t quiet_at;  // where it lies in the object

Quiet& quiet_of(PyObject* hooks) { return *reinterpret_cast<Quiet*>(reinterpret_cast<char*>(hooks) + quiet_at); }

// Whether a pass of the model that is made now would train it: in train mode, with autograd; -1 with an error set.
int is_training(const ScheduleState& schedule) {
  static PyObject* name = PyUnicode_InternFromString("training");
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* model = nullptr;
  if (PyWeakref_GetRef(schedule.model, &model) < 0) return -1;
#else
  PyObject* model = PyWeakref_GetObject(schedule.model);
  Py_INCREF(model);
  if (model == Py_None) Py_CLEAR(model);
#endif
  if (!model) return 0;
  PyObject* mode = PyObject_GetAttr(model, name);
  Py_DECREF(model);
  if (!mode) return -1;
  const int in_mode = PyObject_IsTrue(mode);
  Py_DECREF(mode);
  if (in_mode != 1) return in_mode;
  PyObject* enabled = PyObject_CallNoArgs(step_calls.is_grad_enabled);
  if (!enabled) return -1;
  const int with_grad = PyObject_IsTrue(enabled);
  Py_DECREF(enabled);
  return with_grad;
}

// Whether to look at a pass that is made now, as far as the schedule knows: as `BatchWatch._is_due`.
int is_due(ScheduleState& schedule, const Clock& clock) {
  if (!clock.may_wait) return 0;  // nothing may be read
  const bool training = clock.step >= schedule.training_from, evaluation = clock.step >= schedule.evaluation_from;
  if (!training && !evaluation && schedule.is_evaluation_due) return 0;
  const int trains = is_training(schedule);
  if (trains == 1) schedule.is_evaluation_due = 1;
  if (trains != 0) return trains < 0 ? -1 : training;
  return schedule.is_evaluation_due && evaluation;
}

int is_true(PyObject* hooks) {
  const Quiet& quiet = quiet_of(hooks);
  auto schedule = state_as<ScheduleState>(quiet.schedule, schedule_type);
  auto clock = schedule ? state_as<Clock>(schedule->clock, clock_type) : nullptr;
  if (!clock || PyDict_Size(hooks) != 1 || !step_calls.is_grad_enabled || !quiet.is_awaited || quiet.is_awaited == Py_None)
    return PyDict_Size(hooks) > 0;
  const int due = is_due(*schedule, *clock);
  if (due != 1) return due;
  PyObject* ask = quiet.is_awaited;
  Py_INCREF(ask);
  PyObject* awaited = PyObject_CallNoArgs(ask);
  Py_DECREF(ask);
  const int answer = awaited ? PyObject_IsTrue(awaited) : -1;
  Py_XDECREF(awaited);
  return answer;
}

// A copy of the model, or one in a file, has plain hooks.
PyObject* reduce(PyObject* hooks, PyObject*) {
  PyObject* items = PyMapping_Items(hooks);
  return items ? Py_BuildValue("O(N)", reinterpret_cast<PyObject*>(&PyODict_Type), items) : nullptr;
}

PyObject* reduce_ex(PyObject* hooks, PyObject*) { return reduce(hooks, nullptr); }

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(quiet_of(self).schedule);
  Py_VISIT(quiet_of(self).is_awaited);
  return PyODict_Type.tp_traverse(self, visit, arg);
}

int clear(PyObject* self) {
  Py_CLEAR(quiet_of(self).schedule);
  Py_CLEAR(quiet_of(self).is_awaited);
  return PyODict_Type.tp_clear(self);
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_CLEAR(quiet_of(self).schedule);
  Py_CLEAR(quiet_of(self).is_awaited);
  PyObject_GC_Track(self);  // as it expects
  PyODict_Type.tp_dealloc(self);
  Py_DECREF(type);
}

py::object make_type() {
  const Py_ssize_t align = alignof(Quiet);
  quiet_at = (PyODict_Type.tp_basicsize + align - 1) / align * align;
  static PyMemberDef members[] = {
      {"schedule", T_OBJECT, quiet_at, 0, nullptr},
      {"is_awaited", T_OBJECT, quiet_at + Py_ssize_t(sizeof(PyObject*)), 0, nullptr},
      {}};
  static PyMethodDef methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr},
                                  {"__reduce_ex__", reduce_ex, METH_O, nullptr},
                                  {}};
  static PyType_Slot slots[] = {{Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"fastguard._C.QuietHooks", int(quiet_at + Py_ssize_t(sizeof(Quiet))), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  const py::object bases = py::make_tuple(py::borrow(reinterpret_cast<PyObject*>(&PyODict_Type)));
  py::object type = py::steal(PyType_FromSpecWithBases(&spec, bases.ptr()));
  // The type shows no `__bool__`: dynamo, which would have to see through one, takes these for the hooks that they are.
  reinterpret_cast<PyTypeObject*>(type.ptr())->tp_as_number->nb_bool = is_true;
  return type;
}

}  // namespace

void add_quiet_hooks(PyObject* module) {
  if (PyObject_SetAttrString(module, "QuietHooks", make_type().ptr()) != 0) throw py::error_already_set();
}

}  // namespace fastguard
