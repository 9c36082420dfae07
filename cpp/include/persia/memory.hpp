// Helpers for writing to a region.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>

namespace persia {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

#ifdef PERSIA_CRASH_POINTS
// For crash tests only: called wherever a kill could leave a partial change.
inline void (*crash_hook)() = nullptr;
inline void crash_point() {
  if (crash_hook != nullptr) crash_hook();
}
// The same between the words of a change that must be sound at each of them.
inline void (*word_hook)() = nullptr;
inline void word_point() {
  if (word_hook != nullptr) word_hook();
}
#else
inline void crash_point() {}
inline void word_point() {}
#endif

// Makes the compiler keep the order of stores, which recovery after a kill relies on. No flush is needed: the pages
// outlive the process, including data in CPU caches. The next process attaches after the kernel has ended this one,
// so it sees all of its stores on any CPU.
inline void barrier() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  crash_point();
}

// The same between single words, of which there are many.
inline void word_barrier() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  word_point();
}

// Begins to load a cache line into L2, for use a few hundred nanoseconds later. L2 can wait for far more lines at a
// time than L1, and lines that are fetched past L2 (prefetchnta) lose their place in L1 to one another.
inline void prefetch(const void* line) {
  __builtin_prefetch(line, 0, 1);
#if defined(__GNUC__)
  asm volatile("" : : "r"(line));  // GCC drops calls of functions that only prefetch: it takes them for pure.
#endif
}

// Copies floats in blocks of 8, as common dims are multiples of 8 and a memcpy call per row costs as much as the copy.
inline void copy_floats(float* to, const float* from, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) std::memcpy(to + i, from + i, 8 * sizeof(float));
  for (; i < count; ++i) to[i] = from[i];
}

}  // namespace persia
