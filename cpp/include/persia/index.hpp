// Ordered linear probing (Amble, Knuth 1974): an open hash table whose slots stay sorted by hash.
//
// A slot is a 32-bit tag (from the hash) over a 32-bit row number (`kRowBits`). The home position is monotone in the
// tag, so the whole array is sorted, with holes. It is always the first slot of a cache line: nearly every search stays
// in one. That gives three things: a miss ends at the first smaller tag, erasing needs no tombstone, and the table
// grows in place by moving slots in order, without reading any row. Tags are sorted downwards so that an empty slot
// (zero) ends a search by the same comparison.
//
// Growth takes small steps, from the end. Tags up to a frontier, whose slots have been moved, have their home among the
// new number of slots, all others among the old number. The home stays monotone in the tag, so the array is sorted at
// each step, and searching, inserting and erasing are the same while it grows.
//
// A slot is copied before it is overwritten. So a process that dies leaves some slots twice, and not one of those that
// were there is missing: that matters for rows on disk, whose numbers are nowhere else.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "persia/layout.hpp"
#include "persia/memory.hpp"

namespace persia {

class Index {
 public:
  static constexpr std::uint32_t kNone = kRowMask;  // no row has this number
  static constexpr std::uint64_t kFirstSlots = 64;
  static constexpr std::uint64_t kDoubling = 1u << 12;
  static constexpr std::uint64_t kLineSlots = 8;
  // Slots that move for each row that is inserted while the index grows. Until the last one has moved, the slots that
  // have not take up one in this number of these rows: their load rises from 80 to 87 %.
  static constexpr std::uint64_t kMoves = 12;
  // Parts of its slots by which a large index grows. A third is the fastest: each slot moves three times per row. An
  // eighth keeps the load above 71 % for twice as many moves, and still ends before the index is full again, as these
  // take a twelfth of the rows.
  static constexpr std::uint64_t kThird = 3, kEighth = 8;

  Index() = default;
  // A view of `max_slots` slots and the tail, of which `slot_count` are in use as home slots. Slots behind them and
  // their tail must be zero. If `old_slots` is not 0, the index grows: see `old_slots` and `frontier`. `part` is what
  // it grows by, one in this number of its slots.
  Index(std::uint64_t* slots, std::uint64_t slot_count, std::uint64_t max_slots, std::uint64_t old_slots = 0,
        std::uint32_t frontier = 0, std::uint64_t part = kThird)
      : slots_(slots), lines_(slot_count / kLineSlots), old_lines_(lines_), max_(max_slots), part_(part) {
    if (old_slots == 0) return;
    old_lines_ = old_slots / kLineSlots;
    frontier_ = frontier;
  }

  // Returns the number of home slots, without the tail.
  std::uint64_t slot_count() const { return lines_ * kLineSlots; }
  // Whether some slots have not been moved to their new homes.
  bool growing() const { return frontier_ != kRowMask; }
  // Returns the number of home slots of tags above the frontier; 0 if the index does not grow.
  std::uint64_t old_slots() const { return growing() ? old_lines_ * kLineSlots : 0; }
  // Returns the highest tag whose slots have been moved; 0 if the index does not grow.
  std::uint32_t frontier() const { return growing() ? frontier_ : 0; }

  // Returns the tag of a hash: its inverted upper bits, never 0, which marks an empty slot.
  static std::uint32_t tag_of(std::uint64_t hash) {
    return std::max(~static_cast<std::uint32_t>(hash >> 32) >> (32 - kRowBits), 1u);
  }

  // Returns the home position of a tag: the first slot of a cache line.
  std::uint64_t home(std::uint32_t tag) const { return home(tag, tag > frontier_ ? old_lines_ : lines_); }

  // Prefetches the cache line of a home position.
  void prefetch(std::uint64_t home) const { persia::prefetch(slots_ + home); }

  // Returns the first position whose tag is not above `tag`. Counts whole lines, which avoids mispredicted branches:
  // all slots after the first smaller one are smaller, too.
  std::uint64_t lower_bound(std::uint64_t home, std::uint32_t tag) const {
    const std::uint64_t bound = bound_of(tag);
    for (std::uint64_t at = home;; at += kLineSlots) {
      std::uint64_t above = 0;
      for (std::uint64_t i = 0; i < kLineSlots; ++i) above += slots_[at + i] > bound;
      if (above < kLineSlots) return at + above;
    }
  }

  // For each tag, finds a row with this tag in the index of the same position, most likely the right one; else kNone.
  static void candidates(const Index* const* indices, const std::uint32_t* tags, std::size_t count,
                         std::uint32_t* rows);

  // Returns the row with this tag for which `matches(row)` holds; kNone if there is none.
  template <class Matches>
  std::uint32_t find(std::uint32_t tag, Matches&& matches) const {
    for (std::uint64_t at = lower_bound(home(tag), tag); tag_in(slots_[at]) == tag; ++at) {
      if (matches(row_in(slots_[at]))) return row_in(slots_[at]);
    }
    return kNone;
  }

  // Returns the rows that fit in addition to `rows` before the index has to grow, which is at a load of 80 %.
  std::uint64_t room(std::uint64_t rows) const {
    const std::uint64_t most = slot_count() * 4 / 5;
    return most > rows ? most - rows : 0;
  }
  // Whether to grow before another insertion: there is no room, and growth is possible.
  bool full(std::uint64_t rows) const { return room(rows) == 0 && slot_count() < max_; }

  // Inserts a row, moving the following slots by one. Throws std::runtime_error if the tail overflows.
  void insert(std::uint32_t tag, std::uint32_t row) {
    const std::uint64_t at = lower_bound(home(tag), tag);
    std::uint64_t hole = at;
    while (slots_[hole] != 0) ++hole;
    if (hole >= limit()) throw overflow();
    shift_into(at, hole, (std::uint64_t{tag} << 32) | row);
  }

  // Erases a row. Returns false if it is not there, which means that rows or index are damaged.
  bool erase(std::uint32_t tag, std::uint32_t row) {
    const std::uint64_t wanted = (std::uint64_t{tag} << 32) | row;
    std::uint64_t at = lower_bound(home(tag), tag);
    while (slots_[at] != wanted) {
      if (tag_in(slots_[at]) != tag) return false;
      ++at;
    }
    std::uint64_t end = at + 1;
    while (slots_[end] != 0 && home(tag_in(slots_[end])) < end) ++end;
    for (; at + 1 < end; ++at) {
      slots_[at] = slots_[at + 1];
      word_barrier();
    }
    slots_[end - 1] = 0;
    return true;
  }

  // Replaces the number of a row by another, with one store. Returns false if it is not there.
  bool replace(std::uint32_t tag, std::uint32_t row, std::uint32_t by) {
    const std::uint64_t wanted = (std::uint64_t{tag} << 32) | row;
    std::uint64_t at = lower_bound(home(tag), tag);
    while (slots_[at] != wanted) {
      if (tag_in(slots_[at]) != tag) return false;
      ++at;
    }
    slots_[at] = (std::uint64_t{tag} << 32) | by;
    return true;
  }

  // Whether a row has this number and this tag.
  bool has(std::uint32_t tag, std::uint32_t row) const {
    return find(tag, [&](std::uint32_t other) { return other == row; }) == row;
  }

  // Begins to grow, by its part or, while small, to twice the slots. `move` must follow until the index no longer
  // grows. Throws std::runtime_error if it still grows.
  void grow() {
    if (growing()) throw overflow();
    old_lines_ = lines_;
    lines_ = grown() / kLineSlots;
    frontier_ = 0;
  }

  // Moves `count` slots of a growing index to their new homes: more, to move all that share a tag, and fewer at the end
  // of growth. Overflow into the tail can only shrink, because distances to the end grow. But if thousands of ids that
  // share one hash have been inserted meanwhile, it may stop before them, and returns false.
  bool move(std::uint64_t count);

  // Returns the number of slots after `grow`.
  std::uint64_t grown() const {
    const std::uint64_t count = slot_count();
    return std::min(count < kDoubling ? count * 2 : (count + count / part_) / kLineSlots * kLineSlots, max_);
  }

  // Rebuilds the index for the rows 0 ... rows - 1 and their tags, which must fit. Ignores the old slots, and ends
  // growth.
  template <class TagOf>
  void build(std::uint64_t rows, TagOf&& tag_of_row) {
    frontier_ = kRowMask;
    const std::uint64_t end = slot_count() + kIndexTail;
    std::uint64_t* const packed = slots_ + (end - rows);
    for (std::uint64_t row = 0; row < rows; ++row) packed[row] = (std::uint64_t{tag_of_row(row)} << 32) | row;
    std::sort(packed, slots_ + end, std::greater<>());
    deal(end - rows, end);
  }

  // The same for slots (tag << 32 | row) in any order.
  void build(std::vector<std::uint64_t>& slots);
  // Calls use(slot) for each slot that is taken, in order; tag << 32 | row.
  template <class Use>
  void for_each(Use&& use) const {
    for (std::uint64_t at = 0; at < slot_count() + kIndexTail; ++at) {
      if (slots_[at] != 0) use(slots_[at]);
    }
  }

  // Whether the slots are an index of the rows 0 ... rows - 1, as far as can be checked without reading a row: every
  // search ends, and finds only these rows.
  bool sound(std::uint64_t rows) const;
  // The same, but `known(row)` says, once for each slot, whether the row may be there.
  template <class Known>
  bool sound_if(Known&& known) const {
    std::uint64_t last = std::numeric_limits<std::uint64_t>::max(), run = 0, used_end = 0;
    const std::uint64_t end = slot_count() + kIndexTail;
    for (std::uint64_t at = 0; at < end; ++at) {
      const std::uint64_t slot = slots_[at];
      if (slot == 0) {
        run = at + 1;  // Slots that are taken begin here at the earliest: a search does not pass an empty one.
        continue;
      }
      const std::uint32_t tag = tag_in(slot);
      if (tag == 0 || tag > last || !known(row_in(slot))) return false;
      if (home(tag) > at || home(tag) < run) return false;
      last = tag;
      used_end = at + 1;
    }
    return used_end + kLineSlots <= end;
  }

  // Zeroes the slots behind the tail, up to slot `end`.
  void clear_behind(std::uint64_t end) {
    const std::uint64_t begin = slot_count() + kIndexTail;
    if (end > begin) std::memset(slots_ + begin, 0, (end - begin) * sizeof(std::uint64_t));
  }

  // Empties the index, and ends growth.
  void clear() {
    frontier_ = kRowMask;
    std::memset(slots_, 0, (slot_count() + kIndexTail) * sizeof(std::uint64_t));
  }

 private:
  static void candidates_avx2(const Index* const* indices, const std::uint32_t* tags, std::size_t count,
                              std::uint32_t* rows);
  static void candidates_avx512(const Index* const* indices, const std::uint32_t* tags, std::size_t count,
                                std::uint32_t* rows);
  std::uint32_t row_at(std::uint64_t at, std::uint32_t tag) const {
    return tag_in(slots_[at]) == tag ? row_in(slots_[at]) : kNone;
  }

  static std::uint64_t bound_of(std::uint32_t tag) { return (std::uint64_t{tag} << 32) | 0xFFFFFFFFu; }
  static std::uint32_t tag_in(std::uint64_t slot) { return static_cast<std::uint32_t>(slot >> 32); }
  static std::uint32_t row_in(std::uint64_t slot) { return static_cast<std::uint32_t>(slot) & kRowMask; }

  static std::uint64_t home(std::uint32_t tag, std::uint64_t lines) {
    return ((std::uint64_t{~tag & kRowMask} * lines) >> kRowBits) * kLineSlots;
  }
  // Returns the first position at which no slot may lie: a search needs an empty line there.
  std::uint64_t limit() const { return slot_count() + kIndexTail - kLineSlots; }
  bool empty(std::uint64_t from, std::uint64_t count) const {
    std::uint64_t all = 0;
    for (std::uint64_t i = 0; i < count; ++i) all |= slots_[from + i];
    return all == 0;
  }
  // Puts a slot at a position, and those from there to the hole one further.
  void shift_into(std::uint64_t at, std::uint64_t hole, std::uint64_t slot) {
    for (; hole > at; --hole) {
      slots_[hole] = slots_[hole - 1];
      word_barrier();
    }
    slots_[at] = slot;
  }
  static std::runtime_error overflow() {
    return std::runtime_error("the index overflows: thousands of ids share one hash; hash the ids before use");
  }

  void deal(std::uint64_t from, std::uint64_t end) {
    std::uint64_t next = 0;
    for (; from < end; ++from) {
      const std::uint64_t slot = slots_[from];
      const std::uint64_t at = std::max(home(tag_in(slot)), next);
      if (at > from) throw std::runtime_error("thousands of rows share one hash, which cannot be: they are damaged");
      for (; next < at; ++next) slots_[next] = 0;
      slots_[at] = slot;
      next = at + 1;
    }
    std::memset(slots_ + next, 0, (end - next) * sizeof(std::uint64_t));
  }

  std::uint64_t* slots_ = nullptr;
  std::uint64_t lines_ = 0;      // of home slots, for tags up to the frontier ...
  std::uint64_t old_lines_ = 0;  // ... and for those above it
  std::uint32_t frontier_ = kRowMask;
  std::uint64_t max_ = 0;
  std::uint64_t part_ = kThird;
};

}  // namespace persia
