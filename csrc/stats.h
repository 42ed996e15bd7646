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

// The columns, in the order of fastguard.stats.columns: name, power of f by which it grows when the elements are
// multiplied by f, how two are folded, whether it is a count. All below follows from this list, and so do rows in Python.
#define FG_COLUMNS(COLUMN)                           \
  COLUMN(numel, 0, add, true)                        \
  COLUMN(sum_sq, 2, add, false)                      \
  COLUMN(sum, 1, add, false)                         \
  COLUMN(abs_max, 1, max, false)                     \
  COLUMN(abs_min_nonzero, 1, least_nonzero, false)   \
  COLUMN(num_zeros, 0, add, true)                    \
  COLUMN(num_nans, 0, add, true)                     \
  COLUMN(num_infs, 0, add, true)

struct Fold {
  template <class T>
  static void add(T& a, T b) { a += b; }
  template <class T>
  static void max(T& a, T b) { if (b > a) a = b; }
  template <class T>
  static void least_nonzero(T& a, T b) { if (b > 0 && (a == 0 || b < a)) a = b; }
};

// What a pass accumulates. Merging is exact for the counts and the extremes, so only the sums depend on the order, which
// is fixed: blocks in a chunk, chunks in a tensor, tensors in a list, each from first to last.
struct Accumulation {
#define FG_FIELD(name, power, fold, is_count) std::conditional_t<is_count, int64_t, double> name = 0;
  FG_COLUMNS(FG_FIELD)
#undef FG_FIELD

  void merge(const Accumulation& other) {
#define FG_MERGE(name, power, fold, is_count) Fold::fold(name, other.name);
    FG_COLUMNS(FG_MERGE)
  }
};

// One row of the table.
struct Row {
#define FG_FIELD(name, power, fold, is_count) double name = 0;
  FG_COLUMNS(FG_FIELD)
#undef FG_FIELD

  Row() = default;
  explicit Row(const Accumulation& a) {
#define FG_CONVERT(name, power, fold, is_count) name = double(a.name);
    FG_COLUMNS(FG_CONVERT)
#undef FG_CONVERT
  }

  // What the row would be for elements `factor` times as large, factor > 0.
  void multiply(double factor) {
#define FG_MULTIPLY(name, power, fold, is_count) \
  for (int i = 0; i < power; ++i) name *= factor;
    FG_COLUMNS(FG_MULTIPLY)
#undef FG_MULTIPLY
  }

  void merge(const Row& other) {
    FG_COLUMNS(FG_MERGE)
#undef FG_MERGE
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
