// A set of buckets of ids.
#pragma once
#include <array>
#include <cstdint>

#include "persia/mix.hpp"

namespace persia {

// Buckets of the ids of one table; see `bucket_of`.
struct BucketSet {
  std::uint64_t name_hash;  // XXH64 of the table's name
  std::array<bool, kBuckets> chosen;

  // Returns whether the bucket of an id is in the set.
  bool has(std::uint64_t id) const { return chosen[bucket_of(name_hash, id)]; }
};

}  // namespace persia
