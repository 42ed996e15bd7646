// The CPU's way through one optimizer step, in one call.
#pragma once
#include "objects.h"

namespace fastguard {

// take_step(param_groups, headers, index, found, step, num_threads, limits, skip_nonfinite, scales) -> int: collects the
// gradients, measures them, decides, clips, and writes the slot. A plain function of CPython's fast calls, since this
// is called at every step of a training. Arguments, and what comes back, as fastguard/_C.pyi says.
PyObject* take_step(PyObject* self, PyObject* const* args, Py_ssize_t count);

// The same for C++, where the header of the index is known to be there, and `found` to be such a list: returns the bits, 0
// for a clean step. Throws.
struct Question {
  PyObject *groups, *headers, *found, *limits;
  Py_ssize_t index;
  double step;
  int num_threads;  // 0 asks torch, if more than one may pay
  bool skip_nonfinite, scales;
};
int take(const Question& question);
bool is_step_list(PyObject* found);

// Puts a loss into a slot, and says that it did. Not where the slot has one, nor for anything but a float and a tensor of one
// real element that can be read as it is: fastguard.step.judge.Judge.record_loss sees to these. Throws.
bool put_loss(double* header, PyObject* loss);

}  // namespace fastguard
