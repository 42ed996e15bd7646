// Python's objects and errors, as far as the files beside bindings.cpp need them. Only that one includes pybind11, which takes
// seconds to compile in each file; casters.h tells it of these types.
#pragma once
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fastguard::py {

// Thrown while a Python error is set, which stays set.
struct error_already_set : std::exception {};

// Others are std::invalid_argument for ValueError, std::out_of_range for IndexError, std::runtime_error for RuntimeError.
struct type_error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct value_error : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};
struct index_error : std::out_of_range {
  using std::out_of_range::out_of_range;
};

// Translates the C++ exception being handled into a Python error and returns null. Call it only in a catch block.
PyObject* raise_current();

class object;

// A borrowed reference.
class handle {
 public:
  handle(PyObject* ptr = nullptr) : ptr_(ptr) {}
  PyObject* ptr() const { return ptr_; }
  bool is_none() const { return ptr_ == Py_None; }
  explicit operator bool() const { return ptr_ != nullptr; }
  object attr(const char* name) const;
  object item(Py_ssize_t index) const;
  template <class... Handles>
  object operator()(const Handles&... arguments) const;

 protected:
  PyObject* ptr_;
};

// An owned reference. Made, copied and destroyed with the GIL held.
class object : public handle {
 public:
  object() = default;
  object(const object& other) : handle(other.ptr_) { Py_XINCREF(ptr_); }
  object(object&& other) noexcept : handle(other.release()) {}
  object& operator=(object other) noexcept {
    std::swap(ptr_, other.ptr_);
    return *this;
  }
  ~object() { Py_XDECREF(ptr_); }
  PyObject* release() { return std::exchange(ptr_, nullptr); }

 private:
  friend object steal(PyObject* ptr);
  friend object borrow(handle ptr);
  struct Owned {};
  object(PyObject* ptr, Owned) : handle(ptr) {}
};

// Takes over a new reference; throws if there is none, for then a Python error is set.
inline object steal(PyObject* ptr) {
  if (!ptr) throw error_already_set();
  return object(ptr, object::Owned());
}

inline object borrow(handle ptr) {
  Py_XINCREF(ptr.ptr());
  return object(ptr.ptr(), object::Owned());
}

inline object none() { return borrow(Py_None); }
inline object handle::attr(const char* name) const { return steal(PyObject_GetAttrString(ptr_, name)); }
inline object handle::item(Py_ssize_t index) const { return steal(PySequence_GetItem(ptr_, index)); }

template <class... Handles>
object handle::operator()(const Handles&... arguments) const {
  return steal(PyObject_CallFunctionObjArgs(ptr_, handle(arguments).ptr()..., nullptr));
}

// Values as Python objects.
inline object cast(object value) { return value; }
inline object cast(bool value) { return borrow(value ? Py_True : Py_False); }
inline object cast(double value) { return steal(PyFloat_FromDouble(value)); }
inline object cast(int value) { return steal(PyLong_FromLong(value)); }
inline object cast(unsigned value) { return steal(PyLong_FromUnsignedLong(value)); }
inline object cast(long value) { return steal(PyLong_FromLong(value)); }
inline object cast(unsigned long value) { return steal(PyLong_FromUnsignedLong(value)); }
inline object cast(long long value) { return steal(PyLong_FromLongLong(value)); }
inline object cast(unsigned long long value) { return steal(PyLong_FromUnsignedLongLong(value)); }
inline object cast(const std::string& text) { return steal(PyUnicode_FromStringAndSize(text.data(), Py_ssize_t(text.size()))); }
inline object cast(const char* text) { return steal(PyUnicode_FromString(text)); }

template <class T>
object cast(const std::vector<T>& values) {
  object list = steal(PyList_New(Py_ssize_t(values.size())));
  for (size_t i = 0; i < values.size(); ++i) PyList_SET_ITEM(list.ptr(), Py_ssize_t(i), cast(values[i]).release());
  return list;
}

template <class... Values>
object make_tuple(Values&&... values) {
  object tuple = steal(PyTuple_New(sizeof...(values)));
  Py_ssize_t i = 0;
  (PyTuple_SET_ITEM(tuple.ptr(), i++, cast(std::forward<Values>(values)).release()), ...);
  return tuple;
}

inline object bytes(const void* data, size_t size) {
  return steal(PyBytes_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size)));
}
inline object bytearray(const void* data, size_t size) {
  return steal(PyByteArray_FromStringAndSize(static_cast<const char*>(data), Py_ssize_t(size)));
}

// Arguments that must be of one type; casters.h checks them.
struct List : handle {};
struct Bytes : handle {};  // a bytearray
// A tuple of our own of what any sequence has: another thread may change a list while the lock is released.
struct Held : object {
  static Held of(handle sequence) { return {steal(PySequence_Tuple(sequence.ptr()))}; }
  PyObject* const* items() const { return reinterpret_cast<PyTupleObject*>(ptr_)->ob_item; }
  size_t size() const { return size_t(PyTuple_GET_SIZE(ptr_)); }
};

// Python objects as values. Each throws if it is given something else.
double number(handle given);
Py_ssize_t integer(handle given);
std::string text(handle given);

// Gives up the GIL while it lives.
class ReleaseLock {
 public:
  ReleaseLock() : state_(PyEval_SaveThread()) {}
  ReleaseLock(const ReleaseLock&) = delete;
  ~ReleaseLock() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

}  // namespace fastguard::py
