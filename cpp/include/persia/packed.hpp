// Arrays of many tables in one buffer, one table after another: what crosses between roles, so that a batch costs one
// call whatever the number of its tables.
//
// Every function checks that counts and widths add up to the buffers before it touches anything, and throws
// std::invalid_argument otherwise. Blocking and threads as in batch.hpp and store.hpp.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "persia/batch.hpp"
#include "persia/store.hpp"

namespace persia {

// Which tables of a store, and how many ids of each.
struct PackedTables {
  std::span<const std::size_t> tables;
  std::span<const std::size_t> counts;
};

// `Store::lookup` into out: [count, dim] of the first table, then of the second, ...
void lookup_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids, std::span<float> out,
                   bool train);

// `Store::update` with the gradients one table after another.
std::vector<PushCounts> update_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids,
                                      std::span<const float> gradients, std::span<const float> lrs, std::uint32_t step,
                                      std::uint64_t client, std::uint64_t sequence);

// A table of a batch: its features, and where its results begin.
struct PackedGroup {
  std::vector<std::span<const std::uint64_t>> features;
  std::uint64_t name_hash = 0;     // XXH64 of the table's name
  std::int64_t* bounds = nullptr;  // result: [servers + 1], the ids of server p are bounds[p] ... bounds[p + 1]
  bool wide = false;               // result: its inverses are uint32
};

struct PackedSizes {
  std::size_t ids = 0;
  std::size_t narrow = 0;
  std::size_t wide = 0;
};

// `unique` and `group_by_owner` of all tables, without gaps. `ids` and `inverse` have room for one entry per position:
// uint32 entries come first in `inverse`, feature by feature, then the uint16 ones; the sizes say how many there are.
PackedSizes pack_batch(std::span<PackedGroup> groups, std::uint32_t servers, std::span<std::uint64_t> ids,
                       std::span<std::uint32_t> inverse, ThreadPool& pool, Arena& arena);

// Copies the slices of one server between a buffer of whole tables and one that has the server's rows only.
// `bounds` is [tables, servers + 1] as above, `row_bytes` has an entry per table. One of the two buffers is written.
struct ServerPart {
  std::span<const std::int64_t> bounds;
  std::size_t servers = 0;
  std::size_t server = 0;
  std::span<const std::size_t> row_bytes;
};
void take_part(const ServerPart& part, std::span<const std::byte> whole, std::span<std::byte> mine);
void put_part(const ServerPart& part, std::span<std::byte> whole, std::span<const std::byte> mine);

}  // namespace persia
