// The passes over many tensors: one for the statistics, one that scales, and a plain read to compare with.
#pragma once
#include <vector>

#include "view.h"

namespace fastguard {

// Fills one row a tensor, as if its elements had been multiplied by `unscale`, and returns the fold of the rows from
// first to last. Reads every element once; extra memory: about 150 bytes a tensor, and 56 bytes for each 65536
// elements of a large one.
Row tensor_stats(const std::vector<View>& views, int num_threads, double unscale, Row* rows);

// x *= factor for every element of every tensor. The views must not overlap themselves.
void scale(const std::vector<View>& views, double factor, int num_threads);

// The sum of all 64-bit words, modulo 2^64: a pass that does nothing but read, for benchmarks. Dense views only.
uint64_t read_stream(const std::vector<View>& views, int num_threads, bool prefetch);

}  // namespace fastguard
