#include "loss_gradient.h"

#include "ieee.h"
#include "loss_classes.h"
#include "passes.h"

namespace fastguard {

namespace {

// Calls visit(y, g, n) for the elements of a table, as far as `kMaxElements`.
template <class Visit>
void for_each_element(Table& table, Visit visit) {
  int64_t rest = kMaxElements;
  for (int64_t row = 0; row < table.count && rest > 0; ++row)
    for_each_panel(std::min(table.width, rest), [&](int64_t begin, int64_t n) {
      const int64_t all = std::min(kPanel, table.width - begin);  // as the table keeps them
      visit(table.y(row, begin, all), table.g(row, begin, all), n);
      rest -= n;
    });
}

// Whether made(y, g) is the same of all elements.
template <class Make>
bool is_constant_over(Table& table, double tolerance, std::vector<double>& values, Make make) {
  values.clear();
  for_each_element(table, [&](const double* y, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values.push_back(make(y[i], g[i]));
  });
  return is_constant(values, tolerance);
}

bool of_pairs(Table& table, double tolerance, std::vector<double>& values, Loss& loss) {
  if (table.count * table.width < 4) return false;
  const auto with_logits = [](double y, double g) {
    const double p = 1 / (1 + std::exp(-y));
    return g < 0 ? -g / std::max(1 - p, 1e-12) : g / std::max(p, 1e-12);
  };
  const auto of_share = [](double y, double g) { return g < 0 ? -g * y : g * (1 - y); };
  bool are_shares = true;
  if (is_constant_over(table, tolerance, values, with_logits)) {
    loss.kind = LossKind::with_logits;
  } else {
    for_each_element(table, [&](const double* y, const double*, int64_t n) {
      for (int64_t i = 0; i < n; ++i) are_shares = are_shares && y[i] >= 0 && y[i] <= 1;
    });
    if (!are_shares || !is_constant_over(table, tolerance, values, of_share)) return false;
    loss.kind = LossKind::binary;
  }
  for_each_element(table, [&](const double*, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i) loss.targets.push_back(g[i] < 0);
  });
  return true;
}

// Whether all elements but zeros are one number to the last bit: the gradient of a sum or a mean of the output.
bool is_one_number(Table& table) {
  double first = 0;
  bool is_one = true;
  for_each_element(table, [&](const double*, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      if (first == 0) first = g[i];
      is_one = is_one && (g[i] == 0 || g[i] == first);
    }
  });
  return is_one;
}

bool is_absolute(Table& table, double tolerance) {
  double largest = 0;
  bool is_one_size = true;
  for_each_element(table, [&](const double*, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::fabs(g[i]));
  });
  for_each_element(table, [&](const double*, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
      is_one_size = is_one_size && (g[i] == 0 || largest - std::fabs(g[i]) <= tolerance * largest);
  });
  return is_one_size;
}

double sum_of_squares(const Strided& x, int num_threads) {
  std::vector<View> views;
  views.push_back(make_view(x.data, x.dtype, false, int(x.shape.size()), x.shape.data(), x.strides.data()));
  if (views[0].numel > kMaxSummed) return NAN;
  Row row;
  return tensor_stats(views, num_threads, 1.0, &row).sum_sq;
}

void of_squares(Table& table, const Strided& gradient, int num_threads, std::vector<double>& values, Loss& loss) {
  const double half = double(numel_of(gradient)) / 2.0;
  values.clear();
  double sum = 0, sq = 0;
  int64_t num_ends = 0;
  loss.least = HUGE_VAL, loss.largest = -HUGE_VAL;
  for_each_element(table, [&](const double* y, const double* g, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const double target = y[i] - g[i] * half;
      values.push_back(target);
      sum += target;
      loss.least = std::min(loss.least, target);
      loss.largest = std::max(loss.largest, target);
      num_ends += std::fabs(target) < 1e-3 || std::fabs(target - 1.0) < 1e-3;
    }
  });
  const double count = double(values.size());
  loss.kind = LossKind::squared;
  loss.mean = sum / count;
  for (double target : values) sq += (target - loss.mean) * (target - loss.mean);
  loss.std = std::sqrt(sq / count);
  loss.binary_share = double(num_ends) / count;
  loss.mean_squared = sum_of_squares(gradient, num_threads) * half / 2.0;
  loss.targets = std::move(values);
}

// Whether a gradient with no sampled element is zero, as far as can be seen.
bool has_gradient(Table& table, const RowRange& reach) {
  double panel[kPanel];
  bool has = false;
  const auto look = [&](int64_t n) {
    for (int64_t i = 0; i < n; ++i) has = has || panel[i] != 0;
  };
  if (!table.has_rows()) {
    for_each_panel(reach.count, [&](int64_t begin, int64_t n) {
      if (has) return;
      table.rows().read_elements(reach, begin, n, panel);
      look(n);
    });
    return has;
  }
  for (int64_t i = 0; i < reach.count && !has; ++i)
    for_each_panel(table.width, [&](int64_t begin, int64_t n) {
      if (has) return;
      table.rows().read_row(reach.start + i * reach.step, begin, n, panel);
      look(n);
    });
  return has;
}

double tolerance_of(DType dtype) { return dtype == DType::bf16 ? 1e-2 : dtype == DType::f16 ? 4e-3 : 2e-3; }

}  // namespace

bool is_table(const Strided& x) {
  if (x.shape.size() != 2 || x.shape[0] < 1 || x.shape[1] < 1) return false;
  return (x.shape[1] == 1 || x.strides[1] == 1) && (x.shape[0] == 1 || x.strides[0] == x.shape[1]);
}

bool fits(const SampledRows& sample, const Strided& gradient) {
  const std::vector<int64_t>& shape = sample.values.shape;
  const int dim = sample.dim;
  if (!is_table(sample.values) || dim >= int(gradient.shape.size())) return false;
  const int64_t width = dim < 0 ? 1 : gradient.shape[size_t(dim)];
  if (shape[1] != width) return false;
  const int64_t num_rows = numel_of(gradient) / width;
  for (const RowRange& range : {RowRange{sample.places.start, sample.places.step, shape[0]}, sample.reach})
    if (range.start < 0 || range.step < 1 || range.count < 0 ||
        (range.count > 0 && range.start + (range.count - 1) * range.step >= num_rows))
      return false;
  return true;
}

Loss kind_of_loss(const std::vector<SampledRows>& samples, const Strided& gradient, int num_threads) {
  IEEEArithmetic ieee;
  std::vector<Table> tables;
  tables.reserve(samples.size());
  double tolerance = tolerance_of(gradient.dtype);
  bool has = false, is_finite = true;
  for (const SampledRows& sample : samples) {
    tolerance = std::max(tolerance, tolerance_of(sample.values.dtype));
    Table& table = tables.emplace_back(sample, gradient);
    for (int64_t row = 0; row < table.count; ++row)
      for_each_panel(table, row, [&](int64_t begin, int64_t n, const double* g) {
        const double* y = table.y(row, begin, n);
        int64_t num_bad = 0, num = 0;
        for (int64_t i = 0; i < n; ++i) {
          num += g[i] != 0;
          num_bad += !(std::fabs(g[i]) <= kHuge) + !(std::fabs(y[i]) <= kHuge);
        }
        has = has || (num > 0 && tables.size() == 1);
        is_finite = is_finite && num_bad == 0;
      });
  }
  Loss loss;
  if (!has) {
    if (!has_gradient(tables[0], tables[0].reach)) loss.kind = LossKind::zero;
    return loss;
  }
  if (!is_finite) return loss;
  for (Table& table : tables)
    if (table.has_rows() && ClassTest(table, tolerance).run(loss)) return loss;
  loss.num_rows = numel_of(gradient);
  loss.is_sampled = samples[0].places.step > 1;
  if (is_one_number(tables[0])) return loss;
  std::vector<double> values;
  if (of_pairs(tables[0], tolerance, values, loss)) return loss;
  if (is_absolute(tables[0], tolerance)) {
    loss.kind = LossKind::absolute;
    return loss;
  }
  of_squares(tables[0], gradient, num_threads, values, loss);
  return loss;
}

}  // namespace fastguard
