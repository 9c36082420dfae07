// The tier of a shard: a log on disk of the rows that do not fit into memory.
//
// The index refers to rows of memory and to records of the tier alike: numbers from the capacity of memory on are
// records. So a row moves by one store, of its other number to its slot. Before it, the new place is complete: the
// row's record is in the file, or its bytes are in a vacant row of memory. After it, the old place is given up: the row
// of memory is marked vacant, or the record counts as dead. `Header::tier` says which row is moving, so that whoever
// attaches completes what is left of that. The slots of rows of the tier are nowhere else: no step of the index loses
// one (index.hpp).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "persia/fetched_records.hpp"
#include "persia/memory_rows.hpp"
#include "persia/row_log.hpp"
#include "persia/slice.hpp"

namespace persia {

struct TierCounts {
  std::uint64_t rows = 0;        // now
  std::uint64_t disk_bytes = 0;  // of the files now
  std::uint64_t demoted = 0;     // rows that have moved from memory to the tier
  std::uint64_t read = 0;        // records that requests have read
  std::uint64_t promoted = 0;    // rows that have moved back to memory
  std::uint64_t compacted = 0;   // rows written again, to free the space of others
  // Segments of the files with rows that cannot be read now, and requests that have failed on a damaged record.
  std::uint64_t unreadable = 0;

  TierCounts& operator+=(const TierCounts& other);
};

// A row of the tier; none, unless `row` is set.
struct TierRow {
  std::uint32_t record = RowLog::kNone;
  const std::byte* row = nullptr;  // valid until the next record is read
  std::uint32_t last_step = 0;

  // Returns the header of the row.
  const RowHeader& header() const { return *reinterpret_cast<const RowHeader*>(row); }
};

// Not thread-safe: guarded by the lock of its shard, but for `log` and what `FetchedRecords` reads from it.
//
// Every method that reads or writes the disk blocks, and throws std::runtime_error if a record is damaged or the disk
// fails, RegionFull if it is full.
class Tier {
 public:
  // Creates the log of a table with a tier, or attaches to the one of its region. `memory` and `reader` must outlive
  // it.
  Tier(MemoryRows& memory, DiskReader& reader);
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  // Returns the log, which `FetchedRecords` reads without the lock.
  const RowLog& log() const { return log_; }
  // Returns the number of rows of the shard, in memory and in the tier.
  std::uint64_t rows_total() const { return header_->rows_used + log_.live_records() - vacant_.size(); }
  // Returns what there is in the tier, and what requests have read and written.
  TierCounts counts() const;
  // Returns the bytes of marks in memory.
  std::uint64_t memory_bytes() const { return log_.live_bits().size() * sizeof(std::uint64_t); }

  // Wants all records that may be those of an id. Returns whether there are any.
  bool want(std::uint64_t id, FetchedRecords& wanted) const;
  // Reads in one batch what the ids of a slice may need, from the i-th on, for the request that holds the lock; no-op
  // if it has read already. The slice is of `shards` shards.
  void fetch(const Slice& slice, std::size_t from, std::size_t shards);
  // Uses records that were read without the lock, for the request that holds it.
  void use(const FetchedRecords& fetched);
  // Forgets what the request has read, as it gives up the lock.
  void end_request() { fetched_ = nullptr; }

  // Returns the row of an id.
  TierRow find(std::uint64_t id);
  // Returns the stamp of a row.
  std::uint32_t stamp_of(const TierRow& row) const;
  // Returns whether there is such a row, and it has not expired.
  bool present(const TierRow& row) const { return row.row != nullptr && !memory_->expiry.expired(stamp_of(row)); }
  // Returns the words of an id's embedding, valid until the next record is read; nullptr if there is no row.
  const float* embedding(std::uint64_t id);
  // Moves the row of an id to memory. Returns its number there; Index::kNone if there is no row.
  std::uint32_t promote(std::uint64_t id);

  // Returns a vacant row of memory for a new row, to be written, all but its stamp, and then published. Moves the
  // least recently used rows to the tier if there is none; in a table at its capacity, rows that were in the tier for
  // the longest are evicted. If it throws, nothing has changed.
  std::uint32_t acquire();
  // Returns whether a row of memory is the vacant one that `acquire` has returned.
  bool acquired(std::uint32_t number) const { return !vacant_.empty() && vacant_.back() == number; }
  // Makes a row reachable that has been written to the place that `acquire` has returned.
  void publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp);

  // Removes the row of an id, which is in this record.
  void drop(std::uint32_t record, std::uint64_t id);
  // Removes a row of memory, which becomes vacant. The queue of rows to evict must be cleared next.
  void vacate(std::uint32_t number);
  // Removes the rows of some ids among a few records from `record` on, and moves it. Returns how many there were.
  template <class Chosen>
  std::uint64_t remove(std::uint64_t& record, Chosen&& chosen) {
    const auto from = static_cast<std::uint32_t>(record);
    record = std::min(record + block_records(), log_.end_record());
    read_live(from, static_cast<std::uint32_t>(record));
    std::uint64_t removed = 0;
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const TierRow stored = row(i);
      const std::uint64_t id = stored.header().key();
      if (!chosen(id)) continue;
      drop(stored.record, id);
      ++removed;
    }
    return removed;
  }

  // Appends up to `max_rows` rows from a row number on; returns the one to continue with, or ~0 at the end.
  std::uint64_t export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows);
  // Appends the ids of the rows whose stamps are from `from` on and below `before`. Looks at a few records, and moves
  // `at`, the next one. Returns whether it was not at the end.
  bool find_expired(std::uint64_t& at, std::uint32_t from, std::uint32_t before, std::vector<std::uint64_t>& ids);
  // Reads the records in `records()`, which the caller has filled; `row` then returns them.
  void read_records();
  std::vector<std::uint32_t>& records() { return records_; }
  // Returns the i-th row read.
  TierRow row(std::size_t i) const;
  // Returns the vacant rows of memory.
  const std::vector<std::uint32_t>& vacant() const { return vacant_; }

  // Prepares a snapshot of the records that are live now. Throws std::bad_alloc; then nothing has changed.
  void prepare_snapshot();
  // Begins the snapshot. Segments stay as they are until their records have been read.
  void begin_snapshot() noexcept;
  // Appends rows of the snapshot, as many at most as are read under one lock. Returns whether there may be more.
  bool read_snapshot(Snapshot& snapshot, RowBatch& rows);
  // Ends the snapshot, read or not; no-op without one.
  void end_snapshot();

  // Removes all rows of the shard, in memory and in the tier.
  void clear();
  // Completes what a killed process was doing, and finds out which rows are where. Returns whether the index had to be
  // rebuilt. Throws std::runtime_error if the region or the log are damaged in another way.
  bool recover();

 private:
  // Rows that move together, or are evicted together: all rows of a block, but only one in this number of a small
  // table.
  static constexpr std::uint64_t kMovedShare = 8;

  RowStore& store() const { return memory_->store; }
  std::uint64_t block_records() const { return RowLog::block_records(store().stride()); }
  const std::byte* checked_row(std::uint32_t record, const std::byte* bytes);
  void append(const TierRow& row, RowBatch& rows) const;

  // How rows leave memory.
  void make_vacant();
  void demote();
  void demote_or_make_room();
  std::uint32_t append_to_log(const std::byte* row, std::uint32_t last_step, std::uint32_t stamp,
                              RowLog::For what = RowLog::For::kRows);

  // How the space of records is freed (tier_compaction.cpp).
  void read_live(std::uint32_t from, std::uint32_t end);
  void compact();
  bool compact_block();
  void set_compacting_aside();
  std::uint32_t expired_segment();
  void evict();
  bool evict_from(std::uint32_t segment);
  // Return bounds of the stamps in a segment, of which nothing may be known.
  std::uint32_t newest_in(std::uint32_t segment) const {
    return segment < newest_.size() ? newest_[segment] : header_->clock;
  }
  std::uint32_t oldest_in(std::uint32_t segment) const { return segment < oldest_.size() ? oldest_[segment] : 0; }

  // Repair after a kill (tier_recovery.cpp).
  void finish_clear();
  void finish_move();
  bool revive_rows();
  void rebuild_index(std::vector<std::uint64_t> slots);
  std::string slots_path() const;
  void write_slots(const std::vector<std::uint64_t>& slots) const;
  std::vector<std::uint64_t> read_slots() const;

  MemoryRows* memory_;
  Header* header_;
  std::uint64_t capacity_;  // rows, those in memory included
  RowLog log_;
  std::vector<std::uint32_t> vacant_;        // rows of memory that hold none
  std::uint32_t hand_ = 0;                   // row that moved last, of those that were equally recent
  const FetchedRecords* fetched_ = nullptr;  // of the request that holds the lock
  FetchedRecords ahead_;                     // of one that reads under the lock
  // The segment that is being compacted, its generation, and the record to go on with.
  std::uint32_t compacting_ = RowLog::kNone;
  std::uint32_t generation_ = 0;
  std::uint32_t cursor_ = 0;
  std::uint64_t to_compact_ = 0;  // records to look at
  std::uint64_t damaged_ = 0;     // requests that have failed on a damaged record
  // By segment, no record has a later stamp, and none an earlier one; and `Expiry::expired_before` when segments were
  // looked at last.
  std::vector<std::uint32_t> newest_, oldest_;
  std::uint32_t looked_for_ = 0;
  // Of a snapshot: the records that were live when it began and have not been read yet, a bit each; the record to
  // go on with, and the end.
  std::vector<std::uint64_t> snapshot_;
  std::uint64_t snapshot_next_ = 0;
  std::uint64_t snapshot_end_ = 0;
  // Scratch memory.
  std::vector<std::uint32_t> records_;
  std::vector<std::byte> bytes_;
};

}  // namespace persia
