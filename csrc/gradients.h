// The gradients of a step: gathered from Python and measured in one walk, while each is near.
#pragma once
#include <vector>

#include "tensors.h"

namespace fastguard {

// What stands behind the parameters of an optimizer at one step.
struct Gradients {
  std::vector<py::object> tensors;  // those that are not None, flat over the groups
  std::vector<int64_t> positions;   // their flat positions; empty while no gradient is missing
  bool complete = true;
  uint64_t fingerprint = 0xcbf29ce484222325u;  // of which parameters these are, for caches

  // Only after `measure_gradients`.
  std::vector<View> views;  // of `tensors`, while these and `values` are held; none, where there are too many: see below
  std::vector<py::object> values;  // of sparse gradients, coalesced
  unsigned dtypes = 0;      // a bit for each DType
  Row total;                // fold of the rows, first to last

  PyObject* const* items() const {
    static_assert(sizeof(py::object) == sizeof(PyObject*), "a vector of objects is an array of pointers");
    return reinterpret_cast<PyObject* const*>(tensors.data());
  }

  // Has `views` be those of all `tensors`, for scaling; false if one is odd. Only if there are no `values`.
  bool read_views();
};

// Groups are lists of parameters, borrowed; throws a TypeError for anything else.
using Groups = std::vector<PyObject*>;
size_t count_parameters(const Groups& groups);

// Fills all but `views`, `dtypes` and `total`; any gradients.
void collect_gradients(const Groups& groups, Gradients& found);

// Fills all, and a row for each gradient, as if its elements had been multiplied by `unscale`; `rows` has room for
// `count_parameters(groups)`. False, with `found` and `rows` of no use, if a gradient would need preparing, other than a
// sparse one. Needs the GIL, and gives it up while large tensors are read. With `plan`, `found.tensors` are what it has in
// the place of gradients, and sparse ones are refused.
class ShardPlan;
bool measure_gradients(const Groups& groups, int num_threads, double unscale, Row* rows, Gradients& found,
                       ShardPlan* plan = nullptr);

// The same for tensors themselves. False as above, and for sparse ones.
bool measure_plain(PyObject* const* tensors, size_t count, int num_threads, double unscale, Row* rows, unsigned& dtypes,
                   Row& total);

unsigned dtypes_of(const std::vector<View>& views);

// Rows that came as bytes merged into one, first to last.
Row fold_rows(const char* bytes, size_t count);

// As torch has it: NaN if any element is NaN, else Inf if any is infinite.
double norm_of(const Row& total);

// Whether some of `views` has two indices of one element, so that none of them may be scaled.
bool any_overlap(const std::vector<View>& views);

}  // namespace fastguard
