// One buffer for all tables of a batch: from counts to the places in it, checked.
#include "persia/packed.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace persia {
namespace {

// Calls body(table number in the call, first id, first float) for each table; the sums must be those of the buffers.
template <class Width, class Body>
void for_each_table(const Store& store, const PackedTables& asked, std::size_t ids, std::size_t floats,
                    Width&& width_of, Body&& body) {
  if (asked.tables.size() != asked.counts.size()) throw std::invalid_argument("there must be one count per table");
  std::size_t first_id = 0, first_float = 0;
  for (std::size_t i = 0; i < asked.tables.size(); ++i) {
    const auto& table = store.table(asked.tables[i]);
    const std::size_t count = asked.counts[i], width = width_of(table);
    if (count > ids - first_id || count > (floats - first_float) / width) {
      throw std::invalid_argument("table '" + table.config.name + "': there are fewer ids or rows than its count " +
                                  std::to_string(count));
    }
    body(i, first_id, first_float);
    first_id += count;
    first_float += count * width;
  }
  if (first_id != ids || first_float != floats) {
    throw std::invalid_argument("the counts of the tables make " + std::to_string(first_id) + " ids and " +
                                std::to_string(first_float) + " floats, not " + std::to_string(ids) + " and " +
                                std::to_string(floats));
  }
}

std::int64_t checked(const ServerPart& part, std::size_t table, std::size_t server) {
  const auto* bounds = part.bounds.data() + table * (part.servers + 1);
  if (bounds[0] != 0 || bounds[server] < 0 || bounds[server + 1] < bounds[server] ||
      bounds[part.servers] < bounds[server + 1]) {
    throw std::invalid_argument("bounds: must rise from 0");
  }
  return bounds[part.servers];
}

// Calls copy(offset in whole, offset in mine, bytes) for each table, after all have been checked.
template <class Copy>
void for_each_slice(const ServerPart& part, std::size_t whole_bytes, std::size_t mine_bytes, Copy&& copy) {
  const std::size_t tables = part.row_bytes.size();
  if (part.server >= part.servers || part.bounds.size() != tables * (part.servers + 1)) {
    throw std::invalid_argument("bounds: must be [tables, servers + 1], and the server one of them");
  }
  for (const bool check : {true, false}) {
    std::size_t whole = 0, mine = 0;
    for (std::size_t t = 0; t < tables; ++t) {
      const auto rows = static_cast<std::size_t>(checked(part, t, part.server));
      const auto* bounds = part.bounds.data() + t * (part.servers + 1);
      const std::size_t width = part.row_bytes[t];
      const auto first = static_cast<std::size_t>(bounds[part.server]);
      const auto count = static_cast<std::size_t>(bounds[part.server + 1]) - first;
      if (width != 0 && (rows > (whole_bytes - whole) / width || count > (mine_bytes - mine) / width)) {
        throw std::invalid_argument("the buffers are smaller than the bounds say");
      }
      if (!check && count != 0) copy(whole + first * width, mine, count * width);
      whole += rows * width;
      mine += count * width;
    }
    if (whole != whole_bytes || mine != mine_bytes) {
      throw std::invalid_argument("the buffers are larger than the bounds say");
    }
  }
}

}  // namespace

void lookup_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids, std::span<float> out,
                   bool train) {
  std::vector<LookupRequest> requests;
  const auto words = [](const Table& table) { return table.row_words; };
  for_each_table(store, asked, ids.size(), out.size(), words, [&](std::size_t i, std::size_t id, std::size_t at) {
    requests.push_back({asked.tables[i], ids.data() + id, asked.counts[i], out.data() + at});
  });
  store.lookup(requests, train);
}

void read_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids, std::span<float> out,
                 std::span<std::uint8_t> found) {
  if (found.size() != ids.size()) throw std::invalid_argument("found: must have one entry per id");
  std::vector<LookupRequest> requests;
  const auto words = [](const Table& table) { return table.row_words; };
  for_each_table(store, asked, ids.size(), out.size(), words, [&](std::size_t i, std::size_t id, std::size_t at) {
    requests.push_back({asked.tables[i], ids.data() + id, asked.counts[i], out.data() + at, found.data() + id});
  });
  store.lookup(requests, false);
}

std::vector<PushCounts> update_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids,
                                      std::span<const float> gradients, std::span<const float> lrs, std::uint32_t step,
                                      std::uint64_t client, std::uint64_t sequence) {
  if (lrs.size() != asked.tables.size()) throw std::invalid_argument("there must be one learning rate per table");
  std::vector<UpdateRequest> requests;
  const auto dim = [](const Table& table) { return table.config.dim; };
  for_each_table(store, asked, ids.size(), gradients.size(), dim, [&](std::size_t i, std::size_t id, std::size_t at) {
    requests.push_back({asked.tables[i], ids.data() + id, asked.counts[i], gradients.data() + at, lrs[i]});
  });
  return store.update(requests, step, client, sequence);
}

PackedSizes pack_batch(std::span<PackedGroup> groups, const BucketOwners& owners, std::span<std::uint64_t> ids,
                       std::span<std::uint32_t> inverse, ThreadPool& pool, Arena& arena) {
  std::size_t positions = 0;
  for (const auto& group : groups) {
    for (const auto& feature : group.features) positions += feature.size();
  }
  if (ids.size() != positions || inverse.size() != positions) {
    throw std::invalid_argument("ids, inverse: must have one entry per position");
  }
  // Waking threads costs more than the work on a small batch, and more still where they have to wait for a core.
  constexpr std::size_t kSmall = 1 << 15;
  ThreadPool alone(1);
  ThreadPool& threads = positions <= kSmall ? alone : pool;
  Arena::Lease all_ids(arena, positions * sizeof(std::uint64_t));
  Arena::Lease all_inverses(arena, positions * sizeof(std::uint32_t));
  std::vector<UniqueGroup> unique_groups(groups.size());
  std::vector<OwnerGroup> owner_groups(groups.size());
  std::size_t first = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    unique_groups[g].features = groups[g].features;
    unique_groups[g].ids = all_ids.as<std::uint64_t>() + first;
    unique_groups[g].inverse = all_inverses.as<std::uint32_t>() + first;
    first += unique_groups[g].positions();
  }
  unique(unique_groups, threads, arena);
  PackedSizes sizes;
  std::vector<std::size_t> id_at(groups.size()), inverse_at(groups.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto& found = unique_groups[g];
    groups[g].wide = found.wide;
    owner_groups[g] = {groups[g].name_hash,
                       {found.ids, found.count},
                       {{found.inverse, found.positions(), found.wide}},
                       groups[g].bounds};
    id_at[g] = sizes.ids;
    inverse_at[g] = found.wide ? sizes.wide : sizes.narrow;
    sizes.ids += found.count;
    (found.wide ? sizes.wide : sizes.narrow) += found.positions();
  }
  group_by_owner(owner_groups, owners, threads, arena);
  auto* const bytes = reinterpret_cast<std::byte*>(inverse.data());
  threads.parallel_for(groups.size(), [&](std::size_t g) {
    const auto& found = unique_groups[g];
    const std::size_t width = found.wide ? sizeof(std::uint32_t) : sizeof(std::uint16_t);
    const std::size_t begin = found.wide ? 0 : sizes.wide * sizeof(std::uint32_t);
    if (found.count == 0) return;
    std::memcpy(ids.data() + id_at[g], found.ids, found.count * sizeof(std::uint64_t));
    std::memcpy(bytes + begin + inverse_at[g] * width, found.inverse, found.positions() * width);
  });
  return sizes;
}

void take_part(const ServerPart& part, std::span<const std::byte> whole, std::span<std::byte> mine) {
  for_each_slice(part, whole.size(), mine.size(), [&](std::size_t from, std::size_t to, std::size_t bytes) {
    std::memcpy(mine.data() + to, whole.data() + from, bytes);
  });
}

void put_part(const ServerPart& part, std::span<std::byte> whole, std::span<const std::byte> mine) {
  for_each_slice(part, whole.size(), mine.size(), [&](std::size_t to, std::size_t from, std::size_t bytes) {
    std::memcpy(whole.data() + to, mine.data() + from, bytes);
  });
}

void copy_bytes(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool) {
  if (to.size() != from.size()) throw std::invalid_argument("the buffers must have one size");
  // Large against the cost of waking a thread, small against what makes threads end together.
  constexpr std::size_t kBlock = 1 << 19;
  pool.parallel_for((from.size() + kBlock - 1) / kBlock, [&](std::size_t block) {
    const std::size_t first = block * kBlock;
    std::memcpy(to.data() + first, from.data() + first, std::min(kBlock, from.size() - first));
  });
}

}  // namespace persia
