// Giving up the GIL for work that is worth it.
#pragma once
#include <vector>

#include "objects.h"
#include "view.h"

namespace fastguard {

// Work below this many elements takes some twenty microseconds, of the five thousand that Python lets a thread keep the
// lock for. Giving it up and taking it back costs one, after a backward pass.
constexpr int64_t kReleaseMin = 196608;

template <class Work>
auto without_lock(int64_t elements, Work work) {
  if (elements < kReleaseMin) return work();
  py::ReleaseLock released;
  return work();
}

template <class Work>
auto without_lock(const std::vector<View>& views, Work work) {
  int64_t elements = 0;
  for (const View& view : views) elements += view.numel;
  return without_lock(elements, work);
}

}  // namespace fastguard
