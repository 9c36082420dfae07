// Arrays of many tables in one buffer, one table after another. Roles exchange batches in this form, so that a batch
// costs one call for any number of tables.
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

// Tables of a store, and the number of ids of each.
struct PackedTables {
  std::span<const std::size_t> tables;
  std::span<const std::size_t> counts;
};

// Runs `Store::lookup` into out: [count, words of a row] of the first table, then of the second, ...
void lookup_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids, std::span<float> out,
                   bool train);
// The same without training; `found` gets whether each id has a row.
void read_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids, std::span<float> out,
                 std::span<std::uint8_t> found);

// Runs `Store::update` with the gradients of one table after another.
std::vector<PushCounts> update_packed(Store& store, const PackedTables& asked, std::span<const std::uint64_t> ids,
                                      std::span<const float> gradients, std::span<const float> lrs, std::uint32_t step,
                                      std::uint64_t client, std::uint64_t sequence);

// A table of a batch: its features and its results.
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

// Runs `unique` and `group_by_owner` for all tables, without gaps between them. `ids` and `inverse` need capacity for
// one entry per position. `inverse` holds the uint32 entries first, feature by feature, then the uint16 ones. Returns
// the numbers of entries.
PackedSizes pack_batch(std::span<PackedGroup> groups, const BucketOwners& owners, std::span<std::uint64_t> ids,
                       std::span<std::uint32_t> inverse, ThreadPool& pool, Arena& arena);

// The slices of one server in a buffer of whole tables. `bounds` is [tables, servers + 1] as above; `row_bytes` has an
// entry per table.
struct ServerPart {
  std::span<const std::int64_t> bounds;
  std::size_t servers = 0;
  std::size_t server = 0;
  std::span<const std::size_t> row_bytes;
};
// Copies the slices of a server from `whole` to `mine`, which holds the server's rows only.
void take_part(const ServerPart& part, std::span<const std::byte> whole, std::span<std::byte> mine);
// Copies the slices of a server from `mine` to `whole`.
void put_part(const ServerPart& part, std::span<std::byte> whole, std::span<const std::byte> mine);

// Copies all of `from` to `to`, which is as large and elsewhere. One thread copies far less than memory and PCIe carry.
void copy_bytes(std::span<std::byte> to, std::span<const std::byte> from, ThreadPool& pool);

}  // namespace persia
