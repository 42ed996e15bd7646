// Asking ahead of time for what will be read of tensors, which is not in cache where there are thousands.
#pragma once
#include <pybind11/pybind11.h>

namespace fastguard {

// The way from a tensor's Python object to torch's own, and on. No interface tells it: an example and `_cdata` do, when
// the extension is set up. What is not found is not asked for, and then all is as it is, only slower.
class TensorPath {
 public:
  TensorPath() = default;

  explicit TensorPath(pybind11::handle tensor_type) {  // torch.Tensor
    constexpr size_t kHead = sizeof(PyObject) / sizeof(Word), kEnd = kHead + 2;
    if (reinterpret_cast<PyTypeObject*>(tensor_type.ptr())->tp_basicsize < Py_ssize_t(kEnd * sizeof(Word))) return;
    pybind11::object example = tensor_type(), address = pybind11::getattr(example, "_cdata", pybind11::none());
    if (!PyLong_Check(address.ptr())) return;
    auto words = reinterpret_cast<const Word*>(example.ptr());
    for (size_t w = kHead; w < kEnd; ++w)
      if (reinterpret_cast<uintptr_t>(words[w]) == address.cast<uintptr_t>()) word_ = w;
  }

  // For exact torch.Tensors and Parameters. Each reads no more than what the one before has asked for.
  void want_object(const PyObject* tensor) const { __builtin_prefetch(tensor); }
  void want_inner(const PyObject* tensor) const {
    if (word_) want(inner_of(tensor), 192);
  }
  // After the table of functions and the counts of references: the storage, and what autograd knows, with the gradient.
  // Should they stand elsewhere, the wrong lines are asked for; nothing is read there.
  void want_parts(const PyObject* tensor) const {
    if (!word_) return;
    auto words = static_cast<const Word*>(inner_of(tensor));
    want(words[2], 64);
    want(words[3], 128);
  }

 private:
  using Word = const void*;
  size_t word_ = 0;  // of the Python object, in which the address of torch's stands; 0 for unknown

  Word inner_of(const PyObject* tensor) const { return reinterpret_cast<const Word*>(tensor)[word_]; }
  static void want(const void* address, int num_bytes) {
    for (int line = 0; line < num_bytes; line += 64) __builtin_prefetch(static_cast<const char*>(address) + line);
  }
};

}  // namespace fastguard
