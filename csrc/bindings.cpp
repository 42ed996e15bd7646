// What Python sees as fastguard._C. This file and tensors.cpp are the only ones that know Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "gradients.h"
#include "isa.h"
#include "parallel.h"
#include "passes.h"
#include "step.h"
#include "tensors.h"

namespace fastguard {

namespace {

// Another thread may change a list while the lock is released, so what is read is held in a tuple of our own.
bool read_held(const py::tuple& held, Odd odd, std::vector<View>& views, std::vector<py::object>& keep_alive) {
  return read_tensors(PySequence_Fast_ITEMS(held.ptr()), held.size(), odd, views, keep_alive);
}

struct Table {
  py::object bytes;
  py::tuple fold;
};

py::tuple as_tuple(const Row& row) {
  py::tuple out(kColumns);
  for (int i = 0; i < kColumns; ++i) out[i] = reinterpret_cast<const double*>(&row)[i];
  return out;
}

Table compute(const std::vector<View>& views, int num_threads, double unscale) {
  auto table = py::reinterpret_steal<py::object>(
      PyByteArray_FromStringAndSize(nullptr, Py_ssize_t(views.size() * sizeof(Row))));
  if (!table) throw py::error_already_set();
  Row total, *rows = reinterpret_cast<Row*>(PyByteArray_AS_STRING(table.ptr()));
  without_lock(views, [&] { total = tensor_stats(views, num_threads, unscale, rows); });
  return {std::move(table), as_tuple(total)};
}

// The fold of rows that came as bytes, from first to last.
py::tuple py_fold_rows(const py::bytearray& table) {
  const char* bytes = PyByteArray_AS_STRING(table.ptr());
  Row total;
  for (size_t t = 0; t < table.size() / sizeof(Row); ++t) {
    Row row;
    std::memcpy(&row, bytes + t * sizeof(Row), sizeof(Row));
    total.merge(row);
  }
  return as_tuple(total);
}

unsigned dtypes_of(const std::vector<View>& views) {
  unsigned bits = 0;
  for (const View& view : views) bits |= 1u << unsigned(view.dtype);
  return bits;
}

// (rows as bytes, their fold, set of DTypes as bits); None if `plain_only` and some tensor would need preparing.
// Rows are those of the tensors times `unscale`.
py::object py_tensor_stats(const py::sequence& tensors, int num_threads, double unscale, bool plain_only) {
  std::vector<py::object> keep_alive;
  py::tuple held(tensors);
  std::vector<View> views;
  if (!read_held(held, plain_only ? Odd::refuse : Odd::prepare, views, keep_alive)) return py::none();
  Table table = compute(views, num_threads, unscale);
  return py::make_tuple(std::move(table.bytes), std::move(table.fold), dtypes_of(views));
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

py::tuple row_of(const Activation& a, int64_t numel) {
  return py::make_tuple(double(numel), a.mean, a.m2, a.min, a.max, double(a.num_zeros), double(a.num_near_zero),
                        double(a.num_saturated), double(a.num_nans), double(a.num_infs));
}

template <class Work>
auto maybe_without_lock(int64_t elements, Work work) {
  if (elements < kReleaseMin) return work();
  py::gil_scoped_release release;
  return work();
}

// A row of ACTIVATION_COLUMNS; None if the tensor would need preparing, or is complex.
py::object py_activation_stats(py::handle tensor, double low, double high, double near_zero, int num_threads) {
  Strided x;
  if (!read_strided(tensor.ptr(), x)) return py::none();
  const View view = make_view(x.data, x.dtype, false, int(x.shape.size()), x.shape.data(), x.strides.data());
  const Limits limits(low, high, near_zero);
  return row_of(maybe_without_lock(view.numel, [&] { return activation_stats(view, limits, num_threads); }), view.numel);
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
  Activation a = maybe_without_lock(numel, [&] { return channel_stats(x, dim, limits, num_threads, out); });
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

std::vector<PyObject*> lists_of(const py::list& groups) {
  std::vector<PyObject*> lists;
  for (py::handle group : groups) {
    if (!PyList_Check(group.ptr())) throw py::type_error("a group must be a list of parameters");
    lists.push_back(group.ptr());
  }
  return lists;
}

py::object py_positions(const Gradients& found) {
  return found.complete ? py::object(py::none()) : py::object(py::cast(found.positions));
}

py::tuple py_collect_gradients(const py::list& groups) {
  Gradients found = collect_gradients(lists_of(groups));
  py::list tensors(found.tensors.size());
  for (size_t i = 0; i < found.tensors.size(); ++i) tensors[i] = std::move(found.tensors[i]);
  return py::make_tuple(std::move(tensors), py_positions(found), found.fingerprint);
}

// Both at once, with one way through Python: (rows as bytes, their fold, positions, fingerprint, set of DTypes); None
// if a gradient would need preparing.
py::object py_gradient_stats(const py::list& groups, int num_threads, double unscale) {
  Gradients found = collect_gradients(lists_of(groups));
  std::vector<View> views;
  if (!read_gradients(found, views)) return py::none();
  Table table = compute(views, num_threads, unscale);
  return py::make_tuple(std::move(table.bytes), std::move(table.fold), py_positions(found), found.fingerprint,
                        dtypes_of(views));
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
         py::object prepare_writable, py::object describe, py::object api) {
        set_tensor_access({tensor, parameter, gradient, prepare, prepare_writable, describe}, api);
      },
      py::arg("tensor_type"), py::arg("parameter_type"), py::arg("gradient"), py::arg("prepare"), py::arg("prepare_writable"),
      py::arg("describe"), py::arg("exchange_api"));
  m.def("tensor_stats", &py_tensor_stats, py::arg("tensors"), py::arg("num_threads"), py::arg("unscale") = 1.0,
        py::arg("plain_only") = false);
  m.def("activation_stats", &py_activation_stats, py::arg("tensor"), py::arg("low"), py::arg("high"),
        py::arg("near_zero"), py::arg("num_threads"));
  m.def("channel_stats", &py_channel_stats, py::arg("tensor"), py::arg("dim"), py::arg("low"), py::arg("high"),
        py::arg("near_zero"), py::arg("num_threads"));
  m.def("magnitude_counts", &py_magnitude_counts, py::arg("tensors"), py::arg("num_threads"));
  m.def("locate_tensors", &py_locate_tensors, py::arg("tensors"));
  m.def("scale_", &py_scale, py::arg("tensors"), py::arg("factor"), py::arg("num_threads"));
  m.def("read_stream", &py_read_stream, py::arg("tensors"), py::arg("num_threads"), py::arg("prefetch"));
  m.def("collect_gradients", &py_collect_gradients, py::arg("groups"));
  m.def("gradient_stats", &py_gradient_stats, py::arg("groups"), py::arg("num_threads"), py::arg("unscale"));
  static PyMethodDef step = {"take_step", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(take_step)), METH_FASTCALL, nullptr};
  m.attr("take_step") = py::reinterpret_steal<py::object>(PyCFunction_New(&step, nullptr));
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
