// One parallel region over all chunks of all tensors.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "view.h"

namespace fastguard {

// Below this many elements (some 30 us of work for one core) a second thread saves little, and costs a scheduler quantum,
// milliseconds, when the other core is busy with something else: a data loader, say.
constexpr int64_t kParallelMin = 524288;

// What a worker is handed: elements [begin, end) of one tensor. `chunk` counts the chunks of that tensor.
struct Piece {
  int64_t tensor;
  int64_t chunk;
  int64_t begin;
  int64_t end;
};

struct Plan {
  // Either a run of small tensors that one worker takes together, or one tensor of several chunks.
  struct Entry {
    int64_t first_tensor;
    int64_t num_tensors;
    int64_t first_item;   // items before this entry; an entry has `num_chunks` of them
    int64_t num_chunks;
    int64_t first_partial;  // where a tensor of several chunks keeps its partial sums
  };
  std::vector<Entry> entries;
  int64_t num_items = 0;
  int64_t num_partials = 0;
  int64_t num_elements = 0;
};

Plan make_plan(const std::vector<View>& views);

// Runs `work` on every piece, with at most `num_threads` threads, or on the calling thread alone when there is too
// little to do for starting others. `backwards` walks from the last piece to the first, which after a forward pass
// finds the end of the data still in cache. Results must not depend on who runs which piece.
void for_each_piece(const Plan& plan, const std::vector<View>& views, int num_threads, bool backwards,
                    const std::function<void(const Plan::Entry&, const Piece&)>& work);

// Runs work(i) for i < num_items, with at most `num_threads` threads, or on the calling thread alone, as above, when
// there are few elements. Subnormals count whatever the threads have been told.
void for_each_item(int64_t num_items, int64_t num_elements, int num_threads, const std::function<void(int64_t)>& work);

bool has_threads();  // built with OpenMP

}  // namespace fastguard
