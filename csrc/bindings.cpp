// What Python sees as fastguard._C, bound by pybind11: the one file that includes it.
#include <algorithm>
#include <cmath>

#include "buffers.h"
#include "casters.h"
#include "clip.h"
#include "fold.h"
#include "gradients.h"
#include "isa.h"
#include "line.h"
#include "lock.h"
#include "loss_calls.h"
#include "parallel.h"
#include "passes.h"
#include "sample.h"
#include "shards.h"
#include "sketch.h"
#include "state.h"
#include "step.h"
#include "step_hooks.h"
#include "tensors.h"

namespace fastguard {

namespace pb = pybind11;

namespace {

bool read_held(const py::Held& held, Odd odd, std::vector<View>& views, std::vector<py::object>& keep_alive) {
  return read_tensors(held.items(), held.size(), odd, views, keep_alive);
}

py::object as_tuple(const Row& row) {
  py::object out = py::steal(PyTuple_New(kColumns));
  for (int i = 0; i < kColumns; ++i)
    PyTuple_SET_ITEM(out.ptr(), i, py::cast(reinterpret_cast<const double*>(&row)[i]).release());
  return out;
}

// Memory for rows, in which `used` of them stay.
struct RowBytes {
  py::object bytes;

  explicit RowBytes(size_t count) : bytes(py::bytearray(nullptr, count * sizeof(Row))) {}
  Row* rows() { return reinterpret_cast<Row*>(PyByteArray_AS_STRING(bytes.ptr())); }
  py::object keep(size_t used) {
    if (PyByteArray_GET_SIZE(bytes.ptr()) != Py_ssize_t(used * sizeof(Row)) &&
        PyByteArray_Resize(bytes.ptr(), Py_ssize_t(used * sizeof(Row))) != 0)
      throw py::error_already_set();
    return std::move(bytes);
  }
};

py::object py_fold_rows(py::Bytes table) {
  return as_tuple(fold_rows(PyByteArray_AS_STRING(table.ptr()), size_t(PyByteArray_GET_SIZE(table.ptr())) / sizeof(Row)));
}

// (rows as bytes, their fold, set of DTypes as bits); None if `plain_only` and some tensor would need preparing.
// Rows are those of the tensors times `unscale`.
py::object py_tensor_stats(const py::Held& held, int num_threads, double unscale, bool plain_only) {
  std::vector<py::object> keep_alive;
  std::vector<View> views;
  RowBytes table(held.size());
  Row total;
  unsigned dtypes = 0;
  if (plain_only) {
    if (!measure_plain(held.items(), held.size(), num_threads, unscale, table.rows(), dtypes, total)) return py::none();
  } else {
    read_held(held, Odd::prepare, views, keep_alive);
    without_lock(views, [&] { total = tensor_stats(views, num_threads, unscale, table.rows()); });
    dtypes = dtypes_of(views);
  }
  return py::make_tuple(table.keep(held.size()), as_tuple(total), dtypes);
}

// (addresses, sizes) as int64 bytes; None if a tensor needs preparing or they are on several devices.
py::object py_locate_tensors(const py::Held& tensors) {
  std::vector<int64_t> addresses, sizes;
  if (!locate_tensors(tensors, addresses, sizes)) return py::none();
  return py::make_tuple(py::bytes(addresses.data(), 8 * addresses.size()), py::bytes(sizes.data(), 8 * sizes.size()));
}

// Raises IndexError with the index of a tensor that overlaps itself; nothing is scaled then.
void py_scale(const py::Held& held, double factor, int num_threads) {
  std::vector<py::object> keep_alive;
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
std::vector<size_t> py_copy(const py::Held& places, const py::Held& values, int num_threads) {
  if (places.size() != values.size()) throw py::value_error("as many of each");
  std::vector<Copy> copies;
  std::vector<size_t> others;
  for (size_t i = 0; i < places.size(); ++i) {
    Strided a, b;
    const bool are_read = read_strided(places.items()[i], a) && read_strided(values.items()[i], b);
    if (are_read && a.dtype == b.dtype && a.shape == b.shape && is_contiguous(a) && is_contiguous(b)) {
      size_t size = size_t(itemsize(a.dtype));
      for (int64_t length : a.shape) size *= size_t(length);
      copies.push_back({a.data, b.data, size});
    } else {
      others.push_back(i);
    }
  }
  py::ReleaseLock released;
  copy(copies, num_threads);
  return others;
}

py::object row_of(const Activation& a, int64_t numel) {
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
  py::object table = py::bytes(nullptr, size_t(32 * channels));
  auto out = reinterpret_cast<double*>(PyBytes_AS_STRING(table.ptr()));
  const Limits limits(low, high, near_zero);
  Activation a = without_lock(numel, [&] { return channel_stats(x, dim, limits, num_threads, out); });
  return py::make_tuple(row_of(a, numel), std::move(table));
}

// Whether the tensor is of an exact type, in memory of the CPU, with strides. Of others Python has to ask torch.
bool py_can_read(py::handle tensor) {
  Elements x;
  return read_any(tensor.ptr(), x);
}

// The fields of Figures; None if the tensor is empty, or would need preparing.
py::object py_sample(py::handle tensor) {
  Elements x;
  Figures f;
  if (!read_any(tensor.ptr(), x) || !sample(x, f)) return py::none();
  return py::make_tuple(f.abs_max, f.mean, f.std, f.min, f.max, f.num_nonfinite, f.constant_share, f.spread, f.digest,
                        f.away_from_one);
}

uint64_t py_read_stream(const py::Held& held, int num_threads, bool prefetch) {
  std::vector<py::object> keep_alive;
  std::vector<View> views;
  read_held(held, Odd::prepare, views, keep_alive);
  uint64_t sum = 0;
  without_lock(views, [&] { sum = read_stream(views, num_threads, prefetch); });
  return sum;
}

Groups groups_of(py::List lists) {
  Groups groups;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists.ptr()); ++i) groups.push_back(PyList_GET_ITEM(lists.ptr(), i));
  return groups;
}

py::object py_positions(const Gradients& found) {
  return found.complete ? py::none() : py::cast(found.positions);
}

py::object py_collect_gradients(py::List groups) {
  Gradients found;
  collect_gradients(groups_of(groups), found);
  return py::make_tuple(py::cast(found.tensors), py_positions(found), found.fingerprint);
}

// Both at once, with one way through Python: (rows as bytes, their fold, positions, fingerprint, set of DTypes); None
// if a gradient would need preparing.
py::object py_gradient_stats(py::List groups, int num_threads, double unscale) {
  const Groups lists = groups_of(groups);
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_gradients(lists, num_threads, unscale, table.rows(), found)) return py::none();
  return py::make_tuple(table.keep(found.tensors.size()), as_tuple(found.total), py_positions(found), found.fingerprint,
                        found.dtypes);
}

// What is here of sharded tensors: (rows as bytes, their fold, positions, fingerprint, set of DTypes, the parts, kind of
// each as int32 bytes, kinds that there are, those of parameters without gradients too).
py::object as_python(ShardPlan& plan, RowBytes& table, Gradients& found) {
  return py::make_tuple(table.keep(found.tensors.size()), as_tuple(found.total), py_positions(found), found.fingerprint,
                        found.dtypes, py::cast(found.tensors), py::bytearray(plan.kinds.data(), 4 * plan.kinds.size()),
                        py::steal(pb::cast(plan.used).release().ptr()));
}

// Of gradients, and of tensors themselves; None if something would need preparing, and for tensors that are all plain.
py::object py_shard_gradients(ShardPlan& plan, py::List groups, int num_threads, double unscale) {
  const Groups lists = groups_of(groups);
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_shards(plan, lists, num_threads, unscale, table.rows(), found)) return py::none();
  return as_python(plan, table, found);
}

py::object py_shards(ShardPlan& plan, py::List tensors, int num_threads) {
  Gradients found;
  RowBytes table(size_t(PyList_GET_SIZE(tensors.ptr())));
  if (!measure_shards(plan, tensors, num_threads, table.rows(), found)) return py::none();
  return as_python(plan, table, found);
}

// The norm, and every gradient times min(1, max_norm / (norm + 1e-6)): (norm, set of DTypes, the gradients if they were
// written to, else None). None if there is no gradient, or one that would need preparing or overlaps itself; nothing has
// happened then. With `finite_only` a norm that is not finite leaves the gradients alone.
py::object clip(PyObject* parameters, int num_threads, double max_norm, bool finite_only) {
  const Groups lists = {parameters};
  Gradients found;
  RowBytes table(count_parameters(lists));
  if (!measure_gradients(lists, num_threads, 1.0, table.rows(), found) || found.tensors.empty() || !found.values.empty())
    return py::none();
  const double norm = norm_of(found.total), coefficient = max_norm / (norm + 1e-6);
  const bool leave = coefficient >= 1.0 || (finite_only && !std::isfinite(norm));  // NaN is written, as torch does
  if (!leave) {
    if (!found.read_views() || any_overlap(found.views)) return py::none();
    without_lock(found.views, [&] { scale(found.views, coefficient, num_threads); });
  }
  return py::make_tuple(norm, found.dtypes, leave ? py::none() : py::cast(found.tensors));
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

void py_set_tensor_access(py::handle tensor, py::handle parameter, py::handle gradient, py::handle prepare,
                          py::handle prepare_writable, py::handle describe, py::handle api, py::List examples) {
  set_tensor_access({py::borrow(tensor), py::borrow(parameter), py::borrow(gradient), py::borrow(prepare),
                     py::borrow(prepare_writable), py::borrow(describe)},
                    api, examples);
}

std::string isa() { return kernels().name; }
void py_select_isa(py::handle name) { select_kernels(py::text(name)); }

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif

py::object column_table() {
  py::object columns = py::steal(PyTuple_New(kColumns));
  for (int i = 0; i < kColumns; ++i) {
    const Column& c = kColumnTable[i];
    PyTuple_SET_ITEM(columns.ptr(), i, py::make_tuple(c.name, c.power, c.fold, c.is_count).release());
  }
  return columns;
}

// clip_gradients(parameters, num_threads, max_norm, finite_only)
PyObject* clip_gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "clip_gradients takes 4 arguments, got %zd", count);
  try {
    const int finite_only = PyObject_IsTrue(args[3]);
    if (finite_only < 0) throw py::error_already_set();
    return clip(args[0], int(py::integer(args[1])), py::number(args[2]), finite_only != 0).release();
  } catch (...) {
    return py::raise_current();
  }
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyCFunction as_method(FastFunction function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)); }

// Called at every step or clip. They read their arguments by hand: pybind11 would take 0.1 us more.
PyMethodDef quick_functions[] = {
    {"take_step", as_method(take_step), METH_FASTCALL, nullptr},
    {"clip_gradients", as_method(clip_gradients), METH_FASTCALL, nullptr},
    {},
};

// What CPython's own structs describe.
void add_raw(PyObject* module) {
  try {
    add_state(module);
    add_step_hooks(module);
    add_guard_descriptors(module);
    add_quiet_hooks(module);
    if (PyModule_AddFunctions(module, quick_functions) != 0) throw py::error_already_set();
  } catch (const py::error_already_set&) {
    throw pb::error_already_set();
  }
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastguard's CPU kernels. Internal: use fastguard.kernels.";
  pb::register_local_exception_translator(py::translate);
  add_raw(m.ptr());
  m.def("set_tensor_access", &py_set_tensor_access);
  m.def("tensor_stats", &py_tensor_stats);
  m.def("activation_stats", &py_activation_stats);
  m.def("channel_stats", &py_channel_stats);
  m.def("can_read", &py_can_read);
  m.def("copy_buffers", [](py::List packs) { return copy_buffers(packs.ptr()); });
  m.def("sample", &py_sample);
  m.def("locate_tensors", &py_locate_tensors);
  m.def("scale_", &py_scale);
  m.def("copy", &py_copy);
  m.def("read_stream", &py_read_stream);
  m.def("collect_gradients", &py_collect_gradients);
  m.def("gradient_stats", &py_gradient_stats);
  m.def("kind_of_loss", &py_kind_of_loss);
  m.def("how_it_follows", &py_how_it_follows);
  m.def("how_near", &py_how_near);
  m.def("follow", &py_follow);
  m.def("json_line", &json_line);
  m.def("fold", &fold);
  m.def("read_headers", &read_headers);
  m.def("sketch", &sketch);
  m.def("dot", &dot);
  m.def("fold_rows", &py_fold_rows);
  m.def("isa", &isa);
  m.def("isa_names", &isa_names);
  m.def("select_isa", &py_select_isa);
  m.def("set_step_calls", &set_step_calls);
  pb::class_<ShardPlan>(m, "ShardPlan")
      .def(pb::init<>())
      .def("gradient_stats", &py_shard_gradients)
      .def("tensor_stats", &py_shards)
      .def_property_readonly("known", &ShardPlan::known);
  m.attr("columns") = column_table();
  m.attr("openmp") = has_threads();
  m.attr("compiler") = kCompiler;
}

}  // namespace fastguard
