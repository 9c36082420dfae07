// What a shard knows of its rows on disk, beside its index and the header of its region.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "persia/row_log.hpp"

namespace persia {

// Rows that leave memory together, or the disk: those of a block, but only so many of a small table.
inline constexpr std::uint64_t kShareThatLeaves = 8;

// Records of one shard that a request wants, read mostly without its lock. A record is what it was as long as the
// segment has not been used again.
class FetchedRecords {
 public:
  // Notes a record to read; under the shard's lock.
  void want(const RowLog& log, std::uint32_t record) {
    wanted_.push_back({record, log.generation(log.segment_of(record))});
  }
  // Returns whether no record is wanted.
  bool empty() const { return wanted_.empty(); }
  // Reads those of several shards at once. Blocks. Needs no lock.
  struct Pending {
    FetchedRecords* records;
    const RowLog* log;
  };
  static void read(std::span<const Pending> pending);
  // Returns the bytes of a record; nullptr if it has not been read, or may have become another one since. Under the
  // shard's lock.
  const std::byte* find(const RowLog& log, std::uint32_t record) const;
  // Returns the number of records read.
  std::size_t size() const { return records_.size(); }

 private:
  RowLog::Wanted prepare(const RowLog& log);

  std::vector<std::pair<std::uint32_t, std::uint32_t>> wanted_;  // and generation of its segment
  std::vector<std::uint32_t> records_;                           // sorted
  std::vector<std::byte> bytes_;
};

struct Tier {
  Tier(RowLog rows_on_disk, std::uint64_t rows) : log(std::move(rows_on_disk)), capacity(rows) {}

  RowLog log;
  std::uint64_t capacity;                   // rows, those in memory included
  std::vector<std::uint32_t> vacant;        // rows of memory that hold none
  std::uint32_t hand = 0;                   // row that left last, of those that were equally recent
  const FetchedRecords* fetched = nullptr;  // of the request that holds the lock
  FetchedRecords ahead;                     // of one that reads under the lock
  // The segment that is being compacted, its generation, and the record to go on with.
  std::uint32_t compacting = RowLog::kNone;
  std::uint32_t generation = 0;
  std::uint32_t cursor = 0;
  std::uint64_t to_compact = 0;  // records to look at
  std::uint64_t damaged = 0;     // requests that have failed on a damaged record
  // By segment, no record has a later stamp, and none an earlier one; and the stamps for which segments were looked at
  // last (`expired_before`).
  std::vector<std::uint32_t> newest, oldest;
  std::uint32_t looked_for = 0;
  // Of a snapshot: the records that were live when it began and have not been read yet, a bit each; the record to
  // go on with, and the end.
  std::vector<std::uint64_t> snapshot;
  std::uint64_t snapshot_next = 0;
  std::uint64_t snapshot_end = 0;
  // Scratch memory.
  std::vector<std::uint32_t> records;
  std::vector<std::byte> bytes;

  // Returns bounds of the stamps in a segment, of which nothing may be known.
  std::uint32_t newest_in(std::uint32_t segment, std::uint32_t clock) const {
    return segment < newest.size() ? newest[segment] : clock;
  }
  std::uint32_t oldest_in(std::uint32_t segment) const { return segment < oldest.size() ? oldest[segment] : 0; }
};

}  // namespace persia
