// Losses over classes. Each row of the gradient shows one target. Only loss_gradient.cpp includes this.
#pragma once
#include "loss_rows.h"

namespace fastguard {

namespace {

// Whether all but one in a hundred of `x` are their median, to within rounding. Leaves `x` in another order.
bool is_constant(std::vector<double>& x, double tolerance) {
  for (double value : x)
    if (std::isnan(value)) return false;
  const auto at = x.begin() + std::ptrdiff_t((x.size() - 1) / 2);
  std::nth_element(x.begin(), at, x.end());
  const double middle = *at;
  if (middle == 0.0 || !std::isfinite(middle)) return false;
  size_t off = 0;
  for (double value : x) off += std::fabs(value / middle - 1.0) > 10 * tolerance;
  return double(off) / double(x.size()) <= kAllBut;
}

// A row that has a gradient. Three columns may be its class: the least gradient; and, where a target that is more than
// sure already is pushed back, what a usual scale leaves of p.
struct UsedRow {
  int64_t row;
  double largest, highest = 0, scale = 0;  // the softmax is exp(y - highest) times the scale
  int32_t chosen[3] = {};
};

// Sums over all rows that say how well a (p - one) + b (C one - 1) explains g.
struct Normal {
  double away_sq = 0, away_spread = 0, spread_sq = 0, g_away = 0, g_spread = 0, g_sq = 0;

  double left(double a, double b) const {
    const double rest = g_sq - 2 * a * g_away - 2 * b * g_spread + a * a * away_sq + 2 * a * b * away_spread +
                        b * b * spread_sq;
    return std::sqrt(std::max(rest, 0.0) / g_sq);
  }
};

class ClassTest {
 public:
  ClassTest(Table& table, double tolerance) : table_(table), tolerance_(tolerance) {}

  bool run(Loss& loss) {
    int64_t off_balance = 0, not_one = 0;
    bool is_one_hot = true;
    for (int64_t row = 0; row < std::min(table_.count, kMaxRows); ++row) {
      const RowFacts facts = facts_of_row(table_, row);
      if (!(facts.largest > 0)) continue;  // padding has no gradient
      used_.push_back({row, facts.largest, 0, 0, {int32_t(facts.at), 0, 0}});
      off_balance += !(std::fabs(facts.sum) <= tolerance_ * facts.largest);
      not_one += facts.num_negative != 1;
      is_one_hot = is_one_hot && facts.num_negative == 1 && has_one(row, facts.largest);
    }
    if (used_.empty()) return false;
    if (is_one_hot) return of_likelihood(loss);
    const double count = double(used_.size());
    if (double(off_balance) / count > kAllBut) return false;
    compare_with_softmax();
    for (int way = 0; way < 3; ++way)
      if (is_smoothed(way)) return found(loss, LossKind::smoothed, way);
    if (double(not_one) / count > kAllBut || double(misfits_) / count > kAllBut) return false;
    return found(loss, LossKind::cross_entropy, 0);
  }

 private:
  bool has_one(int64_t row, double largest) {
    int64_t num = 0;
    for_each_panel(table_, row, [&](int64_t, int64_t n, const double* g) {
      for (int64_t i = 0; i < n; ++i) num += std::fabs(g[i]) > 1e-12 * largest;
    });
    return num == 1;
  }

  bool of_likelihood(Loss& loss) {
    std::vector<double> scales, alone;
    bool are_positive = used_.size() > 1;
    for (const UsedRow& u : used_) {
      const double g = table_.g_of(u.row, u.chosen[0]);
      alone.push_back(g);
      scales.push_back(-(g * table_.y_of(u.row, u.chosen[0])));
      are_positive = are_positive && scales.back() > 0;
    }
    if (are_positive && is_constant(scales, tolerance_)) return found(loss, LossKind::log_of_output, 0);
    return is_constant(alone, tolerance_) && found(loss, LossKind::likelihood, 0);
  }

  // Of each row the softmax, both other columns that may be its class, the sums for all three, and whether a multiple of
  // p - one fits.
  void compare_with_softmax() {
    const double num_rows = double(used_.size()), num_classes = double(table_.width);
    for (UsedRow& u : used_) {
      set_softmax(u);
      double p_sum = 0, p_sq = 0, gp = 0, g_sum = 0, g_sq = 0, best[2] = {-HUGE_VAL, -HUGE_VAL};
      for_each_panel(table_, u.row, [&](int64_t begin, int64_t n, const double* g) {
        const double* powers = table_.powers(u.row, u.highest, begin, n);
        for (int64_t i = 0; i < n; ++i) {
          const double p = powers[i] * u.scale;
          p_sum += p;
          p_sq += p * p;
          gp += g[i] * p;
          g_sum += g[i];
          g_sq += g[i] * g[i];
          const double rest[2] = {p - g[i] * num_rows, p - g[i]};
          for (int way = 0; way < 2; ++way)
            if (rest[way] > best[way]) {
              best[way] = rest[way];
              u.chosen[1 + way] = int32_t(begin + i);
            }
        }
      });
      for (int way = 0; way < 3; ++way) {
        const double p = p_of(u, way), g = table_.g_of(u.row, u.chosen[way]);
        Normal& sums = sums_[way];
        const double away_sq = p_sq - 2 * p + 1, g_away = gp - g;
        sums.away_sq += away_sq;
        sums.g_away += g_away;
        sums.away_spread += num_classes * (p - 1) - (p_sum - 1);
        sums.spread_sq += num_classes * (num_classes - 1);
        sums.g_spread += num_classes * g - g_sum;
        sums.g_sq += g_sq;
        if (way == 0) misfits_ += !fits_row(u, way, g_away / away_sq, 0);
      }
    }
  }

  void set_softmax(UsedRow& u) {
    double sum = 0;
    u.highest = -HUGE_VAL;
    for_each_panel(table_.width, [&](int64_t begin, int64_t n) {
      const double* y = table_.y(u.row, begin, n);
      for (int64_t i = 0; i < n; ++i) u.highest = std::max(u.highest, y[i]);
    });
    for_each_panel(table_.width, [&](int64_t begin, int64_t n) {
      const double* powers = table_.powers(u.row, u.highest, begin, n);
      for (int64_t i = 0; i < n; ++i) sum += powers[i];
    });
    u.scale = 1 / sum;
  }

  double p_of(const UsedRow& u, int way) {
    return std::exp(table_.y_of(u.row, u.chosen[way]) - u.highest) * u.scale;
  }

  // Whether a (p - one) + b (C one - 1) is the row's gradient, to within a share of its largest.
  bool fits_row(const UsedRow& u, int way, double a, double b) {
    const double most = 10 * tolerance_ * u.largest, more = b * double(table_.width) - a;
    bool fits = true;
    for_each_panel(table_, u.row, [&](int64_t begin, int64_t n, const double* g) {
      const double* powers = table_.powers(u.row, u.highest, begin, n);
      const int64_t at = u.chosen[way] - begin;
      int64_t num_off = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double expected = a * (powers[i] * u.scale) - b + (i == at ? more : 0.0);
        num_off += !(std::fabs(g[i] - expected) <= most);
      }
      fits = fits && num_off == 0;
    });
    return fits;
  }

  // Whether labels of (1 - C e) one + e explain the gradient, and those of e = 0 do not.
  bool is_smoothed(int way) {
    const Normal& s = sums_[way];
    const double left = s.left(s.g_away / s.away_sq, 0);
    if (left < 0.25 * tolerance_) return false;
    const double determinant = s.away_sq * s.spread_sq - s.away_spread * s.away_spread;
    if (!(determinant > 1e-9 * s.away_sq * s.spread_sq)) return false;
    const double a = (s.spread_sq * s.g_away - s.away_spread * s.g_spread) / determinant;
    const double b = (s.away_sq * s.g_spread - s.away_spread * s.g_away) / determinant;
    const double smoothing = b / a * double(table_.width);
    if (!(a > 0) || !(kLeastSmoothing < smoothing && smoothing < 0.5)) return false;
    if (!(s.left(a, b) < 0.5 * left)) return false;
    size_t misfits = 0;
    for (const UsedRow& u : used_) misfits += !fits_row(u, way, a, b);
    return double(misfits) / double(used_.size()) <= kAllBut;
  }

  bool found(Loss& loss, LossKind kind, int way) {
    const bool reaches = table_.reach.count > 0 && way == 0;
    loss.kind = kind;
    loss.num_rows = table_.num_rows;
    loss.is_sampled = (reaches ? table_.reach : table_.places).step > 1;
    if (reaches) {
      read_targets(loss);
    } else {
      for (const UsedRow& u : used_) add(loss, table_.places, u.row, u.chosen[way]);
    }
    return true;
  }

  // Where the sample is not all there is, the least gradient tells the class of more rows.
  void read_targets(Loss& loss) {
    double panel[kPanel];
    for (int64_t i = 0; i < table_.reach.count; ++i) {
      RowFacts facts;
      for_each_panel(table_.width, [&](int64_t begin, int64_t n) {
        table_.rows().read_row(table_.reach.start + i * table_.reach.step, begin, n, panel);
        facts.add(panel, begin, n);
      });
      if (facts.largest > 0 && facts.is_finite) add(loss, table_.reach, i, facts.at);
    }
  }

  static void add(Loss& loss, const RowRange& range, int64_t row, int64_t found) {
    loss.targets.push_back(double(found));
    loss.places.push_back(double(range.start + row * range.step));
  }

  Table& table_;
  const double tolerance_;
  std::vector<UsedRow> used_;
  Normal sums_[3];
  int64_t misfits_ = 0;
};

}  // namespace

}  // namespace fastguard
