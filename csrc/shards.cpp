#include "shards.h"

#include <structmember.h>  // PyMemberDef, before Python 3.12

namespace fastguard {

namespace {

constexpr size_t kMostKinds = 64;  // more are of meshes that are gone, surely

// Bytes from an object to what a slot of its class keeps, or 0.
Py_ssize_t slot_of(PyTypeObject* type, const char* name) {
  PyObject* found = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name);
  if (!found) return PyErr_Clear(), 0;
  const py::object descriptor = py::steal(found);
  if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type) return 0;
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
}

PyObject* at(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

py::object attribute(PyObject* object, PyObject* name) {
  return py::steal(PyObject_GetAttr(object, name));
}

py::object mesh_of(PyObject* spec) {
  static PyObject* const name = PyUnicode_InternFromString("mesh");
  return attribute(spec, name);
}

py::object placements_of(PyObject* spec) {
  static PyObject* const name = PyUnicode_InternFromString("placements");
  return attribute(spec, name);
}

void want(const PyObject* object) {  // with what CPython keeps ahead of it: where its attributes are
  __builtin_prefetch(reinterpret_cast<const char*>(object) - 32);
  __builtin_prefetch(reinterpret_cast<const char*>(object) + 32);
}

}  // namespace

bool ShardPlan::learn(PyTypeObject* type) {
  auto object = reinterpret_cast<PyObject*>(type);
  if (!PyObject_HasAttrString(object, "to_local") || !PyObject_HasAttrString(object, "device_mesh")) return false;
  const Py_ssize_t local = slot_of(type, "_local_tensor"), spec = slot_of(type, "_spec");
  if (!local || !spec) return false;
  type_ = py::borrow(object);
  local_ = local;
  spec_ = spec;
  return true;
}

void ShardPlan::begin() {
  if (num_known() > kMostKinds) {
    seen_.clear();
    known_ = py::steal(PyList_New(0));
  }
  kinds.clear();
  used.clear();
}

int32_t ShardPlan::number_of(const py::object& mesh, const py::object& placements) {
  for (size_t i = 0; i < num_known(); ++i) {
    PyObject* known = PyList_GET_ITEM(known_.ptr(), Py_ssize_t(i));
    if (PyTuple_GET_ITEM(known, 0) != mesh.ptr()) continue;
    const int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(known, 1), placements.ptr(), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (same) return int32_t(i);
  }
  if (PyList_Append(known_.ptr(), py::make_tuple(mesh, placements).ptr()) != 0) throw py::error_already_set();
  return int32_t(num_known()) - 1;
}

int32_t ShardPlan::kind_of(PyObject* spec, size_t place) {
  if (place >= seen_.size()) seen_.resize(place + 1);
  Seen& seen = seen_[place];
  py::object placements = placements_of(spec), mesh = mesh_of(spec);
  if (seen.spec.ptr() != spec || seen.placements.ptr() != placements.ptr() || seen.mesh.ptr() != mesh.ptr())
    seen = {py::borrow(spec), mesh, placements, number_of(mesh, placements)};
  return seen.kind;
}

bool ShardPlan::unwrap(py::object* tensors, size_t count, size_t place) {
  for (size_t i = 0; i < count; ++i) {
    if (is_plain_type(tensors[i].ptr())) continue;
    if (!takes(tensors[i].ptr()) && !learn(Py_TYPE(tensors[i].ptr()))) return false;
    PyObject *local = at(tensors[i].ptr(), local_), *spec = at(tensors[i].ptr(), spec_);
    if (!local || !spec) return false;
    want(local);
    want(spec);
  }
  for (size_t i = 0; i < count; ++i) {
    int32_t kind = -1;
    if (!is_plain_type(tensors[i].ptr())) {
      if (!takes(tensors[i].ptr())) return false;  // two such classes at once
      kind = kind_of(at(tensors[i].ptr(), spec_), place + i);
      tensors[i] = py::borrow(at(tensors[i].ptr(), local_));
      if (is_plain_type(tensors[i].ptr())) tensor_path().want_inner(tensors[i].ptr());
    }
    if (kinds.empty() || kind != kinds.back()) used.insert(kind);
    kinds.push_back(kind);
  }
  return true;
}

void ShardPlan::note(PyObject* parameter) {
  if (is_plain_type(parameter) || (!takes(parameter) && !learn(Py_TYPE(parameter)))) return;
  if (PyObject* spec = at(parameter, spec_)) used.insert(number_of(mesh_of(spec), placements_of(spec)));
}

bool measure_shards(ShardPlan& plan, const Groups& groups, int num_threads, double unscale, Row* rows, Gradients& found) {
  plan.begin();
  if (!measure_gradients(groups, num_threads, unscale, rows, found, &plan)) return false;
  if (!found.complete) {
    size_t position = 0, next = 0;
    for (PyObject* group : groups)
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(group); ++i, ++position) {
        if (next < found.positions.size() && size_t(found.positions[next]) == position) ++next;
        else plan.note(PyList_GET_ITEM(group, i));
      }
  }
  return true;
}

bool measure_shards(ShardPlan& plan, py::List tensors, int num_threads, Row* rows, Gradients& found) {
  plan.begin();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i)
    found.tensors.push_back(py::borrow(PyList_GET_ITEM(tensors.ptr(), i)));
  const size_t count = found.tensors.size();
  if (!plan.unwrap(found.tensors.data(), count, 0) || plan.used.empty() || *plan.used.rbegin() < 0)
    return false;
  if (!measure_plain(found.items(), count, num_threads, 1.0, rows, found.dtypes, found.total)) return false;
  return true;
}

}  // namespace fastguard
