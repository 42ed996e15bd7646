// Tensors of which a part is here (torch's DTensors): the parts, and which kind of sharding each has.
#pragma once
#include <set>
#include <vector>

#include "gradients.h"

namespace fastguard {

// What is known of the lists that were looked at: kinds of sharding by number, and which the tensor at each place had. It
// is asked of every tensor again, by identity, so that a list may change from call to call.
class ShardPlan {
 public:
  // Puts in the place of each of `tensors`, the first of which stands at `place` in its list, what of it is here. False
  // for one that is neither a plain tensor nor kept as DTensors are.
  bool unwrap(py::object* tensors, size_t count, size_t place);

  // Notes how a parameter lies that has no gradient here; others may have one.
  void note(PyObject* parameter);

  // Whether `tensor` is laid out as a plain one and keeps its part in a slot, so that it may be asked for ahead.
  bool takes(PyObject* tensor) const { return reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == type_.ptr(); }

  // (mesh, placements) of each kind that was ever seen.
  const py::object& known() const { return known_; }

  void begin();
  std::vector<int32_t> kinds;  // of the tensors since `begin`: their numbers; -1 for plain ones
  std::set<int32_t> used;      // of these and of what was noted

 private:
  // References are owned, so that an address is that of the same object as long as it stands here.
  struct Seen {
    py::object spec, mesh, placements;
    int32_t kind = -1;
  };
  size_t num_known() const { return size_t(PyList_GET_SIZE(known_.ptr())); }
  bool learn(PyTypeObject* type);
  int32_t kind_of(PyObject* spec, size_t place);
  int32_t number_of(const py::object& mesh, const py::object& placements);
  py::object type_;                 // whose instances keep their part in a slot,
  Py_ssize_t local_ = 0, spec_ = 0;  // which is here
  std::vector<Seen> seen_;          // by place
  py::object known_ = py::steal(PyList_New(0));
};

// `measure_gradients`, and `measure_plain`, of what is here; false also for sparse ones, and for a list of tensors of which none is sharded.
bool measure_shards(ShardPlan& plan, const Groups& groups, int num_threads, double unscale, Row* rows, Gradients& found);
bool measure_shards(ShardPlan& plan, py::List tensors, int num_threads, Row* rows, Gradients& found);

}  // namespace fastguard
