#include "clip.h"

#include <algorithm>
#include <cmath>

namespace fastguard {

namespace {

constexpr double kNoGradient = -1.0;

double as_double(PyObject* value) {
  const double number = PyFloat_AsDouble(value);
  if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

}  // namespace

double factor_of(double norm, double trigger, double target) {
  if (!(norm > trigger)) return 1.0;
  return std::min(1.0, target / (norm + (trigger < 0.0 ? 1e-6 : 0.0)));
}

ClipLimits::ClipLimits(PyObject* given) : trigger(-1.0) {
  if (!PyTuple_Check(given)) {
    target = as_double(given);
    return;
  }
  if (PyTuple_GET_SIZE(given) != 6) throw py::value_error("limits must be a float or a Limits, a tuple of six");
  trigger = as_double(PyTuple_GET_ITEM(given, 0));
  target = as_double(PyTuple_GET_ITEM(given, 1));
  has_parts = PyTuple_GET_ITEM(given, 5) != Py_None;
  if (!has_parts) return;
  groups.take(PyTuple_GET_ITEM(given, 2), false);
  triggers.take(PyTuple_GET_ITEM(given, 3), false);
  targets.take(PyTuple_GET_ITEM(given, 4), false);
  norms.take(PyTuple_GET_ITEM(given, 5), true);
  const size_t size = norms.size();
  if (triggers.is_there() != targets.is_there() || (triggers.is_there() && (triggers.size() != size || targets.size() != size)))
    throw py::value_error("there must be a trigger, a target and a norm for each part");
  for (size_t i = 0; i < groups.size(); ++i)
    if (groups[i] < -1 || groups[i] >= int(size)) throw py::value_error("groups must be parts, or -1");
}

bool ClipLimits::suits(size_t num_parameters) const {
  return !has_parts || (groups.is_there() ? groups.size() : norms.size()) == num_parameters;
}

Ruling rule(const ClipLimits& limits, const Gradients& gradients, const Row* rows, double norm) {
  Ruling ruling;
  const bool is_over = norm > limits.trigger;
  ruling.dropped = is_over && limits.target == 0.0;
  const double common = ruling.dropped ? 1.0 : factor_of(norm, limits.trigger, limits.target);
  ruling.coefficient = common;
  if (!limits.has_parts) return ruling;

  const size_t count = gradients.tensors.size(), num_parts = limits.norms.size();
  const auto part_of = [&](size_t i) -> int {
    const size_t position = gradients.complete ? i : size_t(gradients.positions[i]);
    return limits.groups.is_there() ? limits.groups[position] : int(position);
  };
  for (size_t p = 0; p < num_parts; ++p) limits.norms[p] = kNoGradient;
  for (size_t i = 0; i < count; ++i) {
    const int part = part_of(i);
    if (part < 0) continue;
    double& known = limits.norms[size_t(part)];
    const double share = norm > 0.0 ? rows[i].finite_norm / norm : 0.0;  // whose square stays within the floats
    known = limits.groups.is_there() ? std::max(known, 0.0) + share * share : rows[i].finite_norm;
  }
  if (limits.groups.is_there())
    for (size_t p = 0; p < num_parts; ++p)
      if (limits.norms[p] >= 0.0) limits.norms[p] = norm * std::sqrt(limits.norms[p]);
  if (ruling.dropped || !limits.triggers.is_there() || norm == 0.0) return ruling;

  for (size_t p = 0; p < num_parts; ++p)
    if (limits.norms[p] > limits.triggers[p] && factor_of(limits.norms[p], limits.triggers[p], limits.targets[p]) != 1.0) {
      ruling.over.push_back(int64_t(p));
      ruling.dropped = ruling.dropped || limits.targets[p] == 0.0;
    }
  if (ruling.dropped) ruling.coefficient = 1.0;
  if (ruling.dropped || ruling.over.empty()) return ruling;
  ruling.factors.assign(count, common);
  double share = 0.0;  // of the square of the norm that stays
  for (size_t i = 0; i < count; ++i) {
    const int part = part_of(i);
    const size_t p = size_t(part);
    const double factor = part < 0 ? 1.0 : factor_of(limits.norms[p], limits.triggers[p], limits.targets[p]);
    ruling.factors[i] = common * factor;
    const double kept = rows[i].finite_norm / norm * factor;
    share += kept * kept;
  }
  ruling.coefficient = common * std::min(1.0, std::sqrt(share));
  return ruling;
}

size_t follow(const Array<double>& norms, const Array<double>& means, const Array<double>& limits, double keep, double ratio) {
  if (means.size() != norms.size() || limits.size() != norms.size()) throw py::value_error("arrays must be of one length");
  size_t num_unknown = 0;
  for (size_t i = 0; i < norms.size(); ++i) {
    if (!(norms[i] > 0.0)) continue;
    if (!(means[i] > 0.0)) {
      ++num_unknown;
      continue;
    }
    means[i] = keep * means[i] + (1.0 - keep) * std::min(norms[i], limits[i]);
    limits[i] = ratio * means[i];
  }
  return num_unknown;
}

}  // namespace fastguard
