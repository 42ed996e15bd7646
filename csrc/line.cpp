#include "line.h"

#include <charconv>
#include <cmath>
#include <cstring>
#include <string>

#include "gradients.h"
#include "slot.h"

namespace fastguard {

namespace {

#if defined(__cpp_lib_to_chars)
// A finite number as Python's repr has it: the fewest digits that read back as the same number, with an exponent from 1e16
// on and below 1e-4. Several times as quick as Python's own.
void append_repr(std::string& text, double value) {
  char buffer[32];
  const char* end = std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific).ptr;
  const char* mark = static_cast<const char*>(std::memchr(buffer, 'e', size_t(end - buffer)));
  const char* digit = buffer;
  if (*digit == '-') text += *digit++;
  std::string digits(1, *digit);
  if (mark - digit > 2) digits.append(digit + 2, mark);
  int exponent = 0;
  std::from_chars(mark + (mark[1] == '+' ? 2 : 1), end, exponent);
  const int count = int(digits.size());
  if (exponent < -4 || exponent >= 16) {
    text += digits[0];
    if (count > 1) text.append(1, '.').append(digits, 1);
    text.append(mark, end);  // at least two digits, as Python's
  } else if (exponent < 0) {
    text.append("0.").append(size_t(-exponent - 1), '0').append(digits);
  } else if (count <= exponent + 1) {
    text.append(digits).append(size_t(exponent + 1 - count), '0').append(".0");
  } else {
    text.append(digits, 0, size_t(exponent + 1)).append(1, '.').append(digits, size_t(exponent + 1));
  }
}
#else
void append_repr(std::string& text, double value) {
  char* digits = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
  if (!digits) throw py::error_already_set();
  text += digits;
  PyMem_Free(digits);
}
#endif

// Text as Python's json writes it, so that nobody can tell who wrote a line.
class Line {
 public:
  Line() { text_.reserve(512); }

  void key(const char* name) {
    text_ += text_.empty() ? "{\"" : ",\"";
    text_ += name;
    text_ += "\":";
  }

  void number(const char* name, double value) {
    key(name);
    if (!std::isfinite(value)) {
      text_ += std::isnan(value) ? "\"NaN\"" : value > 0 ? "\"Infinity\"" : "\"-Infinity\"";
      return;
    }
    append_repr(text_, value);
  }

  void count(const char* name, double value) {
    key(name);
    text_ += std::to_string(int64_t(value));
  }

  void truth(const char* name, bool value) {
    key(name);
    text_ += value ? "true" : "false";
  }

  py::bytes end() {
    text_ += "}\n";
    return py::bytes(text_);
  }

 private:
  std::string text_;
};

// As TensorRow.mean_and_std in fastguard/stats/columns.py.
double std_of(const Row& total, double finite, double mean) {
  if (in_range(total.sum_sq) || (total.sum_sq == HUGE_VAL && total.sum_sq_dev < HUGE_VAL))
    return std::sqrt(total.sum_sq_dev / finite);
  const double rms = total.finite_norm / std::sqrt(finite), share = mean / rms, rest = 1.0 - share * share;
  if (rms == 0) return 0.0;
  return std::isnan(rest) ? HUGE_VAL : rms * std::sqrt(rest > 0 ? rest : 0.0);
}

}  // namespace

py::bytes json_line(const py::bytearray& headers, Py_ssize_t index, const py::bytearray& table, double time) {
  const size_t start = size_t(index) * kHeaderWords * sizeof(double);
  if (index < 0 || start + kHeaderWords * sizeof(double) > headers.size())
    throw py::value_error("`headers` must hold the header of that index");
  double header[kHeaderWords];
  std::memcpy(header, PyByteArray_AS_STRING(headers.ptr()) + start, sizeof(header));
  const Row total = fold_rows(PyByteArray_AS_STRING(table.ptr()), table.size() / sizeof(Row));
  const double finite = total.numel - total.num_nans - total.num_infs;
  const double nothing = total.numel != 0 ? std::nan("") : 0.0;
  const double mean = finite != 0 ? total.sum / finite : nothing;
  const double std = finite != 0 ? std_of(total, finite, mean) : nothing;
  const int flags = int(header[kFlags]);

  Line line;
  line.count("step", header[kStep]);
  line.number("time", time);
  if (flags & kHasLoss) line.number("loss", header[kLoss]);
  if (flags & kHasValLoss) line.number("val_loss", header[kValLoss]);
  if (flags & kHasLr) line.number("lr", header[kLr]);
  if (flags & kHasLossScale) line.number("loss_scale", header[kLossScale]);
  line.number("grad/norm", norm_of(total));
  line.number("grad/max", total.abs_max);
  line.number("grad/min", total.abs_min_nonzero);
  line.number("grad/mean", mean);
  line.number("grad/std", std);
  line.count("grad/num_zeros", total.num_zeros);
  line.count("grad/num_nans", total.num_nans);
  line.count("grad/num_infs", total.num_infs);
  line.count("grad/num_elements", total.numel);
  line.number("clip/coef", header[kClipCoef]);
  if (flags & kHasTrigger) line.number("clip/trigger", header[kTrigger]);
  if (header[kClipCoef] != 1.0) line.number("grad/clipped_norm", norm_of(total) * header[kClipCoef]);
  line.truth("clipped", header[kClipCoef] != 1.0);
  line.truth("skipped", flags & kSkipped);
  return line.end();
}

}  // namespace fastguard
