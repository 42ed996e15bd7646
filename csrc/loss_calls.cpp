#include "loss_calls.h"

#include "clip.h"
#include "lock.h"
#include "loss_gradient.h"
#include "tensors.h"

namespace fastguard {

namespace {

py::object as_bytes(const std::vector<double>& values) { return py::bytearray(values.data(), sizeof(double) * values.size()); }

int64_t number(py::handle tuple, Py_ssize_t index) { return py::integer(tuple.item(index)); }

// The targets, which `held` holds, of the rows of a dense table; null if they or it cannot be read as they are.
const double* read_pair(py::handle x, py::handle targets, int64_t each, Strided& table, Array<double>& held) {
  if (!read_strided(x.ptr(), table) || !is_table(table) || each < 1 || table.shape[0] < 4) return nullptr;
  held.take(targets.ptr(), false);
  return int64_t(held.size()) / each >= table.shape[0] ? &held[0] : nullptr;
}

}  // namespace

py::object py_kind_of_loss(py::List samples, py::handle gradient, int num_threads) {
  Strided g;
  const Py_ssize_t count = PyList_GET_SIZE(samples.ptr());
  if (count == 0 || !read_strided(gradient.ptr(), g)) return py::none();
  std::vector<SampledRows> rows{size_t(count)};
  std::vector<py::object> held;
  int64_t numel = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::object given = samples.item(i);
    SampledRows& to = rows[size_t(i)];
    held.push_back(given.item(0));
    if (!read_strided(held.back().ptr(), to.values)) return py::none();
    to.dim = int(number(given, 1));
    to.places = {number(given, 2), number(given, 3), 0};
    to.reach = {number(given, 4), number(given, 5), number(given, 6)};
    if (!fits(to, g)) return py::none();
    numel += (to.values.shape[0] + to.reach.count) * to.values.shape[1];
  }
  const Loss loss = without_lock(numel, [&] { return kind_of_loss(rows, g, num_threads); });
  return py::make_tuple(int(loss.kind), as_bytes(loss.targets), as_bytes(loss.places), loss.num_rows, loss.is_sampled,
                        loss.mean_squared, loss.least, loss.largest, loss.mean, loss.std, loss.binary_share);
}

py::object py_how_it_follows(py::handle x, bool is_floating, py::handle targets, Py_ssize_t each) {
  Strided table;
  Array<double> held;
  const double* y = read_pair(x, targets, each, table, held);
  return y ? as_bytes(how_it_follows(table, is_floating, y, each)) : py::none();
}

py::object py_how_near(py::handle x, bool is_floating, py::handle targets, Py_ssize_t each, bool are_floating) {
  Strided table;
  Array<double> held;
  const double* y = read_pair(x, targets, each, table, held);
  return y ? py::cast(how_near(table, is_floating, y, each, are_floating)) : py::none();
}

}  // namespace fastguard
