// The gradients of an optimizer's parameters, as they stand at one step.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

#include "tensors.h"
#include "view.h"

namespace fastguard {

// What stands behind the parameters of an optimizer at one step.
struct Gradients {
  std::vector<py::object> tensors;  // those that are not None, flat over the groups
  std::vector<int64_t> positions;   // their flat positions; empty while no gradient is missing
  bool complete = true;
  uint64_t fingerprint = 0xcbf29ce484222325u;  // of which parameters these are, for caches
};

// `.grad` of all parameters in `lists`, which are Python lists.
Gradients collect_gradients(const std::vector<PyObject*>& lists);

// A view of each; false if one of them is not plain memory of the CPU.
bool read_gradients(const Gradients& gradients, std::vector<View>& views);

// Work below this many elements takes a few microseconds: less than another thread may keep the lock for.
constexpr int64_t kReleaseMin = 65536;

template <class Work>
void without_lock(const std::vector<View>& views, Work work) {
  int64_t elements = 0;
  for (const View& view : views) elements += view.numel;
  if (elements < kReleaseMin) return work();
  py::gil_scoped_release release;
  work();
}

}  // namespace fastguard
