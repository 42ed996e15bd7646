#include "objects.h"

namespace fastguard::py {

PyObject* raise_current() {
  try {
    throw;
  } catch (const error_already_set&) {
  } catch (const type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

double number(handle given) {
  const double value = PyFloat_AsDouble(given.ptr());
  if (value == -1.0 && PyErr_Occurred()) throw error_already_set();
  return value;
}

Py_ssize_t integer(handle given) {
  const Py_ssize_t value = PyLong_AsSsize_t(given.ptr());
  if (value == -1 && PyErr_Occurred()) throw error_already_set();
  return value;
}

std::string text(handle given) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given.ptr(), &size);
  if (!text) throw error_already_set();
  return std::string(text, size_t(size));
}

}  // namespace fastguard::py
