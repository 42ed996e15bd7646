// A strided sample of what goes into a model or comes out of it, and what that shows.
#pragma once
#include <cstdint>
#include <vector>

namespace fastguard {

// A dense tensor on the CPU, of any dtype that DLPack knows; strides in elements. `shape` is the tensor's own.
struct Elements {
  const char* data = nullptr;
  uint8_t code = 0;  // of dlpack::Code
  int bits = 0;      // of one element; of a complex one, of both its parts
  std::vector<int64_t> shape, strides;
};

// Fields of `Figures` in fastguard/observers/batch_sample.py, which says what they are.
struct Figures {
  double abs_max, mean, std, min, max;
  int64_t num_nonfinite;
  double constant_share, spread;
  int64_t digest;
  double away_from_one;
};

// Reads at most some 4096 elements, and 65536 where one row of the output is to add up to one. False if there are none, or
// of a dtype that is not read here.
bool sample(const Elements& x, Figures& figures);

}  // namespace fastguard
