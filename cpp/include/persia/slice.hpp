// The ids of a request that one call to a shard processes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace persia {

// Ids of a batch: all of `ids`, or those at `positions`.
struct Slice {
  const std::uint64_t* ids;
  const std::uint32_t* positions;  // nullptr: 0 ... count - 1
  std::size_t count;

  // Returns the position in the batch of the i-th id of the slice.
  std::size_t position(std::size_t i) const { return positions == nullptr ? i : positions[i]; }
};

}  // namespace persia
