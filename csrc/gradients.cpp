#include "gradients.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "ieee.h"
#include "isa.h"
#include "lock.h"
#include "parallel.h"
#include "passes.h"
#include "shards.h"
#include "state.h"

namespace fastguard {

namespace {

// Tensors are taken through each stage (find, describe, read) so many at a time: while one waits for memory, the others'
// requests are under way, and what a stage has touched is still in L1 for the next.
constexpr size_t kBatch = 16;

// Up to this many elements a tensor is measured as soon as it is known, up to so many in all; the rest is put aside for
// threads to share, without the lock.
constexpr int64_t kNear = kBlock;
constexpr int64_t kNearTotal = kParallelMin;

// Views of at most so many tensors are kept for scaling, in 128 KB. The few microseconds that more take to be read again are
// little beside scaling them, and most steps scale nothing.
constexpr size_t kKeptViews = 4096;

class Walk {
 public:
  // `views` takes the views, where they are to be kept and are not too many; `values` what was made of sparse tensors, and
  // null refuses them.
  Walk(size_t count, double unscale, Row* rows, std::vector<View>* views, Row& total, std::vector<py::object>* values)
      : room_(count), unscale_(unscale), rows_(rows), views_(count <= kKeptViews ? views : nullptr), total_(total),
        values_(values) {
    if (views_) views_->reserve(count);
  }

  // Takes up to kBatch tensors; false if one is odd, or if there is no room, as when a parameter of a subclass added
  // others on being asked for its gradient.
  bool take(PyObject* const* tensors, size_t count) {
    const size_t first = count_;
    if (first + count > room_) return false;
    for (size_t i = 0; i < count; ++i)
      if (is_plain_type(tensors[i])) tensor_path().want_parts(tensors[i]);
    View batch[kBatch];
    for (size_t i = 0; i < count; ++i) {
      View& view = batch[i];
      if (!read_plain(tensors[i], view) && !(values_ && read_values(tensors[i], first + i, view, *values_))) return false;
      dtypes_ |= 1u << unsigned(view.dtype);
      if (view.numel > kNear) continue;
      fetch(view, 0, kFetched);
    }
    if (count > 0) fetch(batch[0], kFetched, kFetchedRest);
    for (size_t i = 0; i < count; ++i) {
      const size_t t = first + i;
      const int64_t numel = batch[i].numel;
      if (i + 1 < count) fetch(batch[i + 1], kFetched, kFetchedRest);
      if (numel > kNear || near_ + numel > kNearTotal) {
        aside_.push_back(t);
        aside_views_.push_back(std::move(batch[i]));
        continue;
      }
      near_ += numel;
      rows_[t] = row_of(kernels_, batch[i], stats_of(kernels_, batch[i], 0, numel));
      if (aside_.empty()) fold(t);
    }
    count_ += count;
    if (views_) std::move(batch, batch + count, std::back_inserter(*views_));
    return true;
  }

  // Measures what was put aside. Asks torch for the number of threads where none is given and more than one may pay.
  void finish(int num_threads) {
    if (aside_.empty()) return;
    int64_t elements = 0;
    for (const View& view : aside_views_) elements += view.numel;
    if (num_threads == 0) num_threads = elements >= kParallelMin ? torch_num_threads() : 1;
    std::vector<Row> rows(aside_.size());
    without_lock(elements, [&] { tensor_rows(aside_views_, num_threads, rows.data()); });
    for (size_t i = 0; i < aside_.size(); ++i) {
      if (views_) (*views_)[aside_[i]] = std::move(aside_views_[i]);
      rows_[aside_[i]] = rows[i];
    }
    for (size_t t = aside_.front(); t < count_; ++t) fold(t);
  }

  unsigned dtypes() const { return dtypes_; }

 private:
  // Bytes of each tensor that are asked for when it is known, and when the one before it is measured.
  static constexpr int64_t kFetched = 256, kFetchedRest = 4096;

  static void fetch(const View& view, int64_t begin, int64_t end) {
    const int64_t bytes = view.numel > kNear ? 0 : view.numel * itemsize(view.dtype);
    for (int64_t line = begin; line < bytes && line < end; line += 64) __builtin_prefetch(view.data + line);
  }

  void fold(size_t t) {
    if (unscale_ != 1.0) rows_[t].multiply(unscale_);
    total_.merge(rows_[t]);
  }

  IEEEArithmetic ieee_;
  const Kernels& kernels_ = kernels();
  const size_t room_;
  const double unscale_;
  Row* const rows_;
  std::vector<View>* const views_;
  Row& total_;
  std::vector<py::object>* const values_;
  std::vector<size_t> aside_;
  std::vector<View> aside_views_;
  size_t count_ = 0;
  int64_t near_ = 0;
  unsigned dtypes_ = 0;
};

// Calls take(first, end) for stretches of `found.tensors` as they are found; stops and returns false where it does.
template <class Take>
bool for_each_batch(const Groups& groups, Gradients& found, Take take, const ShardPlan* plan = nullptr) {
  const auto is_known = [plan](PyObject* tensor) { return is_plain_type(tensor) || (plan && plan->takes(tensor)); };
  found.tensors.reserve(count_parameters(groups));
  const TensorPath& path = tensor_path();
  int64_t position = 0;
  size_t taken = 0;
  for (PyObject* group : groups) {
    found.fingerprint = (found.fingerprint ^ 1u) * 0x100000001b3u;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(group); ++i, ++position) {
      PyObject* parameter = PyList_GET_ITEM(group, i);
      const auto ahead = [&](size_t batches) -> PyObject* {
        const Py_ssize_t at = i + Py_ssize_t(batches * kBatch);
        return at < PyList_GET_SIZE(group) ? PyList_GET_ITEM(group, at) : nullptr;
      };
      if (PyObject* next = ahead(3)) path.want_object(next);
      if (PyObject* next = ahead(2); next && is_known(next)) path.want_inner(next);
      if (PyObject* next = ahead(1); next && is_known(next)) path.want_parts(next);
      found.fingerprint = (found.fingerprint ^ reinterpret_cast<uintptr_t>(parameter)) * 0x100000001b3u;
      py::object g = gradient_of(parameter);
      if (g.is_none()) {
        if (found.complete)
          for (int64_t before = 0; before < position; ++before) found.positions.push_back(before);
        found.complete = false;
        continue;
      }
      if (!found.complete) found.positions.push_back(position);
      if (is_plain_type(g.ptr())) path.want_inner(g.ptr());
      found.tensors.push_back(std::move(g));
      if (found.tensors.size() - taken == kBatch) {
        if (!take(taken, found.tensors.size())) return false;
        taken = found.tensors.size();
      }
    }
  }
  return taken == found.tensors.size() || take(taken, found.tensors.size());
}

}  // namespace

size_t count_parameters(const Groups& groups) {
  size_t count = 0;
  for (PyObject* group : groups) {
    if (!PyList_Check(group)) throw py::type_error("a group must be a list of parameters");
    count += size_t(PyList_GET_SIZE(group));
  }
  return count;
}

void collect_gradients(const Groups& groups, Gradients& found) {
  for_each_batch(groups, found, [](size_t, size_t) { return true; });
}

bool measure_gradients(const Groups& groups, int num_threads, double unscale, Row* rows, Gradients& found,
                       ShardPlan* plan) {
  Walk walk(count_parameters(groups), unscale, rows, &found.views, found.total, plan ? nullptr : &found.values);
  if (!for_each_batch(groups, found, [&](size_t first, size_t end) {
        if (plan && !plan->unwrap(found.tensors.data() + first, end - first, first)) return false;
        return walk.take(found.items() + first, end - first);
      }, plan))
    return false;
  walk.finish(num_threads);
  found.dtypes = walk.dtypes();
  return true;
}

bool Gradients::read_views() {
  std::vector<py::object> none;
  return views.size() == tensors.size() || read_tensors(items(), tensors.size(), Odd::refuse, views, none);
}

bool measure_plain(PyObject* const* tensors, size_t count, int num_threads, double unscale, Row* rows, unsigned& dtypes,
                   Row& total) {
  Walk walk(count, unscale, rows, nullptr, total, nullptr);
  for (size_t i = 0; i < count; i += kBatch) {
    for (size_t next = i + 2 * kBatch; next < std::min(count, i + 3 * kBatch); ++next) tensor_path().want_object(tensors[next]);
    for (size_t next = i + kBatch; next < std::min(count, i + 2 * kBatch); ++next)
      if (is_plain_type(tensors[next])) tensor_path().want_inner(tensors[next]);
    if (!walk.take(tensors + i, std::min(count - i, kBatch))) return false;
  }
  walk.finish(num_threads);
  dtypes = walk.dtypes();
  return true;
}

unsigned dtypes_of(const std::vector<View>& views) {
  unsigned bits = 0;
  for (const View& view : views) bits |= 1u << unsigned(view.dtype);
  return bits;
}

Row fold_rows(const char* bytes, size_t count) {
  Row total;
  for (size_t t = 0; t < count; ++t) {
    Row row;
    std::memcpy(&row, bytes + t * sizeof(Row), sizeof(Row));
    total.merge(row);
  }
  return total;
}

double norm_of(const Row& total) {
  if (total.num_nans != 0) return std::numeric_limits<double>::quiet_NaN();
  if (total.num_infs != 0) return std::numeric_limits<double>::infinity();
  return total.finite_norm;
}

bool any_overlap(const std::vector<View>& views) {
  return std::any_of(views.begin(), views.end(), may_overlap);
}

}  // namespace fastguard
