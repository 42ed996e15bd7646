#include "buffers.h"

#include <cstring>

#include "dlpack.h"
#include "passes.h"
#include "state.h"
#include "tensors.h"

namespace fastguard {

namespace {

bool is_dense(const Elements& x) {
  int64_t expected = 1;
  for (size_t d = x.shape.size(); d-- > 0; expected *= x.shape[d])
    if (x.shape[d] != 1 && x.strides[d] != expected) return false;
  return true;
}

size_t bytes_of(const Elements& x) {
  size_t size = size_t(x.bits) / 8;
  for (int64_t length : x.shape) size *= size_t(length);
  return size;
}

// Whether no element's exponent has all bits set.
template <class Word>
bool are_finite(const char* data, size_t bytes, Word exponent) {
  Word found = 0;
  for (size_t at = 0; at < bytes; at += sizeof(Word)) {
    Word word;
    std::memcpy(&word, data + at, sizeof(Word));
    found |= Word((word & exponent) == exponent);
  }
  return !found;
}

bool is_finite(const Elements& x) {
  const size_t bytes = bytes_of(x);
  const int bits = x.code == dlpack::kComplex ? x.bits / 2 : x.bits;
  if (x.code == dlpack::kBfloat) return bits == 16 && are_finite<uint16_t>(x.data, bytes, 0x7f80);
  if (x.code != dlpack::kFloat && x.code != dlpack::kComplex) return true;
  switch (bits) {
    case 16: return are_finite<uint16_t>(x.data, bytes, 0x7c00);
    case 32: return are_finite<uint32_t>(x.data, bytes, 0x7f800000);
    case 64: return are_finite<uint64_t>(x.data, bytes, uint64_t(0x7ff) << 52);
    default: return false;
  }
}

// Appends the copies of one pack; false where torch is to do it.
bool plan(PyObject* entry, std::vector<Copy>& copies) {
  static PyObject* name = name_of("kept");
  if (!PyTuple_CheckExact(entry)) return false;
  const py::object kept = attribute(PyTuple_GET_ITEM(entry, 0), name);
  Elements to, from;
  if (!read_any(kept.ptr(), to) || !is_dense(to)) return false;
  const size_t size = bytes_of(to);
  size_t at = 0;
  for (Py_ssize_t i = 1; i + 1 < PyTuple_GET_SIZE(entry); i += 2) {
    PyObject* store = PyTuple_GET_ITEM(entry, i);
    PyObject* buffer = PyDict_Check(store) ? PyDict_GetItemWithError(store, PyTuple_GET_ITEM(entry, i + 1)) : nullptr;
    if (PyErr_Occurred()) throw py::error_already_set();
    if (!buffer || !read_any(buffer, from) || from.code != to.code || from.bits != to.bits) return false;
    const size_t bytes = bytes_of(from);
    if (!is_dense(from) || bytes > size - at || !is_finite(from)) return false;
    copies.push_back({const_cast<char*>(to.data) + at, from.data, bytes});
    at += bytes;
  }
  return at == size;
}

}  // namespace

bool copy_buffers(PyObject* packs) {
  if (!packs || !PyList_CheckExact(packs)) return false;
  std::vector<Copy> copies;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(packs); ++i)
    if (!plan(PyList_GET_ITEM(packs, i), copies)) return false;
  for (const Copy& one : copies)
    if (one.size) std::memcpy(one.to, one.from, one.size);
  return true;
}

}  // namespace fastguard
