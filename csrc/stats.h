// What one pass accumulates over a piece of a tensor, and how two accumulations merge.
#pragma once
#include <cmath>
#include <cstdint>

namespace fastguard {

// Element types that the kernels read. A complex tensor is read as its real and imaginary parts.
enum class DType : uint8_t { f32, f64, f16, bf16 };

inline int64_t itemsize(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

// A chunk is the unit of work and of summation: its size depends on nothing but the element count, so sums do not
// depend on the number of threads. A block is what the fast loop handles before it checks itself: 16 KiB of float32,
// which is still in L1 when the block has to be read again by the exact loop.
constexpr int64_t kChunk = 65536;
constexpr int64_t kBlock = 4096;

// Merging is exact for the counts and the extremes, so only the two sums depend on the order, which is fixed:
// blocks in a chunk, chunks in a tensor, tensors in a list, each from first to last.
struct Accumulation {
  double sum_sq = 0;
  double sum = 0;
  double abs_max = 0;
  double abs_min_nonzero = 0;  // 0 while no finite non-zero element was seen
  int64_t num_nonzero = 0;     // finite and not zero
  int64_t num_nans = 0;
  int64_t num_infs = 0;

  void merge(const Accumulation& other) {
    sum_sq += other.sum_sq;
    sum += other.sum;
    if (other.abs_max > abs_max) abs_max = other.abs_max;
    if (other.abs_min_nonzero > 0 && (abs_min_nonzero == 0 || other.abs_min_nonzero < abs_min_nonzero))
      abs_min_nonzero = other.abs_min_nonzero;
    num_nonzero += other.num_nonzero;
    num_nans += other.num_nans;
    num_infs += other.num_infs;
  }
};

// One row of the table, in the order of fastguard.stats.COLUMNS.
struct Row {
  double numel = 0;
  double sum_sq = 0;
  double sum = 0;
  double abs_max = 0;
  double abs_min_nonzero = 0;
  double num_zeros = 0;
  double num_nans = 0;
  double num_infs = 0;

  Row() = default;
  Row(int64_t n, const Accumulation& a)
      : numel(double(n)),
        sum_sq(a.sum_sq),
        sum(a.sum),
        abs_max(a.abs_max),
        abs_min_nonzero(a.abs_min_nonzero),
        num_zeros(double(n - a.num_nonzero - a.num_nans - a.num_infs)),
        num_nans(double(a.num_nans)),
        num_infs(double(a.num_infs)) {}

  // What the row would be for elements `factor` times as large, factor > 0.
  void multiply(double factor) {
    sum_sq = sum_sq * factor * factor;
    sum *= factor;
    abs_max *= factor;
    abs_min_nonzero *= factor;
  }

  void merge(const Row& other) {
    numel += other.numel;
    sum_sq += other.sum_sq;
    sum += other.sum;
    if (other.abs_max > abs_max) abs_max = other.abs_max;
    if (other.abs_min_nonzero > 0 && (abs_min_nonzero == 0 || other.abs_min_nonzero < abs_min_nonzero))
      abs_min_nonzero = other.abs_min_nonzero;
    num_zeros += other.num_zeros;
    num_nans += other.num_nans;
    num_infs += other.num_infs;
  }
};
constexpr int kColumns = 8;
static_assert(sizeof(Row) == kColumns * sizeof(double), "a row is eight doubles, nothing else");

}  // namespace fastguard
