// What is read of tensors beside what an interface tells: ahead of time, for there may be thousands that are not in cache,
// and whether there is memory behind them.
#pragma once
#include "objects.h"

namespace fastguard {

// The way from a tensor's Python object to torch's own, and on to its storage. No interface tells it: examples do, when
// the extension is set up. What is not found is not asked for: then all is slower, or Python is asked.
class TensorPath {
 public:
  TensorPath() = default;

  // Pairs of a tensor of an exact type and its negative (torch._neg_view), of different sizes.
  explicit TensorPath(py::List examples) {
    Finder inner, storage, data, num_bytes;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(examples.ptr()); ++i) {
      const py::object tensor = examples.item(i).item(0), memory = tensor.attr("untyped_storage")();
      constexpr size_t kHead = sizeof(PyObject) / sizeof(Word);
      if (Py_TYPE(tensor.ptr())->tp_basicsize < Py_ssize_t((kHead + 2) * sizeof(Word))) return;
      const uintptr_t own = number(tensor.attr("_cdata")), of_memory = number(memory.attr("_cdata"));
      inner.look(tensor.ptr(), kHead, kHead + 2, own);
      storage.look(words(own), 2, 8, of_memory);
      data.look(words(of_memory), 2, 9, number(memory.attr("data_ptr")()));
      num_bytes.look(words(of_memory), 2, 9, number(memory.attr("nbytes")()));
    }
    word_ = inner.place();
    if (!word_) return;
    if (storage.place() && data.place() && num_bytes.place()) {
      storage_ = storage.place();
      data_ = data.place();
      num_bytes_ = num_bytes.place();
      find_negation(examples);
    }
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
    const Word inner = inner_of(tensor);
    want(word_of(inner, 2), 64);
    want(word_of(inner, 3), 128);
  }

  // Whether torch has memory of its own for the tensor, which is not so if it is sparse, say. True where it is not known.
  bool has_storage(const PyObject* tensor) const { return !storage_ || word_of(inner_of(tensor), storage_); }

  // Whether `num_bytes` from `begin` on lie within the tensor's storage, which may have been freed or made smaller under it.
  // True where it is not known.
  bool holds(const PyObject* tensor, const void* begin, int64_t num_bytes) const {
    if (!storage_) return true;
    const Word storage = word_of(inner_of(tensor), storage_);
    if (!storage) return true;
    const auto first = reinterpret_cast<uintptr_t>(word_of(storage, data_)), at = reinterpret_cast<uintptr_t>(begin);
    const auto size = reinterpret_cast<intptr_t>(word_of(storage, num_bytes_));  // negative: a symbol
    return size < 0 || (at >= first && at - first + uintptr_t(num_bytes) <= uintptr_t(size));
  }

  // Whether the tensor's elements are the negatives of what lies in memory; only if that is known.
  bool knows_negation() const { return negation_ != 0; }
  bool is_negated(const PyObject* tensor) const {
    return (reinterpret_cast<uintptr_t>(word_of(inner_of(tensor), keys_)) & negation_) != 0;
  }

 private:
  using Word = const void*;
  size_t word_ = 0;  // of the Python object, in which the address of torch's stands; 0 for unknown
  size_t storage_ = 0, data_ = 0, num_bytes_ = 0;  // words of torch's object, and of its storage
  size_t keys_ = 0;  // word of torch's object, in which this bit tells a negative
  uintptr_t negation_ = 0;

  // The first word that has the given value in every example.
  class Finder {
   public:
    void look(const void* object, size_t begin, size_t end, uintptr_t value) {
      uint32_t here = 0;
      for (size_t w = begin; w < end; ++w)
        if (reinterpret_cast<uintptr_t>(word_of(object, w)) == value) here |= 1u << w;
      places_ &= here;
    }
    size_t place() const { return places_ ? size_t(__builtin_ctz(places_)) : 0; }

   private:
    uint32_t places_ = ~0u;
  };

  // The first word in which each tensor differs from its negative by one bit, always the same.
  void find_negation(py::List examples) {
    for (size_t w = storage_ + 1; w < 24; ++w) {
      uintptr_t bit = 0;
      bool same = true;
      for (Py_ssize_t e = 0; e < PyList_GET_SIZE(examples.ptr()); ++e) {
        const auto of = [&](Py_ssize_t i) {
          return reinterpret_cast<uintptr_t>(word_of(inner_of(examples.item(e).item(i).ptr()), w));
        };
        const uintptr_t differs = of(0) ^ of(1);
        same = same && differs && !(differs & (differs - 1)) && (!bit || bit == differs) && (of(1) & differs);
        bit = differs;
      }
      if (!same || !bit) continue;
      keys_ = w;
      negation_ = bit;
      return;
    }
  }

  static uintptr_t number(py::handle value) { return uintptr_t(py::integer(value)); }
  static Word words(uintptr_t address) { return reinterpret_cast<Word>(address); }
  static Word word_of(const void* object, size_t word) { return static_cast<const Word*>(object)[word]; }
  Word inner_of(const PyObject* tensor) const { return reinterpret_cast<const Word*>(tensor)[word_]; }
  static void want(const void* address, int num_bytes) {
    for (int line = 0; line < num_bytes; line += 64) __builtin_prefetch(static_cast<const char*>(address) + line);
  }
};

}  // namespace fastguard
