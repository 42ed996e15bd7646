// What one pass accumulates over a piece of a tensor, and how two accumulations merge.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace fastguard {

// Element types that the kernels read. A complex tensor is read as its real and imaginary parts.
enum class DType : uint8_t { f32, f64, f16, bf16 };

inline int64_t itemsize(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

// A chunk is the unit of work and of summation: its size depends on nothing but the element count, so sums do not
// depend on the number of threads. A block is what the fast loop handles before it checks itself: 16 KiB of float32,
// which is still in L1 when the block has to be read again by the exact loop.
constexpr int64_t kChunk = 65536;
constexpr int64_t kBlock = 4096;

// The columns, in the order of fastguard.records.columns: name, power of f by which it grows when the elements are
// multiplied by f, how two are folded, whether it is a count. All below follows from this list, and so do rows in Python.
// The last is not accumulated, but follows from what is.
#define FG_COLUMNS(COLUMN) FG_ACCUMULATED(COLUMN) COLUMN(finite_norm, 1, norm, false)
#define FG_ACCUMULATED(COLUMN)                       \
  COLUMN(numel, 0, add, true)                        \
  COLUMN(sum_sq, 2, add, false)                      \
  COLUMN(sum, 1, add, false)                         \
  COLUMN(abs_max, 1, max, false)                     \
  COLUMN(abs_min_nonzero, 1, least_nonzero, false)   \
  COLUMN(num_zeros, 0, add, true)                    \
  COLUMN(num_nans, 0, add, true)                     \
  COLUMN(num_infs, 0, add, true)                     \
  COLUMN(sum_sq_dev, 2, deviations, false)

struct Fold {
  template <class T>
  static void add(T& a, T b) { a += b; }
  template <class T>
  static void max(T& a, T b) { if (b > a) a = b; }
  template <class T>
  static void least_nonzero(T& a, T b) { if (b > 0 && (a == 0 || b < a)) a = b; }
  template <class T>
  static void deviations(T& a, T b) { a += b; }  // and `between`
  template <class T>
  static void norm(T&, T) {}  // see `merged_norm`
};

// Of two groups of elements: what the squared deviations from the mean of all have more than those from each group's own
// mean, after Chan, Golub and LeVeque (1979), with one division.
template <class Sums>
double between(const Sums& a, const Sums& b) {
  const double n = double(a.numel - a.num_nans - a.num_infs), m = double(b.numel - b.num_nans - b.num_infs);
  if (n == 0 || m == 0) return 0;
  const double away = b.sum * n - a.sum * m;
  const double squares = away / (n * m * (n + m)) * away;
  return squares == squares ? squares : HUGE_VAL;  // Inf - Inf, where sums overflowed
}

// Whether a sum of squares of float64 is one: it neither overflowed nor lost bits to underflow.
inline bool in_range(double sum_sq) { return sum_sq >= 0x1p-960 && sum_sq < HUGE_VAL; }

// The norm of two groups together: the root of their squares, where these have not left the range of float64.
inline double merged_norm(double sum_sq, double a, double b) {
  if (in_range(sum_sq)) return std::sqrt(sum_sq);
  const double large = a > b ? a : b, ratio = (a > b ? b : a) / large;
  return large == 0 || large == HUGE_VAL ? large : large * std::sqrt(1.0 + ratio * ratio);
}

// What a pass accumulates. Merging is exact for the counts and the extremes, so only the sums depend on the order, which
// is fixed: blocks in a chunk, chunks in a tensor, tensors in a list, each from first to last.
struct Accumulation {
#define FG_FIELD(name, power, fold, is_count) std::conditional_t<is_count, int64_t, double> name = 0;
  FG_ACCUMULATED(FG_FIELD)
#undef FG_FIELD

  void merge(const Accumulation& other) {
    const double apart = between(*this, other);
#define FG_MERGE(name, power, fold, is_count) Fold::fold(name, other.name);
    FG_ACCUMULATED(FG_MERGE)
    sum_sq_dev += apart;
  }
};

// One row of the table. `row_of` makes it of an accumulation.
struct Row {
#define FG_FIELD(name, power, fold, is_count) double name = 0;
  FG_COLUMNS(FG_FIELD)
#undef FG_FIELD

  Row() = default;
  Row(const Accumulation& a, double norm) {
#define FG_CONVERT(name, power, fold, is_count) name = double(a.name);
    FG_ACCUMULATED(FG_CONVERT)
#undef FG_CONVERT
    finite_norm = norm;
  }

  // What the row would be for elements `factor` times as large, factor > 0.
  void multiply(double factor) {
#define FG_MULTIPLY(name, power, fold, is_count) \
  for (int i = 0; i < power; ++i) name *= factor;
    FG_COLUMNS(FG_MULTIPLY)
#undef FG_MULTIPLY
  }

  void merge(const Row& other) {
    const double apart = between(*this, other);
    FG_COLUMNS(FG_MERGE)
#undef FG_MERGE
    sum_sq_dev += apart;
    finite_norm = merged_norm(sum_sq, finite_norm, other.finite_norm);
  }
};

struct Column {
  const char *name, *fold;
  int power;
  bool is_count;
};
#define FG_COLUMN(name, power, fold, is_count) Column{#name, #fold, power, is_count},
constexpr Column kColumnTable[] = {FG_COLUMNS(FG_COLUMN)};
#undef FG_COLUMN
constexpr int kColumns = sizeof(kColumnTable) / sizeof(Column);
static_assert(sizeof(Row) == kColumns * sizeof(double), "a row is that many doubles, nothing else");

}  // namespace fastguard
