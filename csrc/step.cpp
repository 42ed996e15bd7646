#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "clip.h"
#include "gradients.h"
#include "lock.h"
#include "passes.h"
#include "slot.h"
#include "state.h"

namespace fastguard {

namespace {

// What take_step returns, as bits.
enum Outcome {
  kClean = 0, kOdd = 1, kOtherParameters = 2, kNotFinite = 4, kScaled = 8, kOddLr = 16, kDropped = 32, kOver = 64, kUnsuited = 128,
  kLone = 256, kMissing = 512
};
// One element of so many holds nearly all of the squares: fastguard/records/history.py has the same.
constexpr double kLoneShare = 0.99, kLoneAmong = 256;
// Places in the list `found`.
enum Found { kTable, kPositions, kFingerprint, kGradients, kOverTheirs, kSeen, kNumFound };

// The lists of parameters of `groups`; false for anything but a list of plain dicts with plain lists in them.
bool parameter_lists(PyObject* groups, Groups& lists) {
  static PyObject* name = PyUnicode_InternFromString("params");
  if (!PyList_CheckExact(groups)) return false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); ++i) {
    PyObject* group = PyList_GET_ITEM(groups, i);
    PyObject* params = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, name) : nullptr;
    if (!params || !PyList_CheckExact(params)) return PyErr_Clear(), false;
    lists.push_back(params);
  }
  return !lists.empty();
}

// The learning rate of the first group as a number; false if it is something else, a tensor say.
bool learning_rate(PyObject* groups, double& lr, bool& known) {
  static PyObject* name = PyUnicode_InternFromString("lr");
  PyObject* value = PyDict_GetItemWithError(PyList_GET_ITEM(groups, 0), name);
  known = value && value != Py_None;
  if (!known) return PyErr_Clear(), true;
  if (!PyFloat_CheckExact(value)) return false;
  lr = PyFloat_AS_DOUBLE(value);
  return true;
}

// Room for `count` rows: the table of the step before, unless a record that was handed out holds it.
py::object table_for(PyObject* kept, size_t count) {
  const Py_ssize_t num_bytes = Py_ssize_t(count * sizeof(Row));
  if (PyByteArray_CheckExact(kept) && Py_REFCNT(kept) == 1) {
    if (PyByteArray_Resize(kept, num_bytes) != 0) throw py::error_already_set();
    return py::borrow(kept);
  }
  return py::steal(PyByteArray_FromStringAndSize(nullptr, num_bytes));
}

void put(PyObject* found, Found place, py::object value) {
  if (PyList_SetItem(found, place, value.release()) != 0) throw py::error_already_set();
}

// Marks in `seen`, a byte a parameter, those that have a gradient; false if there is no room, and some have none.
bool note_seen(PyObject* seen, const Gradients& gradients, size_t count) {
  if (!PyByteArray_CheckExact(seen) || size_t(PyByteArray_GET_SIZE(seen)) != count) return gradients.complete;
  char* marks = PyByteArray_AS_STRING(seen);
  if (gradients.complete) std::memset(marks, 1, count);
  for (int64_t position : gradients.positions) marks[position] = 1;
  return true;
}

}  // namespace

bool is_step_list(PyObject* found) { return found && PyList_CheckExact(found) && PyList_GET_SIZE(found) == kNumFound; }

int take(const Question& q) {
  const ClipLimits limits(q.limits);
  Groups lists;
  if (!parameter_lists(q.groups, lists)) return kOdd;
  const size_t count = count_parameters(lists);
  if (!limits.suits(count)) return kUnsuited;
  py::object table = table_for(PyList_GET_ITEM(q.found, kTable), count);
  Gradients gradients;
  auto rows = reinterpret_cast<Row*>(PyByteArray_AS_STRING(table.ptr()));
  if (!measure_gradients(lists, q.num_threads, 1.0, rows, gradients)) return kOdd;
  const size_t num_rows = gradients.tensors.size();
  if (num_rows < count && PyByteArray_Resize(table.ptr(), Py_ssize_t(num_rows * sizeof(Row))) != 0)
    throw py::error_already_set();

  const double norm = norm_of(gradients.total);
  const bool finite = std::isfinite(norm);
  const Ruling ruling = finite ? rule(limits, gradients, rows, norm) : Ruling();
  const double coefficient = ruling.coefficient;
  const bool is_each = !ruling.factors.empty();  // then nobody else can do it
  if ((coefficient != 1.0 || is_each) && !gradients.values.empty()) return kOdd;  // duplicates: to be scaled where they stand
  int outcome = !finite ? kNotFinite : ruling.dropped ? kDropped : kClean;
  const Row& total = gradients.total;
  if (finite && total.abs_max * total.abs_max >= kLoneShare * total.sum_sq && total.numel >= kLoneAmong &&
      total.abs_max > 0)
    outcome |= kLone;
  if (coefficient != 1.0 && !is_each && !q.scales) outcome |= kScaled;
  if (is_each || (coefficient != 1.0 && q.scales)) {
    if (!gradients.read_views()) return kOdd;
    const std::vector<View>& views = gradients.views;
    if (any_overlap(views)) return kOdd;  // is refused, in words, where there is time for it
    const int num_threads = q.num_threads ? q.num_threads : torch_num_threads();
    without_lock(views, [&] {
      if (is_each)
        scale_each(views, ruling.factors.data(), num_threads);
      else
        scale(views, coefficient, num_threads);
    });
    outcome |= kScaled;
    const py::object written = py::steal(PyList_New(0));
    for (size_t i = 0; i < gradients.tensors.size(); ++i)
      if (!is_each || ruling.factors[i] != 1.0)
        if (PyList_Append(written.ptr(), gradients.tensors[i].ptr()) != 0) throw py::error_already_set();
    put(q.found, kGradients, written);
  }
  if (!ruling.over.empty()) outcome |= kOver;
  if (!ruling.over.empty() || PyList_GET_ITEM(q.found, kOverTheirs) != Py_None)
    put(q.found, kOverTheirs, ruling.over.empty() ? py::none() : py::cast(ruling.over));

  double lr = 0;
  bool knows_lr = false;
  if (!learning_rate(q.groups, lr, knows_lr)) outcome |= kOddLr;
  double* header = header_at(q.headers, q.index);
  std::memset(header, 0, kHeaderWords * sizeof(double));
  header[kNormSq] = finite ? gradients.total.sum_sq : norm;
  header[kNorm] = norm;
  header[kClipCoef] = header[kFactor] = coefficient;
  header[kLossScale] = 1.0;
  header[kStep] = q.step;
  const double trigger = limits.trigger < 0.0 ? limits.target : limits.trigger;
  header[kTrigger] = std::isfinite(trigger) ? trigger : 0.0;
  header[kLr] = lr;
  header[kNumRows] = double(num_rows);
  header[kFlags] = ((!finite && q.skip_nonfinite) || ruling.dropped ? kSkipped : 0) + (knows_lr ? kHasLr : 0) +
                   (std::isfinite(trigger) ? kHasTrigger : 0);

  put(q.found, kTable, std::move(table));
  if (!gradients.complete || PyList_GET_ITEM(q.found, kPositions) != Py_None)
    put(q.found, kPositions, gradients.complete ? py::none() : py::cast(gradients.positions));
  PyObject* known = PyList_GET_ITEM(q.found, kFingerprint);
  if (!PyLong_CheckExact(known) || PyLong_AsUnsignedLongLong(known) != gradients.fingerprint) {
    PyErr_Clear();
    put(q.found, kFingerprint, py::cast(gradients.fingerprint));
    outcome |= kOtherParameters;
  } else if (!note_seen(PyList_GET_ITEM(q.found, kSeen), gradients, count)) {
    outcome |= kMissing;
  }
  return outcome;
}

namespace {

// What `loss` is as a number; false where asking torch is left to Python.
bool number_of(PyObject* loss, double& number) {
  if (PyFloat_CheckExact(loss)) return number = PyFloat_AS_DOUBLE(loss), true;
  View view;
  if (!is_plain_type(loss) || !read_plain(loss, view) || view.numel != 1) return false;
  float narrow = 0;
  double wide = 0;
  if (view.dtype == DType::f64) return std::memcpy(&wide, view.data, sizeof(wide)), number = wide, true;
  if (view.dtype != DType::f32) return false;
  return std::memcpy(&narrow, view.data, sizeof(narrow)), number = narrow, true;
}

}  // namespace

bool put_loss(double* header, PyObject* loss) {
  double number = 0;
  if (int(header[kFlags]) & kHasLoss || !number_of(loss, number)) return false;
  header[kLoss] = number;
  header[kFlags] += kHasLoss;
  return true;
}

PyObject* take_step(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 9) return PyErr_Format(PyExc_TypeError, "take_step takes 9 arguments, got %zd", count);
  Question q;
  q.groups = args[0];
  q.headers = args[1];
  q.index = PyLong_AsSsize_t(args[2]);
  q.found = args[3];
  q.step = double(PyLong_AsLongLong(args[4]));
  q.num_threads = int(PyLong_AsLong(args[5]));
  q.limits = args[6];
  const int skips = PyObject_IsTrue(args[7]);
  const int scales = PyObject_IsTrue(args[8]);
  if (PyErr_Occurred() || skips < 0 || scales < 0) return nullptr;
  q.skip_nonfinite = skips != 0;
  q.scales = scales != 0;
  if (!header_at(q.headers, q.index) || !is_step_list(q.found)) {
    PyErr_SetString(PyExc_ValueError, "take_step needs a bytearray of headers that holds the index, and a list of six");
    return nullptr;
  }
  try {
    return PyLong_FromLong(take(q));
  } catch (...) {
    return py::raise_current();
  }
}

}  // namespace fastguard
