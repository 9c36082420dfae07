// The rows of a shard that have changed since a publisher last took them.
//
// Independent of what checkpoints know of changes (snapshot.hpp): both may read at once. Rows are marked by number, so
// memory is bounded by the number of rows; only the ids of removed rows are listed, up to a limit. It is not in the
// region: a process that attaches to one begins with all rows.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace persia {

// A set of positions, as bits, and how many there are.
class Marks {
 public:
  bool has(std::uint64_t at) const { return at / 64 < words_.size() && (words_[at / 64] >> (at % 64) & 1u) != 0; }
  // Throws std::bad_alloc.
  void add(std::uint64_t at) {
    if (at / 64 >= words_.size()) words_.resize(at / 64 + 1);
    const std::uint64_t bit = std::uint64_t{1} << (at % 64);
    count_ += (words_[at / 64] & bit) == 0;
    words_[at / 64] |= bit;
  }
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
  std::uint64_t bytes() const { return words_.size() * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_;
  std::uint64_t count_ = 0;
};

// Guarded by the shard's lock. While it is off, nothing is marked and there is no memory. No method throws.
//
// A pass begins by setting aside what is marked (`taking`) and listed (`removing`); each row that the publisher takes
// leaves `taking`. Marks move with their rows, so the pass is complete when `taking` is empty, however often rows have
// moved meanwhile. A row that was changed since is taken with its newest values, and is not marked any more.
struct Changefeed {
  bool on = false;
  bool known = false;    // all changes since the last pass are in `marked` and `removed`
  bool passing = false;  // a pass has begun, and not ended
  Marks marked, taking;
  std::vector<std::uint64_t> removed, removing;  // ids
  std::size_t limit = 0;                         // of `removed`
  // Rows whose stamps are below have been removed, as they had left the table; and those that this pass removes.
  std::uint32_t expired_before = 0, expire_before = 0;
  std::uint64_t cursor = 0;    // in `taking`
  std::uint64_t swept = 0;     // rows of memory that have been looked at for those that have left ...
  std::uint64_t searched = 0;  // ... and records on disk

  // A row has new values.
  void mark(std::uint64_t at) noexcept {
    if (!on) return;
    try {
      marked.add(at);
    } catch (const std::bad_alloc&) {
      lose();
    }
  }
  // A row moves, with or without changes.
  void move(std::uint64_t from, std::uint64_t to) noexcept {
    if (!on) return;
    try {
      for (Marks* marks : {&marked, &taking}) {
        if (marks->has(from)) marks->add(to);
        marks->remove(from);
      }
    } catch (const std::bad_alloc&) {
      lose();
    }
  }
  // The row of an id leaves the table.
  void remove(std::uint64_t at, std::uint64_t id) noexcept {
    if (!on) return;
    marked.remove(at);
    taking.remove(at);
    if (!known) return;
    try {
      if (removed.size() < limit) return removed.push_back(id);
    } catch (const std::bad_alloc&) {
    }
    known = false;  // A pass in work goes on; the next one takes all rows.
    removed = {};
  }
  // What has changed is not known any more, and a pass in work is lost. Off until a pass over all rows begins.
  void lose() noexcept { *this = {}; }

  std::uint64_t bytes() const {
    return marked.bytes() + taking.bytes() + (removed.capacity() + removing.capacity()) * sizeof(std::uint64_t);
  }
};

// What a publisher takes: ids that have been removed, then rows that have changed. No id is in `ids` twice.
struct RowChanges {
  std::vector<std::uint64_t> removed;  // may repeat
  std::vector<std::uint64_t> ids;
  std::vector<float> embeddings;  // [ids, dim]
};

}  // namespace persia
