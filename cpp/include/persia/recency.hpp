// Which row to evict: exactly the one with the smallest (stamp, row number), without a list to keep in order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace persia {

// The stamps of a shard's rows, wherever they lie.
struct Stamps {
  std::byte* rows;
  std::size_t stride;
  std::uint64_t count;

  std::uint32_t& operator[](std::uint64_t row) const;
};

// Scans all rows once for the oldest eighth, queues those in order, and skips the ones touched since. The queue is
// derived from the stamps: dropping it at any time changes nothing but the next scan.
class VictimQueue {
 public:
  // The least recently used row. `clock`: the stamp of the batch in work. While every row bears it, row 0 is the one.
  std::uint32_t front(const Stamps& stamps, std::uint32_t clock);
  // The same, and takes it off the queue: the caller evicts it.
  std::uint32_t pop(const Stamps& stamps, std::uint32_t clock);
  void clear();

 private:
  void scan(const Stamps& stamps, std::uint32_t clock);
  void collect(const Stamps& stamps, std::uint32_t newest);

  std::vector<std::uint64_t> queue_;  // stamp << 32 | row, ascending
  std::size_t next_ = 0;
  std::uint32_t exhausted_ = 0;  // a clock at which no row was older
};

// Replaces stamps by their ranks 0, 1, ...; returns the largest. Order is kept, so eviction is unaffected: also where a
// kill comes in between, since no rank is above its stamp, and rows change from the oldest on.
std::uint32_t renumber(const Stamps& stamps);

}  // namespace persia
