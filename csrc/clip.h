// The limits of a clip policy, applied to the norms of a step. fastguard/clip/limits.py computes the same.
#pragma once
#include <cstdint>
#include <vector>

#include "gradients.h"

namespace fastguard {

// What gradients of that norm are multiplied by; a trigger below 0 stands for torch's formula, at any norm.
double factor_of(double norm, double trigger, double target);

// An array of Python's, held while this lives.
template <class T>
class Array {
 public:
  Array() = default;
  Array(const Array&) = delete;
  ~Array() {
    if (view_.obj) PyBuffer_Release(&view_);
  }
  // None is no array; throws for what is none of T.
  void take(PyObject* object, bool writable) {
    if (object == Py_None) return;
    if (PyObject_GetBuffer(object, &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) throw py::error_already_set();
    if (view_.itemsize != Py_ssize_t(sizeof(T))) throw py::value_error("limits must come as arrays of double, groups as int");
  }
  bool is_there() const { return view_.obj != nullptr; }
  size_t size() const { return is_there() ? size_t(view_.len) / sizeof(T) : 0; }
  T& operator[](size_t i) const { return static_cast<T*>(view_.buf)[i]; }

 private:
  Py_buffer view_ = {};
};

struct ClipLimits {
  double trigger, target;   // of all gradients together
  bool has_parts = false;   // groups or tensors have norms of their own
  Array<int> groups;        // of each parameter, -1 for none; not there: each parameter is one
  Array<double> triggers, targets, norms;  // of each part; the former two may not be there, the latter is written

  // From a float, which torch's formula clips to, or the tuple `Limits` of fastguard/clip/limits.py; throws otherwise.
  explicit ClipLimits(PyObject* given);

  // Whether they are of so many parameters.
  bool suits(size_t num_parameters) const;
};

struct Ruling {
  double coefficient = 1.0;      // of all gradients, or how much smaller their norm becomes; 1 when dropped
  bool dropped = false;          // the step is skipped
  std::vector<double> factors;   // of each gradient, where they are not one; empty when dropped
  std::vector<int64_t> over;     // parts above their triggers
};

// `rows` of the gradients, whose norm is `norm`, which is finite. Writes `limits.norms`.
Ruling rule(const ClipLimits& limits, const Gradients& gradients, const Row* rows, double norm);

// Exponential means of what norms are clipped to, where both are above 0, and ratio * mean as the new limits; AdaGC in
// fastguard/clip/adagc.py says the same. Returns how many norms have no mean yet.
size_t follow(const Array<double>& norms, const Array<double>& means, const Array<double>& limits, double keep, double ratio);

}  // namespace fastguard
