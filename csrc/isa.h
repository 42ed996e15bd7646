// The kernels of one instruction set, and the choice between sets at run time.
#pragma once
#include <string>
#include <vector>

#include "activation.h"
#include "stats.h"

namespace fastguard {

using ActivationKernel = Activation (*)(const void* data, int64_t n, const Limits& limits);

struct Kernels {
  const char* name;
  Accumulation (*stats[4])(const void* data, int64_t n);  // indexed by DType
  void (*scale[4])(void* data, int64_t n, double factor);
  uint64_t (*read[2])(const void* data, int64_t num_bytes);  // without and with prefetching
  // Without and with the sum of magnitudes, which the exact loop gives in any case.
  ActivationKernel activation[2][4];
  // Up to kPanelRows rows of `width` channels side by side, each of which is added to its sums.
  Activation (*channels[4])(const void* const* rows, int num_rows, int64_t width, const Limits& limits,
                            const ChannelSums& sums);
};

// Sets that this processor can run, best first; the last is always the baseline.
const std::vector<const Kernels*>& supported_kernels();

// The set in use. `select_kernels` throws std::invalid_argument for a set that is unknown or cannot run here.
const Kernels& kernels();
void select_kernels(const std::string& name);

}  // namespace fastguard
