// Copies of memory that is not to be read again soon: past the caches, which saves the read of what is written over.
#include <algorithm>
#include <cstring>

#include "parallel.h"
#include "passes.h"

namespace fastguard {

namespace {

constexpr size_t kSpan = 1 << 18;    // bytes that a worker takes at once
constexpr size_t kStreamMin = 8192;  // below this, a copy stays in cache
constexpr size_t kLine = 64;

typedef long long Word2 __attribute__((vector_size(16)));

#if defined(__clang__)
inline void stream(Word2* to, Word2 value) { __builtin_nontemporal_store(value, to); }
#elif defined(__SSE2__)
inline void stream(Word2* to, Word2 value) { __builtin_ia32_movntdq(to, value); }
#else
inline void stream(Word2* to, Word2 value) { *to = value; }
#endif

void copy_span(char* to, const char* from, size_t size) {
  if (size < kStreamMin) {
    std::memcpy(to, from, size);
    return;
  }
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + kLine <= size; i += kLine) {
    Word2 words[kLine / sizeof(Word2)];
    std::memcpy(words, from + i, kLine);
    __builtin_prefetch(from + i + 2048);  // a hint: beyond the end, too
    for (size_t j = 0; j < kLine / sizeof(Word2); ++j) stream(reinterpret_cast<Word2*>(to + i) + j, words[j]);
  }
  std::memcpy(to + i, from + i, size - i);
#if defined(__SSE2__)
  __builtin_ia32_sfence();  // before anybody is told that it is there
#endif
}

}  // namespace

void copy(const std::vector<Copy>& copies, int num_threads) {
  std::vector<Copy> spans;
  int64_t bytes = 0;
  for (const Copy& c : copies) {
    bytes += int64_t(c.size);
    for (size_t i = 0; i < c.size; i += kSpan) spans.push_back({c.to + i, c.from + i, std::min(kSpan, c.size - i)});
  }
  for_each_item(int64_t(spans.size()), bytes / 4, num_threads, [&](int64_t i) {
    const Copy& c = spans[size_t(i)];
    copy_span(c.to, c.from, c.size);
  });
}

}  // namespace fastguard
