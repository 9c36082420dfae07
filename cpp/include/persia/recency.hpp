// Chooses the row to evict, that with the smallest (stamp, row number), without maintaining an ordered list.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace persia {

// Access to the stamps of a shard's rows.
struct Stamps {
  std::byte* rows;
  std::size_t stride;
  std::uint64_t count;

  std::uint32_t& operator[](std::uint64_t row) const;
};

// Scans all rows for the oldest eighth, queues those in order, and skips rows touched since. The queue is derived from
// the stamps, so dropping it only causes a new scan.
class VictimQueue {
 public:
  // Returns the least recently used row. `clock` is the stamp of the current batch. If all rows have it, returns row 0.
  std::uint32_t front(const Stamps& stamps, std::uint32_t clock);
  // Returns the same row and removes it from the queue; the caller evicts it.
  std::uint32_t pop(const Stamps& stamps, std::uint32_t clock);
  // Drops the queue.
  void clear();

 private:
  void scan(const Stamps& stamps, std::uint32_t clock);
  void collect(const Stamps& stamps, std::uint32_t newest);

  std::vector<std::uint64_t> queue_;  // stamp << 32 | row, ascending
  std::size_t next_ = 0;
  std::uint32_t exhausted_ = 0;  // a clock at which no row was older
};

// Replaces stamps by their ranks 0, 1, ...; returns the largest. This keeps the order of eviction, even if a kill
// interrupts it: no rank exceeds its stamp, and rows change from the oldest on.
std::uint32_t renumber(const Stamps& stamps);

}  // namespace persia
