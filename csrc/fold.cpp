#include "fold.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "slot.h"

namespace fastguard {

namespace {

// As in fastguard/records: running.py, trend.py, overview.py, history.py.
constexpr double kHuge = 1e150;
constexpr double kRate = 1.0 / 32, kLimitZ = 3.0, kSpikeZ = 6.0;
constexpr int64_t kWarmUp = 20, kNewLevelGap = 2;
constexpr size_t kMaxBuckets = 256;
constexpr double kEqualNorms = 1e-3;
constexpr Py_ssize_t kEntryFields = 9;

bool is_inside(double value) { return -kHuge < value && value < kHuge; }  // false for NaN

// Attributes are read and written by name: these classes are plain Python, and stay so.
struct Name {
  PyObject* object;
  explicit Name(const char* text) : object(PyUnicode_InternFromString(text)) {}
};

py::object get(PyObject* owner, const Name& name) {
  return py::steal(PyObject_GetAttr(owner, name.object));
}

double get_number(PyObject* owner, const Name& name) {
  const double value = PyFloat_AsDouble(get(owner, name).ptr());
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

int64_t get_count(PyObject* owner, const Name& name) {
  const int64_t value = PyLong_AsLongLong(get(owner, name).ptr());
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

void set(PyObject* owner, const Name& name, const py::object& value) {
  if (PyObject_SetAttr(owner, name.object, value.ptr()) != 0) throw py::error_already_set();
}

void set_number(PyObject* owner, const Name& name, double value) { set(owner, name, py::cast(value)); }

void set_count(PyObject* owner, const Name& name, int64_t value) { set(owner, name, py::cast(value)); }

struct Names {
  Name count{"count"}, mean{"mean"}, min{"min"}, max{"max"}, total{"total"}, last{"last"};
  Name var{"_var"}, best{"best"}, best_step{"best_step"}, spikes{"spikes"}, last_step{"last_step"};
  Name first_of{"_first"}, last_of{"_last"}, num{"_num"}, open{"_open"}, closed{"_closed"}, per_bucket{"steps_per_bucket"};
  Name losses{"losses"}, lrs{"lrs"}, norm_trend{"norm_trend"}, loss_trend{"loss_trend"};
  Name overview{"overview"}, recent{"recent"}, clean{"clean"}, extend{"extend"};
  Name num_steps{"num_steps"}, num_clean{"num_clean"}, num_clipped{"num_clipped"}, num_timed{"num_timed"};
  Name num_scaled{"num_scaled"}, skip_run{"skip_run"}, norm_min{"norm_min"}, norm_max{"norm_max"};
  Name overhead{"overhead_total_s"}, low{"_equal_low"}, high{"_equal_high"}, equal_run{"equal_run"};
};

const Names& names() {
  static const Names* known = new Names();  // never freed: Python may be gone before
  return *known;
}

// `Trend`, where there is no spike.
struct Course {
  int64_t count, best_step, spike_end = 0;
  double mean, var, best, last;
  bool has_spike = false;

  explicit Course(PyObject* from)
      : count(get_count(from, names().count)), best_step(get_count(from, names().best_step)),
        mean(get_number(from, names().mean)), var(get_number(from, names().var)), best(get_number(from, names().best)),
        last(get_number(from, names().last)) {
    const py::object spikes = get(from, names().spikes);
    const Py_ssize_t number = PyObject_Length(spikes.ptr());
    if (number < 0) throw py::error_already_set();
    if (number) {
      const py::object newest = py::steal(PySequence_GetItem(spikes.ptr(), number - 1));
      spike_end = get_count(newest.ptr(), names().last_step);
      has_spike = true;
    }
  }

  // False, and then of no use, where the value may be one of a spike, or the first twenty are not there yet.
  bool add(int64_t step, double value) {
    if (count < kWarmUp) return false;
    ++count;
    double delta = value - mean, change = value - last;
    const double std = std::sqrt(var), floor = 1e-6 * std::fabs(mean);
    const double limit = kLimitZ * std + floor;
    if (delta > limit) {
      if (has_spike && step - spike_end <= kNewLevelGap) return false;
      if (!(delta <= kSpikeZ * (std + floor))) return false;
    }
    if (change > limit)
      change = limit;
    else if (change < -limit)
      change = -limit;
    mean += kRate * delta;
    var += kRate * (0.5 * change * change - var);
    last = value;
    if (mean < best) best = mean, best_step = step;
    return true;
  }

  void store(PyObject* to) const {
    set_count(to, names().count, count);
    set_count(to, names().best_step, best_step);
    set_number(to, names().mean, mean);
    set_number(to, names().var, var);
    set_number(to, names().best, best);
    set_number(to, names().last, last);
  }
};

// `Running`.
struct Filling {
  int64_t count = 0;
  double total = 0.0, min = std::numeric_limits<double>::infinity(), max = -std::numeric_limits<double>::infinity();
  double last = std::numeric_limits<double>::quiet_NaN();

  Filling() = default;
  explicit Filling(PyObject* from)
      : count(get_count(from, names().count)), total(get_number(from, names().total)), min(get_number(from, names().min)),
        max(get_number(from, names().max)), last(get_number(from, names().last)) {}

  void add(double value) {
    total += value;
    ++count;
    last = value;
    if (value < min) min = value;
    if (value > max) max = value;
  }

  py::object summary(PyTypeObject* type) const {
    const double nothing = std::numeric_limits<double>::quiet_NaN();
    py::object summary = py::steal(type->tp_alloc(type, 5));
    PyTuple_SET_ITEM(summary.ptr(), 0, py::cast(count).release());
    const double numbers[4] = {min, max, total / double(count), last};
    for (Py_ssize_t i = 0; i < 4; ++i)
      PyTuple_SET_ITEM(summary.ptr(), i + 1, py::cast(count ? numbers[i] : nothing).release());
    return summary;
  }

  void store(PyObject* to) const {
    set_count(to, names().count, count);
    set_number(to, names().total, total);
    set_number(to, names().min, min);
    set_number(to, names().max, max);
    set_number(to, names().last, last);
  }
};

// One step, where all of its numbers are usual ones. Absent numbers are NaN.
struct Step {
  int64_t step;
  double norm, clip_coef, loss, lr, overhead_s;
  bool has_loss, has_lr, is_scaled, is_timed;

  // False for a step that is left to Python.
  bool read(PyObject* entry) {
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != kEntryFields) return false;
    PyObject* const* fields = &PyTuple_GET_ITEM(entry, 0);
    int overflow = 0;
    if (!PyLong_CheckExact(fields[0])) return false;
    step = PyLong_AsLongLongAndOverflow(fields[0], &overflow);
    if (overflow || !PyFloat_CheckExact(fields[1]) || !PyFloat_CheckExact(fields[2])) return false;
    norm = PyFloat_AS_DOUBLE(fields[1]);
    clip_coef = PyFloat_AS_DOUBLE(fields[2]);
    if (fields[3] != Py_False || fields[5] != Py_None) return false;
    bool is_fine = norm > 0.0 && norm < kHuge;
    is_fine = is_fine && take(fields[4], loss, has_loss) && is_inside(loss);
    is_fine = is_fine && take(fields[6], lr, has_lr) && is_inside(lr);
    is_scaled = fields[7] != Py_None;
    return is_fine && take(fields[8], overhead_s, is_timed);
  }

  static bool take(PyObject* field, double& value, bool& is_there) {
    is_there = field != Py_None;
    if (is_there && !PyFloat_CheckExact(field)) return false;
    value = is_there ? PyFloat_AS_DOUBLE(field) : 0.0;
    return true;
  }
};

struct Folding {
  PyObject* history;
  PyTypeObject *bucket_type, *summary_type;
  py::object overview, series, closed;
  Filling losses, lrs;
  Course norm_trend, loss_trend;
  Filling open[3];
  int64_t first, last, num, per_bucket;
  std::vector<py::object> buckets;
  size_t num_closed;
  double norm_min, norm_max, overhead, low, high;
  int64_t equal_run, num_clipped = 0, num_timed = 0, num_scaled = 0;

  Folding(PyObject* into, PyTypeObject* bucket, PyTypeObject* summary)
      : history(into), bucket_type(bucket), summary_type(summary), overview(get(into, names().overview)),
        series(get(overview.ptr(), names().open)), closed(get(overview.ptr(), names().closed)),
        losses(get(into, names().losses).ptr()), lrs(get(into, names().lrs).ptr()), norm_trend(get(into, names().norm_trend).ptr()),
        loss_trend(get(into, names().loss_trend).ptr()), first(get_count(overview.ptr(), names().first_of)),
        last(get_count(overview.ptr(), names().last_of)), num(get_count(overview.ptr(), names().num)),
        per_bucket(get_count(overview.ptr(), names().per_bucket)), norm_min(get_number(into, names().norm_min)),
        norm_max(get_number(into, names().norm_max)), overhead(get_number(into, names().overhead)),
        low(get_number(into, names().low)), high(get_number(into, names().high)),
        equal_run(get_count(into, names().equal_run)) {
    if (!PyTuple_CheckExact(series.ptr()) || PyTuple_GET_SIZE(series.ptr()) != 3 || !PyList_CheckExact(closed.ptr()))
      throw py::type_error("an overview has three series and a list of buckets");
    for (Py_ssize_t i = 0; i < 3; ++i) open[i] = Filling(PyTuple_GET_ITEM(series.ptr(), i));
    num_closed = size_t(PyList_GET_SIZE(closed.ptr()));
  }

  // False, and nothing has changed, for a step that is left to Python.
  bool add(const Step& s) {
    const bool closes = num + 1 >= per_bucket;
    if (num >= per_bucket || (closes && num_closed + buckets.size() + 1 >= kMaxBuckets)) return false;
    Course norms = norm_trend, course = loss_trend;
    const double log_of = std::log(s.norm);
    if (!norms.add(s.step, log_of) || (s.has_loss && !course.add(s.step, s.loss))) return false;
    if (num == 0) first = s.step;
    last = s.step;
    ++num;
    if (s.has_loss) open[0].add(s.loss);
    open[1].add(s.norm);
    if (s.has_lr) open[2].add(s.lr);
    norm_trend = norms;
    loss_trend = course;
    if (s.has_loss) losses.add(s.loss);
    if (s.has_lr) lrs.add(s.lr);
    if (s.norm < norm_min) norm_min = s.norm;
    if (s.norm > norm_max) norm_max = s.norm;
    num_clipped += s.clip_coef != 1.0;
    num_scaled += s.is_scaled;
    num_timed += s.is_timed;
    if (s.is_timed) overhead += s.overhead_s;
    if (s.norm < low) low = s.norm;
    if (s.norm > high) high = s.norm;
    if (equal_run && high - low <= kEqualNorms * low)
      ++equal_run;
    else
      equal_run = 1, low = high = s.norm;
    if (closes) close();
    return true;
  }

  void close() {
    py::object bucket = py::steal(bucket_type->tp_alloc(bucket_type, 6));
    const int64_t numbers[3] = {first, last, num};
    for (Py_ssize_t i = 0; i < 3; ++i)
      PyTuple_SET_ITEM(bucket.ptr(), i, py::cast(numbers[i]).release());
    for (Py_ssize_t i = 0; i < 3; ++i) {
      PyTuple_SET_ITEM(bucket.ptr(), i + 3, open[i].summary(summary_type).release());
      open[i] = Filling();
    }
    num = 0;
    buckets.push_back(std::move(bucket));
  }

  void grow(const Name& name, int64_t number) {
    if (number) set_count(history, name, get_count(history, name) + number);
  }

  void store(PyObject* entries, Py_ssize_t start, Py_ssize_t end) {
    const py::object taken = py::steal(PyList_GetSlice(entries, start, end));
    for (const Name* name : {&names().recent, &names().clean})
      py::steal(PyObject_CallMethodObjArgs(get(history, *name).ptr(), names().extend.object, taken.ptr(), nullptr));
    losses.store(get(history, names().losses).ptr());
    lrs.store(get(history, names().lrs).ptr());
    norm_trend.store(get(history, names().norm_trend).ptr());
    loss_trend.store(get(history, names().loss_trend).ptr());
    for (Py_ssize_t i = 0; i < 3; ++i) open[i].store(PyTuple_GET_ITEM(series.ptr(), i));
    for (const py::object& bucket : buckets)
      if (PyList_Append(closed.ptr(), bucket.ptr()) != 0) throw py::error_already_set();
    set_count(overview.ptr(), names().first_of, first);
    set_count(overview.ptr(), names().last_of, last);
    set_count(overview.ptr(), names().num, num);
    set_number(history, names().norm_min, norm_min);
    set_number(history, names().norm_max, norm_max);
    set_number(history, names().overhead, overhead);
    set_number(history, names().low, low);
    set_number(history, names().high, high);
    set_count(history, names().equal_run, equal_run);
    set_count(history, names().skip_run, 0);
    grow(names().num_steps, end - start);
    grow(names().num_clean, end - start);
    grow(names().num_clipped, num_clipped);
    grow(names().num_timed, num_timed);
    grow(names().num_scaled, num_scaled);
  }
};

PyTypeObject* tuple_type(py::handle type) {
  if (!PyType_Check(type.ptr()) || !PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(type.ptr()), &PyTuple_Type))
    throw py::type_error("a type of tuples is needed");
  return reinterpret_cast<PyTypeObject*>(type.ptr());
}

}  // namespace

Py_ssize_t fold(py::handle history, py::List entries, Py_ssize_t start, Py_ssize_t end, py::handle bucket_type,
                py::handle summary_type) {
  PyObject* list = entries.ptr();
  if (start < 0 || end > PyList_GET_SIZE(list)) throw py::index_error("the list has fewer steps");
  Step step;
  if (start >= end || !step.read(PyList_GET_ITEM(list, start))) return start;
  std::optional<Folding> folding;
  try {
    folding.emplace(history.ptr(), tuple_type(bucket_type), tuple_type(summary_type));
  } catch (const py::error_already_set&) {
    if (!PyErr_ExceptionMatches(PyExc_OverflowError)) throw;
    PyErr_Clear();  // a log may number its steps beyond 64 bits: these are left to Python
    return start;
  }
  Py_ssize_t place = start;
  while (place < end && step.read(PyList_GET_ITEM(list, place)) && folding->add(step)) ++place;
  if (place > start) folding->store(list, start, place);
  return place;
}

py::object read_headers(py::Bytes headers, Py_ssize_t count, py::handle type) {
  const Py_ssize_t bytes = kHeaderWords * Py_ssize_t(sizeof(double));
  if (count < 0 || count * bytes > PyByteArray_GET_SIZE(headers.ptr())) throw py::index_error("there are fewer headers");
  PyTypeObject* kind = tuple_type(type);
  auto header = reinterpret_cast<const double*>(PyByteArray_AS_STRING(headers.ptr()));
  py::object found = py::steal(PyList_New(count));
  for (Py_ssize_t i = 0; i < count; ++i, header += kHeaderWords) {
    const int flags = int(header[kFlags]);
    py::object entry = py::steal(kind->tp_alloc(kind, kEntryFields));
    const auto put = [&](Py_ssize_t place, bool is_there, double value) {
      PyTuple_SET_ITEM(entry.ptr(), place, (is_there ? py::cast(value) : py::none()).release());
    };
    PyTuple_SET_ITEM(entry.ptr(), 0, py::cast(int64_t(header[kStep])).release());
    put(1, true, header[kNorm]);
    put(2, true, header[kClipCoef]);
    PyTuple_SET_ITEM(entry.ptr(), 3, py::cast((flags & kSkipped) != 0).release());
    put(4, flags & kHasLoss, header[kLoss]);
    put(5, flags & kHasValLoss, header[kValLoss]);
    put(6, flags & kHasLr, header[kLr]);
    put(7, flags & kHasLossScale, header[kLossScale]);
    put(8, true, header[kOverhead]);
    PyList_SET_ITEM(found.ptr(), i, entry.release());
  }
  return found;
}

}  // namespace fastguard
