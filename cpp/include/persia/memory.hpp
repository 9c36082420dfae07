// How a shard writes to its region.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstring>

namespace persia {

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

// What a kill can cut in two is the order of stores of this process: the compiler must keep it, the CPU does.
inline void barrier() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Unrolled for whole blocks of 8, which common dims are: a call of memcpy per row costs as much as the copy.
inline void copy_floats(float* to, const float* from, std::size_t count) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) std::memcpy(to + i, from + i, 8 * sizeof(float));
  for (; i < count; ++i) to[i] = from[i];
}

}  // namespace persia
