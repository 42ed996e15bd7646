// The sampled rows of output and gradient, read a panel at a time. Included by loss_gradient.cpp alone.
#pragma once
#include <algorithm>
#include <cmath>

#include "elements.h"
#include "loss_gradient.h"

namespace fastguard {

namespace {

constexpr int64_t kPanel = 2048;
constexpr int64_t kMaxRows = 4096, kMaxElements = 65536, kMaxSummed = int64_t(1) << 24;
constexpr double kLeastSmoothing = 5e-3;
constexpr double kAllBut = 0.01;  // elements that rounding may spoil
constexpr double kHuge = 1.7976931348623157e308;

int64_t numel_of(const Strided& x) {
  int64_t numel = 1;
  for (int64_t size : x.shape) numel *= size;
  return numel;
}

// Rows of a tensor along one dimension, numbered in the order of the others; or its elements as one row.
class Rows {
 public:
  Rows(const Strided& x, int dim) : x_(x), dim_(dim), read_(reader(x.dtype)), size_(itemsize(x.dtype)) {
    int64_t expected = 1;
    for (size_t d = x.shape.size(); d-- > 0; expected *= x.shape[d])
      if (x.shape[d] != 1 && x.strides[d] != expected) is_dense_ = false;
  }

  void read_row(int64_t row, int64_t begin, int64_t n, double* out) const {
    const int64_t stride = x_.strides[size_t(dim_)];
    read_(x_.data + (offset(row) + begin * stride) * size_, stride, n, out);
  }

  void read_elements(const RowRange& places, int64_t begin, int64_t n, double* out) const {
    const int64_t first = places.start + begin * places.step;
    if (is_dense_) return read_(x_.data + first * size_, places.step, n, out);
    for (int64_t i = 0; i < n; ++i) read_(x_.data + offset(first + i * places.step) * size_, 1, 1, out + i);
  }

 private:
  int64_t offset(int64_t index) const {
    int64_t found = 0;
    for (int d = int(x_.shape.size()) - 1; d >= 0; --d) {
      if (d == dim_) continue;
      found += index % x_.shape[size_t(d)] * x_.strides[size_t(d)];
      index /= x_.shape[size_t(d)];
    }
    return found;
  }

  const Strided& x_;
  const int dim_;
  const Reader read_;
  const int64_t size_;
  bool is_dense_ = true;
};

// The sampled rows of output and gradient as doubles, a panel at a time. A panel that was read last is not read again,
// so of narrow rows each sweep but the first finds it here.
class Table {
 public:
  const int64_t count, width, num_rows;
  const RowRange places, reach;

  Table(const SampledRows& sample, const Strided& gradient)
      : count(sample.dim < 0 ? 1 : sample.values.shape[0]),
        width(sample.dim < 0 ? sample.values.shape[0] : sample.values.shape[1]),
        num_rows(numel_of(gradient) / width),
        places(sample.places),
        reach(sample.reach),
        sample_(sample),
        rows_(gradient, sample.dim),
        read_(reader(sample.values.dtype)),
        size_(itemsize(sample.values.dtype)) {}

  bool has_rows() const { return sample_.dim >= 0; }

  const double* y(int64_t row, int64_t begin, int64_t n) {
    if (y_at_ != row * width + begin) {
      y_at_ = row * width + begin;
      read_(sample_.values.data + y_at_ * size_, 1, n, y_);
    }
    return y_;
  }

  const double* g(int64_t row, int64_t begin, int64_t n) {
    if (g_at_ != row * width + begin) {
      g_at_ = row * width + begin;
      if (has_rows()) rows_.read_row(places.start + row * places.step, begin, n, g_);
      else rows_.read_elements(places, begin, n, g_);
    }
    return g_;
  }

  // exp(y - highest), where `highest` is of the row.
  const double* powers(int64_t row, double highest, int64_t begin, int64_t n) {
    if (e_at_ != row * width + begin) {
      e_at_ = row * width + begin;
      const double* values = y(row, begin, n);
      for (int64_t i = 0; i < n; ++i) e_[i] = std::exp(values[i] - highest);
    }
    return e_;
  }

  double y_of(int64_t row, int64_t column) const {
    double found;
    read_(sample_.values.data + (row * width + column) * size_, 1, 1, &found);
    return found;
  }

  double g_of(int64_t row, int64_t column) const {
    double found;
    rows_.read_row(places.start + row * places.step, column, 1, &found);
    return found;
  }

  const Rows& rows() const { return rows_; }

 private:
  const SampledRows& sample_;
  const Rows rows_;
  const Reader read_;
  const int64_t size_;
  int64_t y_at_ = -1, g_at_ = -1, e_at_ = -1;
  double y_[kPanel], g_[kPanel], e_[kPanel];
};

// Calls visit(begin, n) for the panels of a row.
template <class Visit>
void for_each_panel(int64_t width, Visit visit) {
  for (int64_t begin = 0; begin < width; begin += kPanel) visit(begin, std::min(kPanel, width - begin));
}

template <class Visit>
void for_each_panel(Table& table, int64_t row, Visit visit) {
  for_each_panel(table.width, [&](int64_t begin, int64_t n) { visit(begin, n, table.g(row, begin, n)); });
}

// What a row of a gradient has as a whole.
struct RowFacts {
  double largest = 0, least = HUGE_VAL, sum = 0, sum_sq = 0;
  int64_t at = 0, num_negative = 0;  // `at`: of the first that is least
  bool is_finite = true;

  void add(const double* g, int64_t begin, int64_t n) {
    constexpr int kLanes = 8;
    double low[kLanes], high[kLanes], sums[kLanes] = {}, squares[kLanes] = {};
    std::fill(low, low + kLanes, HUGE_VAL);
    std::fill(high, high + kLanes, -HUGE_VAL);
    int64_t bad = 0, negative = 0, i = 0;
    for (; i + kLanes <= n; i += kLanes)
      for (int k = 0; k < kLanes; ++k) {
        const double x = g[i + k];
        low[k] = x < low[k] ? x : low[k];
        high[k] = x > high[k] ? x : high[k];
        sums[k] += x;
        squares[k] += x * x;
        negative += x < 0;
        bad += !(std::fabs(x) <= kHuge);
      }
    for (; i < n; ++i) {
      const double x = g[i];
      low[0] = x < low[0] ? x : low[0];
      high[0] = x > high[0] ? x : high[0];
      sums[0] += x;
      squares[0] += x * x;
      negative += x < 0;
      bad += !(std::fabs(x) <= kHuge);
    }
    double lowest = low[0], highest = high[0];
    for (int k = 0; k < kLanes; ++k) {
      lowest = std::min(lowest, low[k]);
      highest = std::max(highest, high[k]);
      sum += sums[k];
      sum_sq += squares[k];
    }
    if (lowest < least) {
      least = lowest;
      at = begin + (std::find(g, g + n, lowest) - g);
    }
    largest = std::max({largest, -lowest, highest});
    num_negative += negative;
    is_finite = is_finite && bad == 0;
  }
};

RowFacts facts_of_row(Table& table, int64_t row) {
  RowFacts facts;
  for_each_panel(table, row, [&](int64_t begin, int64_t n, const double* g) { facts.add(g, begin, n); });
  return facts;
}

}  // namespace

}  // namespace fastguard
