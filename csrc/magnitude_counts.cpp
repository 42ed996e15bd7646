// Counts of floor(log2 |x|): an element's exponent field is an index, and what it does not tell (zeros, subnormals, NaN
// and Inf, which share two of its values) is looked up afterwards, in the blocks that have such elements.
#include <algorithm>
#include <cstring>

#include "isa.h"
#include "parallel.h"
#include "passes.h"

namespace fastguard {

namespace {

// Exponent and fraction of a type's bits.
template <class Raw, int kExponentBits, int kFractionBits>
struct Fields {
  typedef Raw raw;
  static constexpr int kFraction = kFractionBits, kValues = 1 << kExponentBits, kBias = kValues / 2 - 1;
  static int exponent(Raw x) { return int(x >> kFractionBits) & (kValues - 1); }
  static uint64_t fraction(Raw x) { return x & ((uint64_t(1) << kFractionBits) - 1); }
};
typedef Fields<uint32_t, 8, 23> Fields32;
typedef Fields<uint64_t, 11, 52> Fields64;
typedef Fields<uint16_t, 5, 10> Fields16;
typedef Fields<uint16_t, 8, 7> FieldsB16;

enum { kZeros, kNans, kInfs, kExponents };

template <class F>
void count_special(const typename F::raw* p, int64_t n, int64_t* counts) {
  for (int64_t i = 0; i < n; ++i) {
    const int exponent = F::exponent(p[i]);
    const uint64_t fraction = F::fraction(p[i]);
    if (exponent == F::kValues - 1) ++counts[fraction ? kNans : kInfs];
    if (exponent > 0) continue;
    // A subnormal is its fraction times the smallest one.
    const int smallest = 1 - F::kBias - F::kFraction;
    ++counts[fraction ? kExponents + smallest + 63 - __builtin_clzll(fraction) - kLowestExponent : kZeros];
  }
}

// `n` <= kBlock elements. Four histograms in turn: an addition need not wait for the last one to the same place.
template <class F>
void count_block(const void* data, int64_t n, int64_t* counts) {
  const typename F::raw* p = static_cast<const typename F::raw*>(data);
  static_assert(kBlock < 65536, "a count of a block fits in 16 bits");
  uint16_t found[4][F::kValues] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4)
    for (int k = 0; k < 4; ++k) ++found[k][F::exponent(p[i + k])];
  for (; i < n; ++i) ++found[0][F::exponent(p[i])];
  int64_t* exponents = counts + kExponents - F::kBias - kLowestExponent;
  bool special = false;
  for (int e = 0; e < F::kValues; ++e) {
    const int64_t total = int64_t(found[0][e]) + found[1][e] + found[2][e] + found[3][e];
    if (e == 0 || e == F::kValues - 1)
      special |= total > 0;
    else
      exponents[e] += total;
  }
  if (special) count_special<F>(p, n, counts);
}

void count_piece(const View& view, int64_t begin, int64_t end, int64_t* counts) {
  static constexpr void (*kCount[])(const void*, int64_t, int64_t*) = {count_block<Fields32>, count_block<Fields64>,
                                                                       count_block<Fields16>, count_block<FieldsB16>};
  const int size = int(itemsize(view.dtype));
  alignas(64) char buffer[kBlock * sizeof(double)];
  for_each_run(view, begin, end, [&](const char* run, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; i += kBlock) {
      const int64_t n = std::min(kBlock, count - i);
      const char* from = run + i * stride * size;
      if (stride != 1) gather(buffer, from, stride, n, size);
      kCount[int(view.dtype)](stride == 1 ? from : buffer, n, counts);
    }
  });
}

}  // namespace

void magnitude_counts(const std::vector<View>& views, int num_threads, int64_t* counts) {
  int64_t elements = 0;
  std::vector<Piece> pieces;
  for (size_t t = 0; t < views.size(); ++t) {
    elements += views[t].numel;
    for (int64_t begin = 0; begin < views[t].numel; begin += kChunk)
      pieces.push_back({int64_t(t), 0, begin, std::min(begin + kChunk, views[t].numel)});
  }
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads, int64_t(pieces.size())));
  std::vector<int64_t> partials(size_t(parts * kMagnitudes));
  // Integers: who counts what does not matter.
  for_each_item(parts, elements, num_threads, [&](int64_t part) {
    for (size_t i = size_t(part); i < pieces.size(); i += size_t(parts))
      count_piece(views[size_t(pieces[i].tensor)], pieces[i].begin, pieces[i].end, &partials[size_t(part * kMagnitudes)]);
  });
  std::fill_n(counts, kMagnitudes, 0);
  for (int64_t part = 0; part < parts; ++part)
    for (int i = 0; i < kMagnitudes; ++i) counts[i] += partials[size_t(part * kMagnitudes + i)];
}

}  // namespace fastguard
