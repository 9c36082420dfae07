// Records of the tier that a request reads mostly without the lock of their shard.
#pragma once
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "persia/row_log.hpp"

namespace persia {

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
  // Reads the records of several shards in one call. Blocks. Needs no lock.
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

}  // namespace persia
