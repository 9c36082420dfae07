#include "persia/change_filter.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

#include "persia/mix.hpp"

namespace persia {
namespace {

using Slot = std::atomic_ref<ChangeFilter::Mark>;

constexpr std::uint64_t kNewest = std::numeric_limits<ChangeFilter::Mark>::max();

unsigned shift_of(std::size_t bits) {
  if (bits < 1 || bits > 32) throw std::invalid_argument("bits: must be from 1 to 32");
  return static_cast<unsigned>(64 - bits);
}

void check_sizes(const PackedTables& tables, std::size_t ids) {
  if (tables.tables.size() != tables.counts.size()) {
    throw std::invalid_argument("tables: must have one entry per array of ids");
  }
  for (const std::size_t count : tables.counts) {
    if (count > ids) throw std::invalid_argument("ids: there are fewer than the counts add up to");
    ids -= count;
  }
  if (ids != 0) throw std::invalid_argument("ids: there are more than the counts add up to");
}

}  // namespace

ChangeFilter::ChangeFilter(std::size_t bits)
    : shift_(shift_of(bits)), slots_(Region::anonymous((std::size_t{1} << bits) * sizeof(Mark))) {}

// Calls body(number of the table in the call, place among its ids, id, slot) for each id.
template <class Body>
void ChangeFilter::for_each_slot(const PackedTables& tables, std::span<const std::uint64_t> ids, Body&& body) const {
  // Slots are rarely in the cache: each is fetched while those of the ids before it are used.
  constexpr std::size_t kAhead = 128;
  Mark* fetched[kAhead];
  auto* const slots = reinterpret_cast<Mark*>(slots_.base());
  const std::uint64_t* id = ids.data();
  for (std::size_t t = 0; t < tables.tables.size(); ++t) {
    const std::uint64_t salt = (tables.tables[t] + 1) * kGolden;
    const std::size_t count = tables.counts[t];
    const auto fetch = [&](std::size_t i) {
      // Fibonacci hashing (Knuth): the cheapest that spreads consecutive ids evenly.
      Mark* const slot = slots + ((id[i] + salt) * kGolden >> shift_);
      __builtin_prefetch(slot);
      fetched[i % kAhead] = slot;
    };
    for (std::size_t i = 0; i < std::min(kAhead, count); ++i) fetch(i);
    for (std::size_t i = 0; i < count; ++i) {
      Mark* const slot = fetched[i % kAhead];
      if (i + kAhead < count) fetch(i + kAhead);
      body(t, i, id[i], *slot);
    }
    id += count;
  }
}

void ChangeFilter::mark(const PackedTables& tables, std::span<const std::uint64_t> ids, std::uint64_t version) {
  check_sizes(tables, ids.size());
  if (version < 1 || version > kNewest) throw std::invalid_argument("version: must be from 1 to 2^16 - 1");
  const auto marked = static_cast<Mark>(version);
  // One writer at a time, as a plain store overlaps with the loads that follow, and a compare-exchange does not.
  const std::lock_guard lock(marking_);
  for_each_slot(tables, ids, [&](std::size_t, std::size_t, std::uint64_t, Mark& slot) {
    if (Slot(slot).load(std::memory_order_relaxed) < marked) Slot(slot).store(marked, std::memory_order_relaxed);
  });
}

std::vector<std::size_t> ChangeFilter::changed(const PackedTables& tables, std::span<const std::uint64_t> ids,
                                               std::uint64_t since, std::span<std::uint32_t> places,
                                               std::span<std::uint64_t> found) const {
  check_sizes(tables, ids.size());
  if (since > kNewest) throw std::invalid_argument("since: must be from 0 to 2^16 - 1");
  if (places.size() != ids.size()) throw std::invalid_argument("places: must have one entry per id");
  if (found.size() != ids.size()) throw std::invalid_argument("found: must have one entry per id");
  std::vector<std::size_t> counts(tables.tables.size());
  std::size_t total = 0;
  // Every place is written and only those of changed ids are kept: a branch on a slot would wait for it.
  for_each_slot(tables, ids, [&](std::size_t t, std::size_t place, std::uint64_t id, Mark& slot) {
    const bool is_changed = Slot(slot).load(std::memory_order_relaxed) > since;
    places[total] = static_cast<std::uint32_t>(place);
    found[total] = id;
    total += is_changed;
    counts[t] += is_changed;
  });
  return counts;
}

}  // namespace persia
