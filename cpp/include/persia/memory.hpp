// How a shard writes to its region.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>

namespace persia {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

#ifdef PERSIA_CRASH_POINTS
// Built into the tests of crashes only: called wherever a kill could leave something half done.
inline void (*crash_hook)() = nullptr;
inline void crash_point() {
  if (crash_hook != nullptr) crash_hook();
}
#else
inline void crash_point() {}
#endif

// What a kill can cut in two is the order of stores of this process. The compiler must keep it, which this is for. The
// pages outlive the process as they are, whatever lay in caches of the CPU, so nothing needs to be flushed; and the
// next process attaches after the kernel has ended this one, so it sees all of its stores, on any CPU.
inline void barrier() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  crash_point();
}

// Unrolled for whole blocks of 8, which common dims are: a call of memcpy per row costs as much as the copy.
inline void copy_floats(float* to, const float* from, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) std::memcpy(to + i, from + i, 8 * sizeof(float));
  for (; i < count; ++i) to[i] = from[i];
}

}  // namespace persia
