// The kernels of one instruction set, and the choice between sets at run time.
#pragma once
#include <string>
#include <vector>

#include "stats.h"

namespace fastguard {

struct Kernels {
  const char* name;
  Accumulation (*stats[4])(const void* data, int64_t n);  // indexed by DType
  void (*scale[4])(void* data, int64_t n, double factor);
  uint64_t (*read[2])(const void* data, int64_t num_bytes);  // without and with prefetching
};

// Sets that this processor can run, best first; the last is always the baseline.
const std::vector<const Kernels*>& supported_kernels();

// The set in use. `select_kernels` throws std::invalid_argument for a set that is unknown or cannot run here.
const Kernels& kernels();
void select_kernels(const std::string& name);

}  // namespace fastguard
