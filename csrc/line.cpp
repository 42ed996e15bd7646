#include "line.h"

#include <charconv>
#include <cmath>
#include <cstring>

#if !defined(_WIN32)
#include <time.h>
#include <unistd.h>
#endif

#include "gradients.h"
#include "slot.h"
#include "state.h"

namespace fastguard {

namespace {

// Room for a line: some 400 bytes of keys, and 18 numbers of 25 bytes at most.
constexpr size_t kRoom = 2048;

#if defined(__cpp_lib_to_chars)
char* put(char* to, const char* from, size_t count) { return static_cast<char*>(std::memcpy(to, from, count)) + count; }

// A finite number as Python's repr has it: the fewest digits that read back as the same number, with an exponent from 1e16
// on and below 1e-4. Several times as quick as Python's own. Writes at most 25 bytes, and returns their end.
char* put_repr(char* to, double value) {
  char buffer[32];
  const char* end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const char* mark = end - 4;  // of the exponent, which has two digits or three
  if (*mark != 'e') --mark;
  char* first = buffer;
  if (*first == '-') *to++ = *first++;
  if (mark > first + 1) first[1] = first[0], ++first;  // over the point: from here on there are only digits
  const size_t count = size_t(mark - first);
  const int size = (mark[2] - '0') * 10 + mark[3] - '0';
  const int exponent = (mark[1] == '-' ? -1 : 1) * (end - mark == 5 ? size * 10 + mark[4] - '0' : size);
  if (exponent < -4 || exponent >= 16) {
    *to++ = first[0];
    if (count > 1) *to++ = '.', to = put(to, first + 1, count - 1);
    return put(to, mark, size_t(end - mark));  // at least two digits, as Python's
  }
  if (exponent < 0) {
    to = put(to, "0.0000", size_t(1 - exponent));
    return put(to, first, count);
  }
  const size_t whole = size_t(exponent) + 1;
  if (count <= whole) {
    to = put(to, first, count);
    std::memset(to, '0', whole - count);
    return put(to + (whole - count), ".0", 2);
  }
  to = put(to, first, whole);
  *to++ = '.';
  return put(to, first + whole, count - whole);
}
#else
char* put_repr(char* to, double value) {
  char* digits = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
  if (!digits) throw py::error_already_set();
  to = stpcpy(to, digits);
  PyMem_Free(digits);
  return to;
}
#endif

// Text as Python's json writes it, so that nobody can tell who wrote a line. Keys are given as they stand in it.
class Line {
 public:
  template <size_t size>
  void text(const char (&key)[size]) {
    std::memcpy(end_, key, size - 1);
    end_ += size - 1;
  }

  template <size_t size>
  void number(const char (&key)[size], double value) {
    text(key);
    if (std::isfinite(value))
      end_ = put_repr(end_, value);
    else if (std::isnan(value))
      text("\"NaN\"");
    else if (value > 0)
      text("\"Infinity\"");
    else
      text("\"-Infinity\"");
  }

  template <size_t size>
  void count(const char (&key)[size], double value) {
    text(key);
    end_ = std::to_chars(end_, text_ + kRoom, int64_t(value)).ptr;
  }

  template <size_t size>
  void truth(const char (&key)[size], bool value) {
    text(key);
    value ? text("true") : text("false");
  }

  void end() { text("}\n"); }
  const char* data() const { return text_; }
  size_t size() const { return size_t(end_ - text_); }

 private:
  char text_[kRoom];
  char* end_ = text_;
};

// As TensorRow.mean_and_std in fastguard/records/columns.py.
double std_of(const Row& total, double finite, double mean) {
  if (in_range(total.sum_sq) || (total.sum_sq == HUGE_VAL && total.sum_sq_dev < HUGE_VAL))
    return std::sqrt(total.sum_sq_dev / finite);
  const double rms = total.finite_norm / std::sqrt(finite), share = mean / rms, rest = 1.0 - share * share;
  if (rms == 0) return 0.0;
  return std::isnan(rest) ? HUGE_VAL : rms * std::sqrt(rest > 0 ? rest : 0.0);
}

void write_step(Line& line, const double* header, const char* table, size_t num_rows, double time) {
  const Row total = fold_rows(table, num_rows);
  const double finite = total.numel - total.num_nans - total.num_infs;
  const double nothing = total.numel != 0 ? std::nan("") : 0.0;
  const double mean = finite != 0 ? total.sum / finite : nothing;
  const double std = finite != 0 ? std_of(total, finite, mean) : nothing;
  const int flags = int(header[kFlags]);

  line.count("{\"step\":", header[kStep]);
  line.number(",\"time\":", time);
  if (flags & kHasLoss) line.number(",\"loss\":", header[kLoss]);
  if (flags & kHasValLoss) line.number(",\"val_loss\":", header[kValLoss]);
  if (flags & kHasLr) line.number(",\"lr\":", header[kLr]);
  if (flags & kHasLossScale) line.number(",\"loss_scale\":", header[kLossScale]);
  line.number(",\"grad/norm\":", norm_of(total));
  line.number(",\"grad/max\":", total.abs_max);
  line.number(",\"grad/min\":", total.abs_min_nonzero);
  line.number(",\"grad/mean\":", mean);
  line.number(",\"grad/std\":", std);
  line.count(",\"grad/num_zeros\":", total.num_zeros);
  line.count(",\"grad/num_nans\":", total.num_nans);
  line.count(",\"grad/num_infs\":", total.num_infs);
  line.count(",\"grad/num_elements\":", total.numel);
  line.number(",\"clip/coef\":", header[kClipCoef]);
  if (flags & kHasTrigger) line.number(",\"clip/trigger\":", header[kTrigger]);
  if (header[kClipCoef] != 1.0) line.number(",\"grad/clipped_norm\":", norm_of(total) * header[kClipCoef]);
  line.truth(",\"clipped\":", header[kClipCoef] != 1.0);
  line.truth(",\"skipped\":", flags & kSkipped);
  line.end();
}

#if !defined(_WIN32)
// Seconds since 1970, in whole microseconds: fewer digits to write.
double now() {
  timespec t{};
  clock_gettime(CLOCK_REALTIME, &t);
  return double(int64_t(t.tv_sec) * 1000000 + t.tv_nsec / 1000) / 1e6;
}
#endif

}  // namespace

py::object json_line(py::Bytes headers, Py_ssize_t index, py::Bytes table, double time) {
  const double* header = header_at(headers.ptr(), index);
  if (!header) throw py::value_error("`headers` must hold the header of that index");
  Line line;
  write_step(line, header, PyByteArray_AS_STRING(table.ptr()), size_t(PyByteArray_GET_SIZE(table.ptr())) / sizeof(Row), time);
  return py::bytes(line.data(), line.size());
}

bool is_line(PyObject* table, PyObject* told, PyObject* torn) {
  return PyByteArray_CheckExact(table) && PyList_CheckExact(told) && PyList_GET_SIZE(told) == 1 && torn &&
         PyByteArray_CheckExact(torn) && PyByteArray_GET_SIZE(torn) == 1;
}

bool append_line(const double* header, PyObject* table, PyObject* told, int file, PyObject* torn) {
#if defined(_WIN32)
  (void)header, (void)table, (void)told, (void)file, (void)torn;
  return false;
#else
  if (file < 0 || PyByteArray_AS_STRING(torn)[0]) return false;
  Line line;
  write_step(line, header, PyByteArray_AS_STRING(table), size_t(PyByteArray_GET_SIZE(table)) / sizeof(Row), now());
  py::object step = py::steal(PyLong_FromDouble(header[kStep]));
  const ssize_t written = write(file, line.data(), line.size());
  if (written == ssize_t(line.size())) {
    PyList_SetItem(told, 0, step.release());
    return true;
  }
  PyByteArray_AS_STRING(torn)[0] = written > 0;
  return false;
#endif
}

}  // namespace fastguard
