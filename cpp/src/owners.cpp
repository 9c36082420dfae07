// The buckets of ids, and batches sorted by the embedding PS that owns their bucket.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "persia/batch.hpp"
#include "persia/mix.hpp"

namespace persia {
namespace {

void check(const BucketOwners& owners) {
  if (owners.of_bucket.size() != kBuckets) throw std::invalid_argument("owners: must have one entry per bucket");
  bool valid = owners.servers != 0;
  for (const std::uint16_t owner : owners.of_bucket) valid &= owner < owners.servers;
  if (!valid) throw std::invalid_argument("owners: must be below the number of servers");
}

template <class Entry>
void follow(const OwnerGroup::Inverse& inverse, std::span<const std::uint32_t> place) {
  auto* entries = static_cast<Entry*>(inverse.entries);
  for (std::size_t i = 0; i < inverse.count; ++i) {
    if (entries[i] >= place.size()) throw std::invalid_argument("inverse: an entry points beyond the ids");
    entries[i] = static_cast<Entry>(place[entries[i]]);
  }
}

void group_one(const OwnerGroup& group, const BucketOwners& owners_of, Arena& arena) {
  const std::size_t n = group.ids.size();
  const std::uint32_t servers = owners_of.servers;
  const std::uint16_t* const of_bucket = owners_of.of_bucket.data();
  Arena::Lease copy(arena, n * sizeof(std::uint64_t));
  Arena::Lease places(arena, n * sizeof(std::uint32_t));
  Arena::Lease owners(arena, n * sizeof(std::uint16_t));
  auto* const before = copy.as<std::uint64_t>();
  auto* const place = places.as<std::uint32_t>();
  auto* const owner = owners.as<std::uint16_t>();
  std::fill(group.bounds, group.bounds + servers + 1, 0);
  for (std::size_t i = 0; i < n; ++i) {
    before[i] = group.ids[i];
    owner[i] = of_bucket[bucket_of(group.name_hash, before[i])];
    ++group.bounds[owner[i] + 1];
  }
  std::vector<std::uint32_t> next(servers);
  for (std::uint32_t p = 0; p < servers; ++p) {
    next[p] = static_cast<std::uint32_t>(group.bounds[p]);
    group.bounds[p + 1] += group.bounds[p];
  }
  for (std::size_t i = 0; i < n; ++i) {
    place[i] = next[owner[i]]++;
    group.ids[place[i]] = before[i];
  }
  for (const auto& inverse : group.inverses) {
    inverse.wide ? follow<std::uint32_t>(inverse, {place, n}) : follow<std::uint16_t>(inverse, {place, n});
  }
}

}  // namespace

void group_by_owner(std::span<OwnerGroup> groups, const BucketOwners& owners, ThreadPool& pool, Arena& arena) {
  check(owners);
  for (const auto& group : groups) {
    if (group.ids.size() >= std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("a table has 2^32 - 1 ids or more: use smaller batches");
    }
  }
  pool.parallel_for(groups.size(), [&](std::size_t g) { group_one(groups[g], owners, arena); });
}

void buckets_of(std::uint64_t name_hash, std::span<const std::uint64_t> ids, std::span<std::uint16_t> buckets) {
  if (ids.size() != buckets.size()) throw std::invalid_argument("buckets: must have one entry per id");
  for (std::size_t i = 0; i < ids.size(); ++i) buckets[i] = static_cast<std::uint16_t>(bucket_of(name_hash, ids[i]));
}

}  // namespace persia
