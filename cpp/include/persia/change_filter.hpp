// Which ids may have been updated since a version, in constant memory.
//
// A direct-mapped array: an id of a table has one slot, which holds the newest version that marked any id there. An
// updated id is always found. One that was not is also found if an updated id shares its slot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "persia/packed.hpp"
#include "persia/region.hpp"

namespace persia {

// Thread-safe. Versions are from 1 to 2^16 - 1: the smaller the slots, the more of them are in the caches. Both calls
// throw std::invalid_argument, before they do anything, if a version is out of range or the counts do not add up to the
// ids. Forked children do not inherit the slots.
class ChangeFilter {
 public:
  using Mark = std::uint16_t;

  // Has 2^bits slots of 2 bytes, backed by pages on first use. `bits` is from 1 to 32.
  explicit ChangeFilter(std::size_t bits);

  // Marks ids as updated in `version`. A slot keeps its version if that is newer.
  void mark(const PackedTables& tables, std::span<const std::uint64_t> ids, std::uint64_t version);

  // Finds the ids that may have been marked with a version after `since`, 0 for any. Writes their places among the ids
  // of their table to `places`, ascending, for one table after another without gaps; `places` needs capacity for one
  // entry per id. Writes the ids themselves to `found` in the same way. Returns the number by table. Never waits for
  // `mark`: a call of `mark` in progress may be seen in part.
  std::vector<std::size_t> changed(const PackedTables& tables, std::span<const std::uint64_t> ids, std::uint64_t since,
                                   std::span<std::uint32_t> places, std::span<std::uint64_t> found) const;

 private:
  template <class Body>
  void for_each_slot(const PackedTables& tables, std::span<const std::uint64_t> ids, Body&& body) const;

  unsigned shift_;  // of a hash, to the number of its slot
  Region slots_;
  std::mutex marking_;
};

}  // namespace persia
