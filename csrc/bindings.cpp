// What Python sees as fastguard._C. Besides this file only tensors.cpp and gradients.cpp know Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "clip.h"
#include "gradients.h"
#include "isa.h"
#include "line.h"
#include "lock.h"
#include "parallel.h"
#include "passes.h"
#include "shards.h"
#include "step.h"
#include "tensors.h"

namespace fastguard {

namespace {

// Another thread may change a list while the lock is released, so what is read is held in a tuple of our own.
bool read_held(const py::tuple& held, Odd odd, std::vector<View>& views, std::vector<py::object>& keep_alive) {
  return read_tensors(PySequence_Fast_ITEMS(held.ptr()), held.size(), odd, views, keep_alive);
}

py::tuple as_tuple(const Row& row) {
  py::tuple out(kColumns);
  for (int i = 0; i < kColumns; ++i) out[i] = reinterpret_cast<const double*>(&row)[i];
  return out;
}

// Memory for rows, in which `used` of them stay.
struct RowBytes {
  py::object bytes;

  explicit RowBytes(size_t count)
      : bytes(py::reinterpret_steal<py::object>(PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(count * sizeof(Row))))) {
    if (!bytes) throw py::error_already_set();
  }
  Row* rows() { return reinterpret_cast<Row*>(PyByteArray_AS_STRING(bytes.ptr())); }
  py::object keep(size_t used) {
    if (PyByteArray_GET_SIZE(bytes.ptr()) != Py_ssize_t(used * sizeof(Row)) &&
        PyByteArray_Resize(bytes.ptr(), Py_ssize_t(used * sizeof(Row))) != 0)
      throw py::error_already_set();
    return std::move(bytes);
  }
};

py::tuple py_fold_rows(const py::bytearray& table) {
  return as_tuple(fold_rows(PyByteArray_AS_STRING(table.ptr()), table.size() / sizeof(Row)));
}

// (rows as bytes, their fold, set of DTypes as bits); None if `plain_only` and some tensor would need preparing.
// Rows are those of the tensors times `unscale`.
py::object py_tensor_stats(const py::sequence& tensors, int num_threads, double unscale, bool plain_only) {
  py::tuple held(tensors);
  std::vector<py::object> keep_alive;
  std::vector<View> views;
  RowBytes table(held.size());
  Row total;
  if (plain_only) {
    auto items = PySequence_Fast_ITEMS(held.ptr());
    if (!measure_plain(items, held.size(), num_threads, unscale, table.rows(), views, total)) return py::none();
  } else {
    read_held(held, Odd::prepare, views, keep_alive);
    without_lock(views, [&] { total = tensor_stats(views, num_threads, unscale, table.rows()); });
  }
  return py::make_tuple(table.keep(views.size()), as_tuple(total), dtypes_of(views));
}

// The same with each tensor's sum of bits as int64 bytes, and no set of DTypes; None if some tensor would need preparing.
py::object py_stats_and_checksums(const py::sequence& tensors, int num_threads) {
  py::tuple held(tensors);
  std::vector<View> views;
  RowBytes table(held.size());
  std::vector<uint64_t> bits(held.size());
  Row total;
  auto items = PySequence_Fast_ITEMS(held.ptr());
  if (!measure_plain(items, held.size(), num_threads, 1.0, table.rows(), views, total, bits.data())) return py::none();
  py::bytearray sums(reinterpret_cast<const char*>(bits.data()), 8 * bits.size());
  return py::make_tuple(table.keep(views.size()), as_tuple(total), std::move(sums));
}

// (addresses, sizes) as int64 bytes; None if a tensor needs preparing or they are on several devices.
py::object py_locate_tensors(const py::sequence& tensors) {
  std::vector<int64_t> addresses, sizes;
  if (!locate_tensors(py::tuple(tensors), addresses, sizes)) return py::none();
  auto bytes = [](const std::vector<int64_t>& v) {
    return py::bytes(reinterpret_cast<const char*>(v.data()), 8 * v.size());
  };
  return py::make_tuple(bytes(addresses), bytes(sizes));
}

// Raises IndexError with the index of a tensor that overlaps itself; nothing is scaled then.
void py_scale(const py::sequence& tensors, double factor, int num_threads) {
  std::vector<py::object> keep_alive;
  py::tuple held(tensors);
  std::vector<View> views;
  read_held(held, Odd::prepare_writable, views, keep_alive);
  for (size_t i = 0; i < views.size(); ++i)
    if (may_overlap(views[i])) throw py::index_error(std::to_string(i));
  without_lock(views, [&] { scale(views, factor, num_threads); });
}

bool is_contiguous(const Strided& x) {
  int64_t expected = 1;
  for (size_t d = x.shape.size(); d-- > 0; expected *= x.shape[d])
    if (x.shape[d] != 1 && x.strides[d] != expected) return false;
  return expected != 0;
}

// Copies each of `source` that is contiguous to its place in `to`, if that is such another tensor; the numbers of the
// others, which are left as they are.
std::vector<size_t> py_copy(const py::sequence& to, const py::sequence& source, int num_threads) {
  py::tuple places(to), values(source);
  if (places.size() != values.size()) throw py::value_error("as many of each");
  std::vector<Copy> copies;
  std::vector<size_t> others;
  for (size_t i = 0; i < places.size(); ++i) {
    Strided a, b;
    const bool are_read = read_strided(PyTuple_GET_ITEM(places.ptr(), Py_ssize_t(i)), a) &&
                          read_strided(PyTuple_GET_ITEM(values.ptr(), Py_ssize_t(i)), b);
    if (are_read && a.dtype == b.dtype && a.shape == b.shape && is_contiguous(a) && is_contiguous(b)) {
      size_t size = size_t(itemsize(a.dtype));
      for (int64_t length : a.shape) size *= size_t(length);
      copies.push_back({a.data, b.data, size});
    } else {
      others.push_back(i);
    }
  }
  py::gil_scoped_release release;
  copy(copies, num_threads);
  return others;
}

py::tuple row_of(const Activation& a, int64_t numel) {
  return py::make_tuple(double(numel), a.mean, a.m2, a.min, a.max, double(a.num_zeros), double(a.num_near_zero),
                        double(a.num_saturated), double(a.num_nans), double(a.num_infs));
}

// A row of ACTIVATION_COLUMNS; None if the tensor would need preparing, or is complex.
py::object py_activation_stats(py::handle tensor, double low, double high, double near_zero, int num_threads) {
  Strided x;
  if (!read_strided(tensor.ptr(), x)) return py::none();
  const View view = make_view(x.data, x.dtype, false, int(x.shape.size()), x.shape.data(), x.strides.data());
  const Limits limits(low, high, near_zero);
  return row_of(without_lock(view.numel, [&] { return activation_stats(view, limits, num_threads); }), view.numel);
}

// The row, and float64 [C, 4] of CHANNEL_COLUMNS as bytes; None as above.
py::object py_channel_stats(py::handle tensor, int dim, double low, double high, double near_zero, int num_threads) {
  Strided x;
  if (!read_strided(tensor.ptr(), x)) return py::none();
  const int rank = int(x.shape.size());
  if (dim < 0 || dim >= std::max(1, rank)) throw py::index_error("dim " + std::to_string(dim));
  int64_t numel = 1;
  for (int64_t size : x.shape) numel *= size;
  const int64_t channels = rank > 0 ? x.shape[size_t(dim)] : 1;
  auto table = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(32 * channels)));
  if (!table) throw py::error_already_set();
  auto out = reinterpret_cast<double*>(PyBytes_AS_STRING(table.ptr()));
  const Limits limits(low, high, near_zero);
  Activation a = without_lock(numel, [&] { return channel_stats(x, dim, limits, num_threads, out); });
  return py::make_tuple(row_of(a, numel), std::move(table));
}

std::vector<int64_t> py_magnitude_counts(const py::sequence& tensors, int num_threads) {
  std::vector<py::object> keep_alive;
  py::tuple held(tensors);
  std::vector<View> views;
  read_held(held, Odd::prepare, views, keep_alive);
  std::vector<int64_t> counts(kMagnitudes);
  without_lock(views, [&] { magnitude_counts(views, num_threads, counts.data()); });
  return counts;
}

uint64_t py_read_stream(const py::sequence& tensors, int num_threads, bool prefetch) {
  std::vector<py::object> keep_alive;
  py::tuple held(tensors);
  std::vector<View> views;
  read_held(held, Odd::prepare, views, keep_alive);
  uint64_t sum = 0;
  without_lock(views, [&] { sum = read_stream(views, num_threads, prefetch); });
  return sum;
}

Groups groups_of(const py::list& lists) {
  Groups groups;
  for (py::handle list : lists) groups.push_back(list.ptr());
  return groups;
}

py::object py_positions(const Gradients& found) {
  return found.complete ? py::object(py::none()) : py::object(py::cast(found.positions));
}

py::list py_tensors(Gradients& found) {
  py::list tensors(found.tensors.size());
  for (size_t i = 0; i < found.tensors.size(); ++i) tensors[i] = std::move(found.tensors[i]);
  return tensors;
}

py::tuple py_collect_gradients(const py::list& groups) {
  Gradients found;
  collect_gradients(groups_of(groups), found);
  py::object positions = py_positions(found);
  return py::make_tuple(py_tensors(found), std::move(positions), found.fingerprint);
}

// Both at once, with one way through Python: (rows as bytes, their fold, positions, fingerprint, set of DTypes); None
// if a gradient would need preparing.
py::object py_gradient_stats(const py::list& groups, int num_threads, double unscale) {
  const Groups lists = groups_of(groups);
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_gradients(lists, num_threads, unscale, table.rows(), found)) return py::none();
  return py::make_tuple(table.keep(found.views.size()), as_tuple(found.total), py_positions(found), found.fingerprint,
                        found.dtypes);
}

// What is here of sharded tensors: (rows as bytes, their fold, positions, fingerprint, set of DTypes, the parts, kind of
// each as int32 bytes, kinds that there are, those of parameters without gradients too).
py::tuple as_python(ShardPlan& plan, RowBytes& table, Gradients& found) {
  py::bytearray kinds(reinterpret_cast<const char*>(plan.kinds.data()), 4 * plan.kinds.size());
  py::object positions = py_positions(found);
  return py::make_tuple(table.keep(found.views.size()), as_tuple(found.total), std::move(positions), found.fingerprint,
                        found.dtypes, py_tensors(found), std::move(kinds), py::cast(plan.used));
}

// Of gradients, and of tensors themselves; None if something would need preparing, and for tensors that are all plain.
py::object py_shard_gradients(ShardPlan& plan, const py::list& groups, int num_threads, double unscale) {
  const Groups lists = groups_of(groups);
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_shards(plan, lists, num_threads, unscale, table.rows(), found)) return py::none();
  return as_python(plan, table, found);
}

py::object py_shards(ShardPlan& plan, const py::list& tensors, int num_threads) {
  Gradients found;
  RowBytes table(tensors.size());
  if (!measure_shards(plan, tensors, num_threads, table.rows(), found)) return py::none();
  return as_python(plan, table, found);
}

// The norm, and every gradient times min(1, max_norm / (norm + 1e-6)): (norm, set of DTypes, the gradients if they were
// written to, else None). None if there is no gradient, or one that would need preparing or overlaps itself; nothing has
// happened then. With `finite_only` a norm that is not finite leaves the gradients alone.
py::object py_clip_gradients(const py::list& parameters, int num_threads, double max_norm, bool finite_only) {
  const Groups lists = {parameters.ptr()};
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_gradients(lists, num_threads, 1.0, table.rows(), found) || found.views.empty() || !found.values.empty())
    return py::none();
  const double norm = norm_of(found.total), coefficient = max_norm / (norm + 1e-6);
  const bool leave = coefficient >= 1.0 || (finite_only && !std::isfinite(norm));  // NaN is written, as torch does
  if (!leave) {
    if (any_overlap(found.views)) return py::none();
    without_lock(found.views, [&] { scale(found.views, coefficient, num_threads); });
  }
  return py::make_tuple(norm, found.dtypes, leave ? py::object(py::none()) : py::object(py_tensors(found)));
}

size_t py_follow(py::handle norms, py::handle means, py::handle limits, double keep, double ratio) {
  Array<double> held[3];
  held[0].take(norms.ptr(), false);
  held[1].take(means.ptr(), true);
  held[2].take(limits.ptr(), true);
  return follow(held[0], held[1], held[2], keep, ratio);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Kernels* k : supported_kernels()) names.push_back(k->name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastguard's CPU kernels. Internal: use fastguard.kernels.";
  m.def(
      "set_tensor_access",
      [](py::object tensor, py::object parameter, py::object gradient, py::object prepare,
         py::object prepare_writable, py::object describe, py::object api, const py::list& examples) {
        set_tensor_access({tensor, parameter, gradient, prepare, prepare_writable, describe}, api, examples);
      },
      py::arg("tensor_type"), py::arg("parameter_type"), py::arg("gradient"), py::arg("prepare"), py::arg("prepare_writable"),
      py::arg("describe"), py::arg("exchange_api"), py::arg("examples"));
  m.def("tensor_stats", &py_tensor_stats, py::arg("tensors"), py::arg("num_threads"), py::arg("unscale") = 1.0,
        py::arg("plain_only") = false);
  m.def("activation_stats", &py_activation_stats, py::arg("tensor"), py::arg("low"), py::arg("high"),
        py::arg("near_zero"), py::arg("num_threads"));
  m.def("channel_stats", &py_channel_stats, py::arg("tensor"), py::arg("dim"), py::arg("low"), py::arg("high"),
        py::arg("near_zero"), py::arg("num_threads"));
  m.def("magnitude_counts", &py_magnitude_counts, py::arg("tensors"), py::arg("num_threads"));
  m.def("locate_tensors", &py_locate_tensors, py::arg("tensors"));
  m.def("scale_", &py_scale, py::arg("tensors"), py::arg("factor"), py::arg("num_threads"));
  m.def("copy", &py_copy, py::arg("to"), py::arg("source"), py::arg("num_threads"));
  m.def("read_stream", &py_read_stream, py::arg("tensors"), py::arg("num_threads"), py::arg("prefetch"));
  m.def("collect_gradients", &py_collect_gradients, py::arg("groups"));
  m.def("gradient_stats", &py_gradient_stats, py::arg("groups"), py::arg("num_threads"), py::arg("unscale"));
  using Fast = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
  const auto fast = [](Fast function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)); };
  static PyMethodDef quick[] = {{"take_step", fast(take_step), METH_FASTCALL, nullptr},
                                {"note_loss", fast(note_loss), METH_FASTCALL, nullptr},
                                {"write_line", fast(write_line), METH_FASTCALL, nullptr}};
  for (PyMethodDef& one : quick) m.attr(one.ml_name) = py::reinterpret_steal<py::object>(PyCFunction_New(&one, nullptr));
  m.def("clip_gradients", &py_clip_gradients, py::arg("parameters"), py::arg("num_threads"), py::arg("max_norm"),
        py::arg("finite_only"));
  m.def("stats_and_checksums", &py_stats_and_checksums, py::arg("tensors"), py::arg("num_threads"));
  py::class_<ShardPlan>(m, "ShardPlan")
      .def(py::init<>())
      .def("gradient_stats", &py_shard_gradients, py::arg("groups"), py::arg("num_threads"), py::arg("unscale"))
      .def("tensor_stats", &py_shards, py::arg("tensors"), py::arg("num_threads"))
      .def_property_readonly("known", &ShardPlan::known);
  m.def("follow", &py_follow, py::arg("norms"), py::arg("means"), py::arg("limits"), py::arg("keep"), py::arg("ratio"));
  m.def("json_line", &json_line, py::arg("headers"), py::arg("index"), py::arg("table"), py::arg("time"));
  m.def("fold_rows", &py_fold_rows, py::arg("table"));
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("isa_names", &isa_names);
  m.def("select_isa", &select_kernels, py::arg("name"));
  py::tuple columns(kColumns);
  for (int i = 0; i < kColumns; ++i) {
    const Column& c = kColumnTable[i];
    columns[i] = py::make_tuple(c.name, c.power, c.fold, c.is_count);
  }
  m.attr("columns") = std::move(columns);
  m.attr("openmp") = has_threads();
#if defined(__clang__)
  m.attr("compiler") = "Clang " __clang_version__;
#else
  m.attr("compiler") = "GCC " __VERSION__;
#endif
}

}  // namespace fastguard
