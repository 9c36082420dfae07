// Which rows of a shard have changed since a moment.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace persia {

// One bit for each row that there was at that moment; all rows added since count as changed.
class ChangedRows {
 public:
  // No bits: all rows count as changed.
  ChangedRows() = default;
  // None of the rows 0 ... rows - 1. Throws std::bad_alloc.
  explicit ChangedRows(std::uint64_t rows) : words_((rows + 63) / 64) {
    if (rows % 64 != 0) words_.back() = ~std::uint64_t{0} << (rows % 64);
  }

  // Returns whether a row has changed.
  bool has(std::uint32_t row) const { return row / 64 >= words_.size() || (words_[row / 64] >> (row % 64) & 1u) != 0; }
  // Adds a row that has not changed before.
  void add(std::uint32_t row) { words_[row / 64] |= std::uint64_t{1} << (row % 64); }
  // Says whether a row has changed, whose number may be new, or have been another's.
  void set(std::uint32_t row, bool changed) noexcept;
  // Returns the bytes of the bits.
  std::uint64_t bytes() const { return words_.size() * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_;
};

// What has changed since the snapshot `since`; 0 while that is unknown. It is not in the region: a process that
// attaches to one does not know, and its next increment is a whole snapshot.
struct Changes {
  ChangedRows rows;     // also read by the snapshot that began it, even if `since` is 0 by now
  ChangedRows records;  // of the tier
  std::uint32_t since = 0;
  std::size_t limit = 0;
  std::vector<std::uint64_t> evicted;  // ids

  // Adds an evicted id. Does not throw: without memory, changes become unknown.
  void evict(std::uint64_t id) noexcept {
    if (since == 0) return;
    try {
      if (evicted.size() < limit) return evicted.push_back(id);
    } catch (const std::bad_alloc&) {
    }
    since = 0;
    evicted = {};
  }
};

}  // namespace persia
