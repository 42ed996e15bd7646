#include "parallel.h"

#include <algorithm>
#include <atomic>

#include "ieee.h"

#ifdef _OPENMP
#include <omp.h>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define FG_FORKS
#endif
#endif

namespace fastguard {

namespace {

// Small tensors are handed out together until they weigh this much; each weighs something however small it is.
constexpr int64_t kItemMin = 32768;
constexpr int64_t kTensorWeight = 256;

void run_item(const Plan& plan, const std::vector<View>& views, int64_t item,
              const std::function<void(const Plan::Entry&, const Piece&)>& work) {
  auto after = std::upper_bound(plan.entries.begin(), plan.entries.end(), item,
                                [](int64_t i, const Plan::Entry& e) { return i < e.first_item; });
  const Plan::Entry& entry = *(after - 1);
  if (entry.num_chunks > 1) {
    int64_t chunk = item - entry.first_item, numel = views[entry.first_tensor].numel;
    work(entry, {entry.first_tensor, chunk, chunk * kChunk, std::min((chunk + 1) * kChunk, numel)});
  } else {
    for (int64_t t = entry.first_tensor; t < entry.first_tensor + entry.num_tensors; ++t)
      work(entry, {t, 0, 0, views[t].numel});
  }
}

// A forked child has none of the threads that OpenMP keeps from one parallel region to the next, and GCC's runtime would
// wait for them for ever: once there was such a region, a child goes on without any.
#ifdef FG_FORKS
bool is_child = false;

void remember_threads() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { is_child = true; });
  (void)registered;
}
#elif defined(_OPENMP)
constexpr bool is_child = false;
void remember_threads() {}
#endif

}  // namespace

Plan make_plan(const std::vector<View>& views) {
  Plan plan;
  int64_t weight = kItemMin;  // of the entry that small tensors join; full at the start
  for (int64_t t = 0; t < int64_t(views.size()); ++t) {
    int64_t numel = views[t].numel;
    plan.num_elements += numel;
    if (numel > kChunk) {
      int64_t chunks = (numel + kChunk - 1) / kChunk;
      plan.entries.push_back({t, 1, plan.num_items, chunks, plan.num_partials});
      plan.num_items += chunks;
      plan.num_partials += chunks;
      weight = kItemMin;
      continue;
    }
    if (weight >= kItemMin) {
      plan.entries.push_back({t, 0, plan.num_items, 1, 0});
      plan.num_items += 1;
      weight = 0;
    }
    plan.entries.back().num_tensors += 1;
    weight += numel + kTensorWeight;
  }
  return plan;
}

void for_each_piece(const Plan& plan, const std::vector<View>& views, int num_threads, bool backwards,
                    const std::function<void(const Plan::Entry&, const Piece&)>& work) {
  for_each_item(plan.num_items, plan.num_elements, num_threads,
                [&](int64_t i) { run_item(plan, views, backwards ? plan.num_items - 1 - i : i, work); });
}

void for_each_item(int64_t num_items, int64_t num_elements, int num_threads, const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  auto worker = [&] {
    IEEEArithmetic ieee;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_items;) work(i);
  };
#ifdef _OPENMP
  int threads = int(std::min<int64_t>(num_threads, num_items));
  if (threads > 1 && num_elements >= kParallelMin && !is_child) {
    remember_threads();
#pragma omp parallel num_threads(threads)
    worker();
    return;
  }
#else
  (void)num_threads;
#endif
  worker();
}

bool has_threads() {
#ifdef _OPENMP
  return true;
#else
  return false;
#endif
}

}  // namespace fastguard
