#include "persia/row_copies.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

namespace persia {
namespace {

constexpr std::uint64_t kFactor = 0x9E3779B97F4A7C15;  // Spreads ids over slots (Fibonacci hashing).

std::uint32_t slot_of(std::uint64_t id, std::uint32_t slots) {
  return static_cast<std::uint32_t>(id * kFactor >> 32) % slots;
}

// Marks the slot of a hit. What is written must not depend on memory of the caller, who may change it meanwhile.
constexpr std::uint32_t kHit = 0x80000000;

// Finds the hits of a table. `slots` gets the slot of each id, marked if it is a hit. Returns the age of the oldest.
std::int64_t find(CopiedTable& table, const CopyTime& at, std::uint32_t* slots) {
  const auto count = static_cast<std::uint32_t>(table.slot_ids.size());
  std::int64_t oldest = 0;
  table.hits = 0;
  for (std::size_t i = 0; i < table.ids.size(); ++i) {
    const std::uint32_t slot = slot_of(table.ids[i], count);
    const std::int64_t steps = table.slot_steps[slot];
    const bool hit = steps > 0 && table.slot_ids[slot] == table.ids[i] && at.step + 1 - steps <= at.limit;
    slots[i] = hit ? slot | kHit : slot;
    table.wanted[i] = !hit;
    if (!hit) continue;
    ++table.hits;
    oldest = std::max(oldest, at.step + 1 - steps);
  }
  return oldest;
}

// Writes the places of a table. All misses take their slots before any place is written: of several in one slot the
// last has it, and the others go to the spare row.
void place(CopiedTable& table, const CopyTime& at, const std::uint32_t* slots, std::int32_t* hits,
           std::int32_t* hit_slots, std::int32_t* misses, std::int32_t* taken) {
  for (std::size_t i = 0; i < table.ids.size(); ++i) {
    if (slots[i] & kHit) continue;
    table.slot_ids[slots[i]] = table.ids[i];
    table.slot_steps[slots[i]] = at.applied + 1;
  }
  for (std::size_t i = 0; i < table.ids.size(); ++i) {
    const auto row = static_cast<std::int32_t>(table.first_row + i);
    const auto slot = static_cast<std::int32_t>(table.first_slot + (slots[i] & ~kHit));
    if (slots[i] & kHit) {
      *hits++ = row;
      *hit_slots++ = slot;
    } else {
      *misses++ = row;
      *taken++ = table.slot_ids[slots[i]] == table.ids[i] ? slot : static_cast<std::int32_t>(table.spare);
    }
  }
}

}  // namespace

std::int64_t plan_copies(std::span<CopiedTable> tables, const CopyTime& at, std::span<std::int32_t> places,
                         ThreadPool& pool) {
  constexpr std::int64_t kLast = std::int64_t{1} << 62;  // Differences of steps fit, too.
  for (const std::int64_t time : {at.step, at.applied, at.limit}) {
    if (time < 0 || time > kLast) throw std::invalid_argument("step, applied and limit: must be from 0 to 2^62");
  }
  constexpr auto kMost = static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());
  std::vector<std::size_t> first_id(tables.size());
  std::size_t ids = 0;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto& table = tables[t];
    if (table.slot_ids.empty() || table.slot_ids.size() != table.slot_steps.size()) {
      throw std::invalid_argument("a table must have slots, with an id and steps each");
    }
    if (table.slot_ids.size() + table.first_slot > kMost || table.spare > kMost ||
        table.ids.size() + table.first_row > kMost) {
      throw std::invalid_argument("places must fit into int32");
    }
    first_id[t] = ids;
    ids += table.ids.size();
  }
  if (places.size() != 2 * ids) throw std::invalid_argument("places: must have two entries per id");
  std::vector<std::uint32_t> slots(ids);
  std::vector<std::int64_t> oldest(tables.size());
  pool.parallel_for(tables.size(), [&](std::size_t t) { oldest[t] = find(tables[t], at, slots.data() + first_id[t]); });
  std::size_t hits = 0;
  std::vector<std::size_t> first_hit(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    first_hit[t] = hits;
    hits += tables[t].hits;
  }
  auto* const misses = places.data() + 2 * hits;
  pool.parallel_for(tables.size(), [&](std::size_t t) {
    const std::size_t hit = first_hit[t], miss = first_id[t] - hit;
    place(tables[t], at, slots.data() + first_id[t], places.data() + hit, places.data() + hits + hit, misses + miss,
          misses + (ids - hits) + miss);
  });
  return oldest.empty() ? 0 : *std::max_element(oldest.begin(), oldest.end());
}

}  // namespace persia
