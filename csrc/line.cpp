#include "line.h"

#include <cmath>
#include <cstring>
#include <string>

#include "gradients.h"
#include "slot.h"

namespace fastguard {

namespace {

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
    char* digits = PyOS_double_to_string(value, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
    if (!digits) throw py::error_already_set();
    text_ += digits;
    PyMem_Free(digits);
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
  const double variance = finite != 0 ? total.sum_sq / finite - mean * mean : nothing;
  const double spread = std::isinf(total.sum_sq) ? total.sum_sq : std::sqrt(variance > 0 ? variance : 0.0);
  const double std = finite != 0 ? spread : nothing;
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
  line.truth("clipped", header[kClipCoef] != 1.0);
  line.truth("skipped", flags & kSkipped);
  return line.end();
}

}  // namespace fastguard
