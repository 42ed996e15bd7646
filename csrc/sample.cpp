#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "dlpack.h"
#include "elements.h"
#include "ieee.h"

namespace fastguard {

namespace {

constexpr int64_t kMostElements = 4096, kMostFeatures = 2048, kLeastRows = 32, kLongestRow = 65536, kDigested = 512;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Some of the indices of a tensor: in each dimension the first and those a stride from each other.
struct Picked {
  const char* data;
  std::vector<int64_t> shape, strides;

  void thin(size_t d, int64_t step) {
    if (step <= 1) return;
    shape[d] = ceil_div(shape[d], step);
    strides[d] *= step;
  }
  int64_t count(size_t first, size_t last) const {
    int64_t product = 1;
    for (size_t d = first; d < last; ++d) product *= shape[d];
    return product;
  }
};

// Samples by features: about 4096 elements at most. The first dimension counts the samples. One sample counts as its
// rows.
Picked table_of(Picked x) {
  if (x.shape.size() > 2 && x.shape[0] == 1) {
    x.shape.erase(x.shape.begin());
    x.strides.erase(x.strides.begin());
  }
  while (x.shape.size() < 2) {
    x.shape.push_back(1);
    x.strides.push_back(1);
  }
  const size_t rank = x.shape.size();
  int64_t features = x.count(1, rank);
  if (x.shape[0] * features <= kMostElements && features <= kMostFeatures) return x;
  x.thin(0, ceil_div(x.shape[0], std::max(kLeastRows, kMostElements / features)));
  const int64_t most = std::min(kMostFeatures, kMostElements / x.shape[0]);
  for (size_t d = rank - 1; d > 0; --d) {
    x.thin(d, std::min(ceil_div(features, most), x.shape[d]));
    features = x.count(1, rank);
  }
  return x;
}

// Some whole rows of the last dimension.
Picked rows_of(Picked x) {
  const size_t last = x.shape.size() - 1;
  const int64_t most = std::max<int64_t>(1, kMostElements / x.shape[last]);
  for (size_t d = 0; d < last; ++d) x.thin(d, std::min(ceil_div(x.count(0, last), most), x.shape[d]));
  return x;
}

// Calls visit(address, step in bytes) for each run of the last dimension.
template <class Visit>
void for_each_run(const Picked& x, int64_t itemsize, Visit visit) {
  const int inner = int(x.shape.size()) - 1;
  std::vector<int64_t> index(x.shape.size());
  const char* at = x.data;
  for (int64_t left = x.count(0, x.shape.size()); left > 0; left -= x.shape[inner]) {
    visit(at, x.strides[inner] * itemsize);
    for (int d = inner - 1; d >= 0; --d) {
      at += x.strides[d] * itemsize;
      if (++index[d] < x.shape[d]) break;
      at -= index[d] * x.strides[d] * itemsize;
      index[d] = 0;
    }
  }
}

template <class T>
struct Plain {
  using Raw = T;
  static double value(T raw) { return double(raw); }
};

struct Bfloat {
  using Raw = uint16_t;
  static double value(uint16_t raw) { return widened(Brain{raw}); }
};

struct Float16 {
  using Raw = uint16_t;
  static double value(uint16_t raw) { return widened(Half{raw}); }
};

// An element's bits as a whole number; of one byte without a sign, as torch has uint8.
template <class Raw>
int64_t bits_of(Raw raw) {
  if constexpr (sizeof(Raw) == 1) {
    uint8_t bits;
    std::memcpy(&bits, &raw, 1);
    return bits;
  } else {
    std::conditional_t<sizeof(Raw) == 2, int16_t, std::conditional_t<sizeof(Raw) == 4, int32_t, int64_t>> bits;
    std::memcpy(&bits, &raw, sizeof(Raw));
    return bits;
  }
}

// Odd numbers that follow no pattern: Weyl's sequence through a mixing function.
uint64_t factor(uint64_t i) {
  uint64_t z = i * 0x9E3779B97F4A7C15u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return (z ^ z >> 31) | 1;
}

uint64_t digest(const std::vector<int64_t>& bits, int64_t columns, const std::vector<int64_t>& shape) {
  int64_t stride = ceil_div(int64_t(bits.size()), kDigested);
  while (std::gcd(stride, columns) > 1) ++stride;  // else the same few features of each sample, which may be constant
  uint64_t found = 0, i = 0;
  for (size_t at = 0; at < bits.size(); at += size_t(stride)) found += uint64_t(bits[at]) * factor(++i);
  for (int64_t size : shape) found = found * 1000003 + uint64_t(size);
  return found & (~uint64_t(0) >> 1);
}

// All values folded from `nothing` on, in lanes that do not wait for each other.
template <class Fold>
double folded(const std::vector<double>& values, double nothing, Fold fold) {
  double lanes[4] = {nothing, nothing, nothing, nothing};
  size_t i = 0;
  for (; i + 4 <= values.size(); i += 4)
    for (size_t lane = 0; lane < 4; ++lane) lanes[lane] = fold(lanes[lane], values[i + lane]);
  for (; i < values.size(); ++i) lanes[0] = fold(lanes[0], values[i]);
  return fold(fold(lanes[0], lanes[1]), fold(lanes[2], lanes[3]));
}

void moments(std::vector<double> values, Figures& f) {
  const auto is_finite = [](double v) { return std::isfinite(v); };
  f.num_nonfinite = int64_t(values.size()) - std::count_if(values.begin(), values.end(), is_finite);
  if (f.num_nonfinite) values.erase(std::stable_partition(values.begin(), values.end(), is_finite), values.end());
  f.abs_max = f.mean = f.std = f.min = f.max = kNaN;
  if (values.empty()) return;
  const auto sum = [](double a, double b) { return a + b; };
  const double low = folded(values, HUGE_VAL, [](double a, double b) { return b < a ? b : a; });
  const double high = folded(values, -HUGE_VAL, [](double a, double b) { return b > a ? b : a; });
  const double share = 1.0 / double(values.size());
  std::vector<double> parts(values.size());
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = values[i] * share;
  const double mean = folded(parts, 0.0, sum);
  for (size_t i = 0; i < parts.size(); ++i) parts[i] = (values[i] - mean) * (values[i] - mean) * share;
  f.mean = mean;
  f.std = std::sqrt(folded(parts, 0.0, sum));
  f.min = low;
  f.max = high;
  f.abs_max = std::max(high, -low);
}

// The share of constant columns, and the mean of the finite columns' standard deviations.
void columns(const std::vector<double>& values, int64_t width, Figures& f) {
  const int64_t rows = int64_t(values.size()) / width;
  f.constant_share = f.spread = kNaN;
  if (rows < 2) return;
  std::vector<double> sums(size_t(width), 0.0), squares(size_t(width), 0.0);
  std::vector<int64_t> varies(size_t(width), 0);  // as wide as a double, for vectors
  const double* first = values.data();
  for (int64_t r = 0; r < rows; ++r) {
    const double* row = first + r * width;
    for (int64_t c = 0; c < width; ++c) {
      sums[c] += row[c] - first[c];  // exactly zero where all rows are the same
      varies[c] |= int64_t(!(row[c] == first[c]));
    }
  }
  for (double& sum : sums) sum /= double(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const double* row = first + r * width;
    for (int64_t c = 0; c < width; ++c) {
      const double away = row[c] - first[c] - sums[c];
      squares[c] += away * away;
    }
  }
  int64_t num_constant = 0, num_finite = 0;
  double total = 0;
  for (int64_t c = 0; c < width; ++c) {
    num_constant += !varies[c];
    if (!std::isfinite(sums[c])) continue;
    ++num_finite;
    total += std::sqrt(squares[c] / double(rows));
  }
  f.constant_share = double(num_constant) / double(width);
  if (num_finite) f.spread = total / double(num_finite);
}

template <class Raw>
Raw raw_at(const char* at) {
  Raw raw;
  std::memcpy(&raw, at, sizeof(raw));
  return raw;
}

template <class D>
double away_from_one(const Picked& rows) {
  const int64_t width = rows.shape.back();
  double largest = 0;
  for_each_run(rows, sizeof(typename D::Raw), [&](const char* at, int64_t step) {
    double sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += D::value(raw_at<typename D::Raw>(at + i * step));
    const double away = std::fabs(sum - 1.0);
    if (!(away <= largest)) largest = away;
  });
  return largest;
}

template <class D>
void look(const Elements& x, Figures& f) {
  const bool is_complex = x.code == dlpack::kComplex;
  Picked all{x.data, x.shape, x.strides};
  if (is_complex) {
    for (int64_t& stride : all.strides) stride *= 2;
    all.shape.push_back(2);
    all.strides.push_back(1);
  }
  const Picked table = table_of(all);
  const int64_t width = table.count(1, table.shape.size());
  std::vector<double> values(size_t(table.shape[0] * width));
  std::vector<int64_t> bits(values.size());
  size_t done = 0;
  for_each_run(table, sizeof(typename D::Raw), [&](const char* at, int64_t step) {
    const int64_t count = table.shape.back();
    double* value = values.data() + done;
    int64_t* bit = bits.data() + done;
    for (int64_t i = 0; i < count; ++i) {
      const auto raw = raw_at<typename D::Raw>(at + i * step);
      value[i] = D::value(raw);
      bit[i] = bits_of(raw);
    }
    done += size_t(count);
  });
  columns(values, width, f);
  moments(std::move(values), f);
  f.digest = int64_t(digest(bits, width, x.shape));
  const bool is_unit = f.num_nonfinite == 0 && f.min >= 0.0 && f.max <= 1.0;
  const int64_t last = x.shape.size() > 1 ? x.shape.back() : 1;
  f.away_from_one = is_unit && !is_complex && last > 1 && last <= kLongestRow ? away_from_one<D>(rows_of(all)) : kNaN;
}

using Look = void (*)(const Elements&, Figures&);

Look look_at(uint8_t code, int bits) {
  if (code == dlpack::kComplex) return look_at(dlpack::kFloat, bits / 2);
  if (code == dlpack::kBfloat && bits == 16) return look<Bfloat>;
  if (code == dlpack::kBool && bits == 8) return look<Plain<uint8_t>>;
  switch (code * 256 + bits) {
    case dlpack::kFloat * 256 + 16: return look<Float16>;
    case dlpack::kFloat * 256 + 32: return look<Plain<float>>;
    case dlpack::kFloat * 256 + 64: return look<Plain<double>>;
    case dlpack::kInt * 256 + 8: return look<Plain<int8_t>>;
    case dlpack::kInt * 256 + 16: return look<Plain<int16_t>>;
    case dlpack::kInt * 256 + 32: return look<Plain<int32_t>>;
    case dlpack::kInt * 256 + 64: return look<Plain<int64_t>>;
    case dlpack::kUInt * 256 + 8: return look<Plain<uint8_t>>;
    default: return nullptr;
  }
}

}  // namespace

bool sample(const Elements& x, Figures& figures) {
  for (int64_t size : x.shape)
    if (size == 0) return false;
  const Look look = look_at(x.code, x.bits);
  if (!look) return false;
  IEEEArithmetic ieee;
  look(x, figures);
  return true;
}

}  // namespace fastguard
