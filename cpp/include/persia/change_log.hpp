// The rows of a shard that have changed since a publisher last took them.
//
// Independent of what checkpoints know of changes (snapshot.hpp): both may read at the same time. Rows are marked by
// number, so memory is bounded by the number of rows; only the ids of removed rows are listed, up to a limit. It is not
// in the region: a process that attaches to one begins with all rows.
#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace persia {

class RowStore;
class Tier;

// A set of positions, as bits, and how many there are.
class Marks {
 public:
  // Returns whether a position is in the set.
  bool has(std::uint64_t at) const { return at / 64 < words_.size() && (words_[at / 64] >> (at % 64) & 1u) != 0; }
  // Adds a position. Throws std::bad_alloc.
  void add(std::uint64_t at) {
    if (at / 64 >= words_.size()) words_.resize(at / 64 + 1);
    const std::uint64_t bit = std::uint64_t{1} << (at % 64);
    count_ += (words_[at / 64] & bit) == 0;
    words_[at / 64] |= bit;
  }
  // Removes a position.
  void remove(std::uint64_t at) {
    if (!has(at)) return;
    words_[at / 64] &= ~(std::uint64_t{1} << (at % 64));
    --count_;
  }
  // Adds 0 ... end - 1 to an empty set. Throws std::bad_alloc.
  void fill(std::uint64_t end) {
    words_.assign((end + 63) / 64, ~std::uint64_t{0});
    if (end % 64 != 0) words_.back() = (std::uint64_t{1} << (end % 64)) - 1;
    count_ = end;
  }
  // Adds the positions of other bits, the first of which is at `from`, a multiple of 64. Throws std::bad_alloc.
  void append(std::uint64_t from, const std::vector<std::uint64_t>& bits) {
    words_.resize(from / 64);
    words_.insert(words_.end(), bits.begin(), bits.end());
    for (const std::uint64_t word : bits) count_ += static_cast<unsigned>(std::popcount(word));
  }
  // Returns the first position in [from, end), or `end`.
  std::uint64_t next(std::uint64_t from, std::uint64_t end) const {
    while (from < end) {
      const std::uint64_t word = from / 64 < words_.size() ? words_[from / 64] >> (from % 64) : 0;
      if (word != 0) return std::min(end, from + static_cast<unsigned>(std::countr_zero(word)));
      from += 64 - from % 64;
    }
    return end;
  }
  // Returns the number of positions in the set.
  std::uint64_t count() const { return count_; }
  // Returns a bound of the positions.
  std::uint64_t end() const { return words_.size() * 64; }
  // Returns the bytes of the bits.
  std::uint64_t bytes() const { return words_.size() * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_;
  std::uint64_t count_ = 0;
};

// What a publisher takes: ids that have been removed, then rows that have changed. No id is in `ids` twice.
struct RowChanges {
  std::vector<std::uint64_t> removed;  // may repeat
  std::vector<std::uint64_t> ids;
  std::vector<float> embeddings;  // [ids, dim]

  // Returns the number of entries.
  std::size_t size() const { return ids.size() + removed.size(); }
};

// Not thread-safe: guarded by the lock of its shard. While it is off, nothing is marked and there is no memory.
//
// A pass begins by setting aside what is marked (`taking_`) and listed (`removing_`); each row that the publisher takes
// leaves `taking_`. Marks move with their rows, so the pass is complete when `taking_` is empty, however often rows
// have moved meanwhile. A row that was changed since is taken with its newest values, and is not marked any more.
class ChangeLog {
 public:
  // Marks a row, by its position (`RowStore::mark_of`): it has new values.
  void mark(std::uint64_t at) noexcept {
    if (!on_) return;
    try {
      marked_.add(at);
    } catch (const std::bad_alloc&) {
      lose();
    }
  }
  // Notes that a row moves, with or without changes.
  void move(std::uint64_t from, std::uint64_t to) noexcept {
    if (!on_) return;
    try {
      for (Marks* marks : {&marked_, &taking_}) {
        if (marks->has(from)) marks->add(to);
        marks->remove(from);
      }
    } catch (const std::bad_alloc&) {
      lose();
    }
  }
  // Notes that the row of an id is removed from the table.
  void remove(std::uint64_t at, std::uint64_t id) noexcept {
    if (!on_) return;
    marked_.remove(at);
    taking_.remove(at);
    if (!known_) return;
    try {
      if (removed_.size() < limit_) return removed_.push_back(id);
    } catch (const std::bad_alloc&) {
    }
    known_ = false;  // A pass in work goes on; the next one takes all rows.
    removed_ = {};
  }
  // Forgets everything: what has changed is not known any more, and a pass in work is lost. Off until a pass over all
  // rows begins.
  void lose() noexcept { *this = {}; }

  // Begins a pass over the rows that have changed since the last pass, or over all. From then on the ids of removed
  // rows are listed, `removed_limit` at most. `tier` is nullptr without one. Returns false, and begins none, if what
  // has changed is not known. Throws std::bad_alloc; then nothing has changed.
  bool begin(bool all, std::size_t removed_limit, const RowStore& rows, const Tier* tier);
  // Appends the next piece of the pass, which one lock is held for. Returns whether there may be more. Throws
  // std::runtime_error if there is no pass, or it is lost, or the tier cannot be read.
  bool take(const RowStore& rows, Tier* tier, RowChanges& changes);
  // Returns the bytes of marks and lists.
  std::uint64_t memory_bytes() const {
    return marked_.bytes() + taking_.bytes() + (removed_.capacity() + removing_.capacity()) * sizeof(std::uint64_t);
  }

 private:
  bool find_expired(const RowStore& rows, Tier* tier, RowChanges& changes);
  void take_marked(const RowStore& rows, Tier* tier, RowChanges& changes);

  bool on_ = false;
  bool known_ = false;    // all changes since the last pass are in `marked_` and `removed_`
  bool passing_ = false;  // a pass has begun, and not ended
  Marks marked_, taking_;
  std::vector<std::uint64_t> removed_, removing_;  // ids
  std::size_t limit_ = 0;                          // of `removed_`
  // Rows whose stamps are below have been removed, as they had expired; and those that this pass removes.
  std::uint32_t expired_before_ = 0, expire_before_ = 0;
  std::uint64_t cursor_ = 0;    // in `taking_`
  std::uint64_t swept_ = 0;     // rows of memory that have been looked at for expired ones ...
  std::uint64_t searched_ = 0;  // ... and records of the tier
};

}  // namespace persia
