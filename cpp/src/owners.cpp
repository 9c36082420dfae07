// Which embedding PS owns an id, and batches sorted by it.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "persia/batch.hpp"
#include "persia/mix.hpp"

namespace persia {
namespace {

constexpr std::uint32_t kMaxServers = 65536;  // an owner is a uint16

template <class Entry>
void follow(const OwnerGroup::Inverse& inverse, std::span<const std::uint32_t> place) {
  auto* entries = static_cast<Entry*>(inverse.entries);
  for (std::size_t i = 0; i < inverse.count; ++i) {
    if (entries[i] >= place.size()) throw std::invalid_argument("inverse: an entry points beyond the ids");
    entries[i] = static_cast<Entry>(place[entries[i]]);
  }
}

void group_one(const OwnerGroup& group, std::uint32_t servers, Arena& arena) {
  const std::size_t n = group.ids.size();
  Arena::Lease copy(arena, n * sizeof(std::uint64_t));
  Arena::Lease places(arena, n * sizeof(std::uint32_t));
  Arena::Lease owners(arena, n * sizeof(std::uint16_t));
  auto* const before = copy.as<std::uint64_t>();
  auto* const place = places.as<std::uint32_t>();
  auto* const owner = owners.as<std::uint16_t>();
  std::fill(group.bounds, group.bounds + servers + 1, 0);
  for (std::size_t i = 0; i < n; ++i) {
    before[i] = group.ids[i];
    owner[i] = static_cast<std::uint16_t>(owner_of(group.name_hash, before[i], servers));
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

void group_by_owner(std::span<OwnerGroup> groups, std::uint32_t servers, ThreadPool& pool, Arena& arena) {
  if (servers == 0 || servers > kMaxServers) throw std::invalid_argument("servers must be within 1 ... 65536");
  for (const auto& group : groups) {
    if (group.ids.size() >= std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("a table has 2^32 - 1 ids or more: use smaller batches");
    }
  }
  pool.parallel_for(groups.size(), [&](std::size_t g) { group_one(groups[g], servers, arena); });
}

}  // namespace persia
