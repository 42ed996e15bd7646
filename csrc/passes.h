// The passes over many tensors: one for the statistics, one that scales, and a plain read to compare with.
#pragma once
#include <vector>

#include "activation.h"
#include "view.h"

namespace fastguard {

// Fills one row a tensor, as if its elements had been multiplied by `unscale`, and returns the fold of the rows from
// first to last. Reads every element once; extra memory: about 150 bytes a tensor, and an Accumulation for each
// 65536 elements of a large one.
Row tensor_stats(const std::vector<View>& views, int num_threads, double unscale, Row* rows);

// The rows alone, as the elements are.
void tensor_rows(const std::vector<View>& views, int num_threads, Row* rows);

// What a pass accumulates over elements [begin, end) of one view, at most a chunk.
struct Kernels;
Accumulation stats_of(const Kernels& kernels, const View& view, int64_t begin, int64_t end);

// The row of a view of which all was accumulated. Reads it once more where squares of float64 leave its range.
Row row_of(const Kernels& kernels, const View& view, const Accumulation& a);

// x *= factor for every element of every tensor. The views must not overlap themselves.
void scale(const std::vector<View>& views, double factor, int num_threads);

// x *= factors[t] for tensor t; one whose factor is 1 is not touched.
void scale_each(const std::vector<View>& views, const double* factors, int num_threads);

// Bytes to copy; `to` and `from` do not overlap.
struct Copy {
  char* to;
  const char* from;
  size_t size;
};

// All of them, past the caches where they are large.
void copy(const std::vector<Copy>& copies, int num_threads);

// The sum of all 64-bit words, modulo 2^64: a pass that does nothing but read, for benchmarks. Dense views only.
uint64_t read_stream(const std::vector<View>& views, int num_threads, bool prefetch);

// All there is to know of one tensor of activations, without the sum of magnitudes. Reads every element once.
Activation activation_stats(const View& view, const Limits& limits, int num_threads);

// Runs at least this long go to a kernel as they lie; shorter ones are gathered first.
constexpr int64_t kLongRun = 1024;

// The same, and of each index of dimension `dim` a row of `table`: near-zero, saturated, non-finite elements, sum of
// magnitudes. Reads every element once where channels lie side by side or in runs, and small dense rows of fewer than
// 16 channels once for each channel, from cache.
Activation channel_stats(const Strided& x, int dim, const Limits& limits, int num_threads, double* table);

}  // namespace fastguard
