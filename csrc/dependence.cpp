// How inputs and targets hang together: twins of `how_it_follows` and `how_near` in Python.
#include <algorithm>
#include <cmath>

#include "elements.h"
#include "ieee.h"
#include "loss_gradient.h"

namespace fastguard {

namespace {

constexpr int64_t kMaxSamples = 64, kMaxFeatures = 256;

// Rows of a dense table as doubles.
struct Reading {
  const Strided& x;
  const Reader read = reader(x.dtype);
  const int64_t features = x.shape[1], size = itemsize(x.dtype);

  void row(int64_t i, int64_t step, int64_t n, double* out) const { read(x.data + i * features * size, step, n, out); }
};

std::vector<double> correlations(const Strided& x, const double* y) {
  const Reading rows{x};
  const size_t n = size_t(x.shape[0]), features = size_t(x.shape[1]);
  std::vector<double> first(features), means(features), squares(features), products(features), row(features);
  double y_mean = 0, y_sq = 0;
  rows.row(0, 1, int64_t(features), first.data());
  for (size_t i = 0; i < n; ++i) {  // from the first row: what is constant is exactly zero then
    rows.row(int64_t(i), 1, int64_t(features), row.data());
    for (size_t f = 0; f < features; ++f) means[f] += row[f] - first[f];
    y_mean += y[i] - y[0];
  }
  for (double& mean : means) mean /= double(n);
  y_mean /= double(n);
  for (size_t i = 0; i < n; ++i) {
    rows.row(int64_t(i), 1, int64_t(features), row.data());
    const double b = y[i] - y[0] - y_mean;
    y_sq += b * b;
    for (size_t f = 0; f < features; ++f) {
      const double a = row[f] - first[f] - means[f];
      squares[f] += a * a;
      products[f] += a * b;
    }
  }
  for (size_t f = 0; f < features; ++f) {
    const double size = std::sqrt(squares[f]) * std::sqrt(y_sq);
    const double found = size > 0 ? std::fabs(products[f]) / std::max(size, 1e-300) : 0.0;
    products[f] = std::isnan(found) ? 0.0 : std::min(found, 1.0);
  }
  return products;
}

// Of integers: the shares that are equal, where places of a sample follow each other, and where they alternate.
std::vector<double> equal_shares(const Strided& x, const double* y, int64_t each) {
  const Reading rows{x};
  const int64_t n = x.shape[0], features = x.shape[1], ways = features / each;
  std::vector<double> shares(size_t(2 * ways)), row(static_cast<size_t>(features));
  for (int64_t i = 0; i < n; ++i) {
    rows.row(i, 1, features, row.data());
    for (int64_t way = 0; way < ways; ++way)
      for (int64_t e = 0; e < each; ++e) {
        const double target = y[i * each + e];
        shares[size_t(way)] += row[size_t(way * each + e)] == target;
        shares[size_t(ways + way)] += row[size_t(e * ways + way)] == target;
      }
  }
  for (double& share : shares) share /= double(n * each);
  return shares;
}

// Distances of rows, of those before each: Euclid's, or how many places differ.
std::vector<double> distances(const std::vector<double>& rows, size_t n, bool is_floating) {
  const size_t features = rows.size() / n;
  std::vector<double> found;
  found.reserve(n * (n - 1) / 2);
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < i; ++j) {
      const double *a = &rows[i * features], *b = &rows[j * features];
      double lanes[4] = {};
      size_t f = 0;
      if (is_floating) {
        for (; f + 4 <= features; f += 4)
          for (size_t k = 0; k < 4; ++k) lanes[k] += (a[f + k] - b[f + k]) * (a[f + k] - b[f + k]);
        for (; f < features; ++f) lanes[0] += (a[f] - b[f]) * (a[f] - b[f]);
      } else {
        for (; f < features; ++f) lanes[0] += a[f] != b[f];
      }
      const double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      found.push_back(is_floating ? std::sqrt(sum) : sum);
    }
  return found;
}

// The lower median of all n² distances: each of `pairs` twice, and n zeros.
double median_of(std::vector<double> pairs, size_t n) {
  const size_t middle = (n * n - 1) / 2;
  if (middle < n) return 0.0;
  const auto at = pairs.begin() + std::ptrdiff_t((middle - n) / 2);
  std::nth_element(pairs.begin(), at, pairs.end());
  return *at;
}

// Drops columns without spread, and divides the others by theirs.
void standardise(std::vector<double>& rows, size_t n) {
  const size_t features = rows.size() / n;
  std::vector<double> scales(features);
  size_t kept = 0;
  for (size_t f = 0; f < features; ++f) {
    double sum = 0, sq = 0;
    for (size_t i = 0; i < n; ++i) sum += rows[i * features + f] - rows[f];
    for (size_t i = 0; i < n; ++i) {
      const double away = rows[i * features + f] - rows[f] - sum / double(n);
      sq += away * away;
    }
    scales[f] = std::sqrt(sq / double(n - 1));
    kept += scales[f] > 0.0;
  }
  std::vector<double> scaled;
  scaled.reserve(n * kept);
  for (size_t i = 0; i < n; ++i)
    for (size_t f = 0; f < features; ++f)
      if (scales[f] > 0.0) scaled.push_back(rows[i * features + f] / scales[f]);
  rows = std::move(scaled);
}

// From distances of pairs takes the means of their rows, and adds that of all, as if each were there twice. All are zero
// where no more than rounding is left, as where one row is unlike all others.
void centre(std::vector<double>& pairs, size_t n) {
  std::vector<double> sums(n);
  double all = 0, before = 0, after = 0;
  size_t at = 0;
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < i; ++j, ++at) {
      before += pairs[at] * pairs[at];
      sums[i] += pairs[at];
      sums[j] += pairs[at];
    }
  for (double& sum : sums) all += sum /= double(n - 2);
  at = 0;
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < i; ++j, ++at) {
      pairs[at] += all / double(n - 1) - sums[i] - sums[j];
      after += pairs[at] * pairs[at];
    }
  if (after <= 1e-18 * before) std::fill(pairs.begin(), pairs.end(), 0.0);
}

}  // namespace

std::vector<double> how_it_follows(const Strided& x, bool is_floating, const double* targets, int64_t each) {
  IEEEArithmetic ieee;
  const int64_t features = x.shape[1];
  if (each == 1 && features > 1) return correlations(x, targets);
  if (each == 1 || is_floating || features % each) return {};
  if (std::all_of(targets, targets + x.shape[0] * each, [&](double y) { return y == targets[0]; })) return {};
  return equal_shares(x, targets, each);
}

double how_near(const Strided& x, bool is_floating, const double* targets, int64_t each, bool are_floating) {
  IEEEArithmetic ieee;
  const size_t n = size_t(std::min(x.shape[0], kMaxSamples));
  const auto every = [](int64_t features) { return (features + kMaxFeatures - 1) / kMaxFeatures; };
  const Reading source{x};
  const int64_t step = every(source.features), target_step = every(each);
  const size_t width = size_t((source.features + step - 1) / step);
  std::vector<double> rows(n * width), answers;
  for (size_t i = 0; i < n; ++i) source.row(int64_t(i), step, int64_t(width), &rows[i * width]);
  for (size_t i = 0; i < n; ++i)
    for (int64_t f = 0; f < each; f += target_step) answers.push_back(targets[int64_t(i) * each + f]);
  if (is_floating) standardise(rows, n);
  if (rows.empty()) return NAN;
  std::vector<double> near = distances(rows, n, is_floating);
  if (std::any_of(near.begin(), near.end(), [](double d) { return std::isnan(d); })) return NAN;
  const double median = median_of(near, n);
  if (!(median > 0.0)) return NAN;
  for (double& d : near) d = -std::exp(-2.0 * (d / median));
  std::vector<double> far = distances(answers, n, are_floating);
  centre(near, n);
  centre(far, n);
  double product = 0, near_sq = 0, far_sq = 0;
  for (size_t i = 0; i < near.size(); ++i) {
    product += near[i] * far[i];
    near_sq += near[i] * near[i];
    far_sq += far[i] * far[i];
  }
  return product / (std::sqrt(near_sq) * std::sqrt(far_sq)) * std::sqrt(double(n) * double(int64_t(n) - 3) / 2.0);
}

}  // namespace fastguard
