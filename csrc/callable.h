// A C++ callable that replaces a Python function and calls it for every case that it does not handle itself.
#pragma once
#include "state.h"

#include <structmember.h>

#include <cstddef>

namespace fastguard {

struct Callable {
  static constexpr int kNumObjects = 2;
  PyObject_HEAD
  PyObject *python, *hooks;  // the function; the HooksState of step hooks, else null
  vectorcallfunc call;
};

inline PyObject* call_python(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  return PyObject_Vectorcall(reinterpret_cast<Callable*>(self)->python, args, nargsf, names);
}

// What inspect, documentation and dynamo ask of a function is the Python function's.
inline PyObject* attribute_of(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Callable*>(self)->python, name);
}

template <vectorcallfunc function, bool has_hooks>
PyObject* new_callable(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *hooks = nullptr, *python = nullptr;
  const bool parsed = has_hooks ? PyArg_ParseTuple(args, "O!O", &hooks_type, &hooks, &python) : PyArg_ParseTuple(args, "O", &python);
  PyObject* self = parsed ? type->tp_alloc(type, 0) : nullptr;
  if (!self) return nullptr;
  auto callable = reinterpret_cast<Callable*>(self);
  Py_INCREF(python);
  Py_XINCREF(hooks);
  callable->python = python;
  callable->hooks = hooks;
  callable->call = function;
  return self;
}

inline PyObject* doc_of(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Callable*>(self)->python, "__doc__");
}

inline PyGetSetDef callable_properties[] = {{"__doc__", doc_of, nullptr, nullptr, nullptr}, {}};
inline PyMemberDef callable_members[] = {{"__wrapped__", T_OBJECT_EX, offsetof(Callable, python), READONLY, nullptr}, {}};

// A type of callables that call `function`.
template <vectorcallfunc function, bool has_hooks>
PyTypeObject callable_type(const char* name) {
  using Held = Holding<Callable::kNumObjects>;
  PyTypeObject type = empty_type();
  type.tp_name = name;
  type.tp_basicsize = sizeof(Callable);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Callable, call);
  type.tp_call = PyVectorcall_Call;
  type.tp_getattro = attribute_of;
  type.tp_members = callable_members;
  type.tp_getset = callable_properties;
  type.tp_new = new_callable<function, has_hooks>;
  type.tp_traverse = Held::traverse;
  type.tp_clear = Held::clear;
  type.tp_dealloc = Held::dealloc;
  return type;
}

}  // namespace fastguard
