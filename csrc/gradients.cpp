#include "gradients.h"

namespace fastguard {

Gradients collect_gradients(const std::vector<PyObject*>& lists) {
  constexpr Py_ssize_t kAhead = 8;  // with thousands of tensors their Python objects are not in cache
  Gradients found;
  size_t count = 0;
  for (PyObject* list : lists) count += size_t(PyList_GET_SIZE(list));
  found.tensors.reserve(count);
  int64_t position = 0;
  for (PyObject* list : lists) {
    found.fingerprint = (found.fingerprint ^ 1u) * 0x100000001b3u;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i, ++position) {
      PyObject* parameter = PyList_GET_ITEM(list, i);
      if (i + kAhead < PyList_GET_SIZE(list)) __builtin_prefetch(PyList_GET_ITEM(list, i + kAhead));
      found.fingerprint = (found.fingerprint ^ reinterpret_cast<uintptr_t>(parameter)) * 0x100000001b3u;
      py::object g = gradient_of(parameter);
      if (g.is_none()) {
        if (found.complete)
          for (int64_t before = 0; before < position; ++before) found.positions.push_back(before);
        found.complete = false;
        continue;
      }
      if (!found.complete) found.positions.push_back(position);
      found.tensors.push_back(std::move(g));
    }
  }
  return found;
}

bool read_gradients(const Gradients& gradients, std::vector<View>& views) {
  static_assert(sizeof(py::object) == sizeof(PyObject*), "a vector of objects is an array of pointers");
  std::vector<py::object> keep_alive;
  auto items = reinterpret_cast<PyObject* const*>(gradients.tensors.data());
  return read_tensors(items, gradients.tensors.size(), Odd::refuse, views, keep_alive);
}

}  // namespace fastguard
