// What the gradient of a model's output tells of the loss: its kind and its targets. Reads in place, a panel at a time.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "view.h"

namespace fastguard {

// Every `step`-th row from `start` on.
struct RowRange {
  int64_t start = 0, step = 1, count = 0;
};

// Rows of the output that were gathered in the forward pass, and where the same rows are in the gradient.
struct SampledRows {
  Strided values;   // [count, width], dense
  int dim = -1;     // of the gradient, along which a row runs; -1: the sample is of single elements, `width` is 1
  RowRange places;  // of `values`, counting the gradient's rows (or elements) in the order of its other dimensions
  RowRange reach;   // rows whose targets are read from the gradient alone, where those of `values` are not all
};

// In the order of the names in fastguard/observers/loss_gradient.py.
enum class LossKind {
  unknown, zero, cross_entropy, smoothed, likelihood, log_of_output, with_logits, binary, absolute, squared
};

struct Loss {
  LossKind kind = LossKind::unknown;
  std::vector<double> targets;  // classes, or a squared error's: those that a mean over all elements would have
  std::vector<double> places;   // of classes: the row of each, of so many
  int64_t num_rows = 0;
  bool is_sampled = false;      // whether the targets are those of a sample of the rows
  double least = 0, largest = 0, mean = 0, std = 0, binary_share = 0;  // of a squared error's
  double mean_squared = NAN;    // what that mean would be; NaN also where the gradient has too many elements to read
};

// `samples` and the gradient have been checked by `fits`.
Loss kind_of_loss(const std::vector<SampledRows>& samples, const Strided& gradient, int num_threads);

// Whether `x` has rows, of elements, that lie one after the other.
bool is_table(const Strided& x);

// Whether all places are within the gradient, and the values are a table.
bool fits(const SampledRows& sample, const Strided& gradient);

// How closely each column of `x`, dense [n, features], follows the targets, [n, each]: as `how_it_follows` in Python.
std::vector<double> how_it_follows(const Strided& x, bool is_floating, const double* targets, int64_t each);

// How surely near rows of `x` have near targets: as `how_near` in Python.
double how_near(const Strided& x, bool is_floating, const double* targets, int64_t each, bool are_floating);

}  // namespace fastguard
