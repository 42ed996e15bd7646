// What objects.h has, as arguments and results of functions that pybind11 binds. Only bindings.cpp includes this: each file
// that includes pybind11 takes seconds to compile.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "objects.h"

namespace pybind11 {
namespace detail {

template <>
struct type_caster<fastguard::py::handle> {
  PYBIND11_TYPE_CASTER(fastguard::py::handle, const_name("object"));
  bool load(handle source, bool) {
    value = source.ptr();
    return true;
  }
};

template <>
struct type_caster<fastguard::py::object> {
  PYBIND11_TYPE_CASTER(fastguard::py::object, const_name("object"));
  bool load(handle source, bool) {
    value = fastguard::py::borrow(source.ptr());
    return true;
  }
  static handle cast(fastguard::py::object source, return_value_policy, handle) { return source.release(); }
};

template <>
struct type_caster<fastguard::py::List> {
  PYBIND11_TYPE_CASTER(fastguard::py::List, const_name("list"));
  bool load(handle source, bool) {
    value = {source.ptr()};
    return PyList_Check(source.ptr());
  }
};

template <>
struct type_caster<fastguard::py::Bytes> {
  PYBIND11_TYPE_CASTER(fastguard::py::Bytes, const_name("bytearray"));
  bool load(handle source, bool) {
    value = {source.ptr()};
    return PyByteArray_Check(source.ptr());
  }
};

template <>
struct type_caster<fastguard::py::Held> {
  PYBIND11_TYPE_CASTER(fastguard::py::Held, const_name("Sequence"));
  bool load(handle source, bool) {
    value = fastguard::py::Held::of(source.ptr());
    return true;
  }
};

}  // namespace detail
}  // namespace pybind11

namespace fastguard::py {

// Has pybind11 raise what objects.h throws. It knows the exceptions of the standard library.
inline void translate(std::exception_ptr thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const error_already_set&) {  // the Python error is set
  } catch (const type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  }
}

}  // namespace fastguard::py
