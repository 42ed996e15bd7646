#include "callable.h"
#include "step.h"
#include "step_hooks.h"

namespace fastguard {

namespace {

// The loss in a call `guard.observe(loss)` or `guard.observe(loss=loss)`; null for any other.
PyObject* only_loss(PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static PyObject* name = name_of("loss");
  if (count == 2 && !names) return args[1];
  if (count != 1 || !names || PyTuple_GET_SIZE(names) != 1) return nullptr;
  PyObject* given = PyTuple_GET_ITEM(names, 0);
  if (given != name && PyUnicode_Compare(given, name) != 0) return nullptr;
  return args[1];
}

// The ordinary case of `Guard.observe`: the loss belongs to the newest slot, which has none.
bool put_in_newest(PyObject* self, PyObject* loss) {
  auto guard = state_as<GuardState>(self, guard_type);
  if (!guard || guard->is_loss_new || !loss || loss == Py_None) return false;
  auto run = state_as<RunState>(guard->run, run_type);
  auto ring = run ? state_as<RingState>(run->ring, ring_type) : nullptr;
  auto clock = run ? state_as<Clock>(run->clock, clock_type) : nullptr;
  if (!ring || !clock || !run->waits || run->marked == clock->step - 1 || !ring->num_open || ring->is_over) return false;
  double* header = header_at(ring->headers, ring->newest);
  if (!header || !put_loss(header, loss)) return false;
  forget_record(*ring);
  return true;
}

PyObject* observe(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  try {
    PyObject* loss = only_loss(args, count, names);
    if (loss && put_in_newest(args[0], loss)) Py_RETURN_NONE;
  } catch (...) {
    return py::raise_current();
  }
  return call_python(self, args, nargsf, names);
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  if (object && object != Py_None) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

// The guard in the `__dict__` of an optimizer, where it has one.
PyObject* own_guard(PyObject* optimizer) {
  static PyObject* name = PyUnicode_InternFromString("_guard");
  PyObject* attributes = PyObject_GenericGetDict(optimizer, nullptr);
  PyObject* guard = attributes && PyDict_Check(attributes) ? PyDict_GetItemWithError(attributes, name) : nullptr;
  if (!state_as<GuardState>(guard, guard_type)) guard = nullptr;
  Py_XINCREF(guard);
  Py_XDECREF(attributes);
  if (!guard) PyErr_Clear();  // Python asks again, and says what is wrong
  return guard;
}

PyObject* show_guard(PyObject* self, PyObject* optimizer, PyObject*) {
  if (!optimizer || optimizer == Py_None) {
    Py_INCREF(self);
    return self;
  }
  PyObject* guard = own_guard(optimizer);
  return guard ? guard : PyObject_CallOneArg(reinterpret_cast<Callable*>(self)->python, optimizer);
}

PyTypeObject method_type() {
  PyTypeObject type = callable_type<observe, false>("fastguard._C.observe_method");
  type.tp_flags |= Py_TPFLAGS_METHOD_DESCRIPTOR;  // called with the guard ahead: no bound method is made
  type.tp_descr_get = bind;
  return type;
}

PyTypeObject attribute_type() {
  PyTypeObject type = callable_type<call_python, false>("fastguard._C.guard_attribute");
  type.tp_descr_get = show_guard;
  return type;
}

PyTypeObject observe_type = method_type();
PyTypeObject shown_type = attribute_type();

}  // namespace

void add_guard_descriptors(PyObject* module) {
  add_type(module, observe_type);
  add_type(module, shown_type);
}

}  // namespace fastguard
