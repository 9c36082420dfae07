// Snapshots of a shard's rows, read while the shard keeps changing them.
//
// A snapshot starts a new set of changed rows. Before a row joins it, its bytes are kept (old_rows.hpp), unless the
// reader has passed it already. The reader reads the rows in order: those not in the set are unchanged since the
// snapshot, all others were kept or were added later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "persia/bucket_set.hpp"
#include "persia/changed_rows.hpp"
#include "persia/old_rows.hpp"
#include "persia/row_store.hpp"

namespace persia {

// Number of rows for which a reader locks the shard at a time. It may get up to as many more than requested.
inline constexpr std::uint64_t kRowsPerLock = 4096;

struct SnapshotOptions {
  std::uint32_t id = 1;     // of the snapshot; ids rise
  std::uint32_t since = 0;  // leaves out rows that have not changed since the snapshot of this id; 0: takes all
  std::string directory;    // of old rows
  std::size_t buffer_bytes = std::size_t{1} << 20;
  std::size_t evicted_limit = 0;    // ids of rows evicted from the snapshot on are remembered, at most this number
  bool live = false;                // rows as they are when they are read, instead: no old rows are kept
  std::optional<BucketSet> only{};  // leaves out rows of other buckets; none: takes all
};

// A snapshot that is being read. Not thread-safe: guarded by the lock of its shard.
class Snapshot {
 public:
  // A snapshot of `rows` rows of `stride` bytes, of which those with stamps below `expired_before` have expired. Takes
  // what has changed before it out of `before`, unless it throws.
  Snapshot(const SnapshotOptions& options, std::uint32_t expired_before, std::uint64_t rows, std::size_t stride,
           Changes& before);

  // Keeps a row of the snapshot before its first change. Does not throw: on failure the snapshot is lost and training
  // continues.
  void keep(OldRows::Tag tag, const std::byte* row) noexcept {
    if (live_ || tag.number < next_ || !changed_before(tag.number) || !failure_.empty()) return;
    if (wants(reinterpret_cast<const RowHeader*>(row)->key())) keep_old(tag, row);
  }
  // Marks the snapshot as lost.
  void fail(const std::string& why) noexcept;
  // Appends the next kRowsPerLock rows of memory, as they were, to `batch`; `now` is what has changed since the
  // snapshot. Returns whether there may be more. Throws std::runtime_error if the snapshot is lost.
  bool read(const RowStore& rows, const ChangedRows& now, RowBatch& batch);

  // Returns the id of the snapshot.
  std::uint32_t id() const { return id_; }
  // Returns whether a record of the tier that was live when the snapshot began belongs to it.
  bool wants_record(std::uint32_t record) const { return all_ || before_.records.has(record); }
  // Returns whether the reader takes a row that belongs to the snapshot: not if it had expired when the snapshot began,
  // nor, which counts, if its bucket is left out.
  bool takes(std::uint64_t id, std::uint32_t stamp) {
    if (stamp < expired_before_) return false;
    const bool wanted = wants(id);
    left_out_ += !wanted;
    return wanted;
  }
  // Returns the number of rows that the reader has left out, of other buckets.
  std::uint64_t left_out() const { return left_out_; }
  // Returns the ids that were evicted before the snapshot.
  std::vector<std::uint64_t> evicted() const;

 private:
  bool wants(std::uint64_t id) const { return !only_ || only_->has(id); }
  void keep_old(OldRows::Tag tag, const std::byte* row) noexcept;
  const std::vector<OldRows::Old>& pass(std::uint64_t end);
  bool changed_before(std::uint32_t number) const { return all_ || before_.rows.has(number); }
  // Whether a row is to be read from its place.
  bool in_place(std::uint32_t number, const ChangedRows& now) const {
    return live_ ? changed_before(number) || now.has(number) : changed_before(number) && !now.has(number);
  }

  std::uint32_t id_;
  bool all_;
  bool live_;
  std::uint32_t expired_before_;
  std::optional<BucketSet> only_;
  std::uint64_t left_out_ = 0;
  std::uint64_t rows_;
  std::uint64_t next_ = 0;  // the reader has passed the rows below
  OldRows old_;
  std::string failure_;
  Changes before_;
};

// The snapshots of a shard: what has changed since the last one, and the one that is being read, if any. Not
// thread-safe: guarded by the lock of the shard.
class Snapshots {
 public:
  // `rows` must outlive it.
  explicit Snapshots(RowStore& rows) : rows_(&rows) {}
  Snapshots(const Snapshots&) = delete;
  Snapshots& operator=(const Snapshots&) = delete;

  // Marks a row of memory as changed, before anything of it changes.
  void before_change(std::uint32_t number) {
    if (changes_.rows.has(number)) return;
    if (open_) open_->keep({number, rows_->last_step(number)}, rows_->row_bytes(number));
    changes_.rows.add(number);
  }
  // Leaves a row of memory that holds none out of the snapshot that has just begun, whatever comes there.
  void skip(std::uint32_t number) {
    if (!changes_.rows.has(number)) changes_.rows.add(number);
  }
  // Notes the id of a row that is evicted, or has expired.
  void evict(std::uint64_t id) noexcept { changes_.evict(id); }
  // Returns whether a row of memory has changed.
  bool changed(std::uint32_t number) const { return changes_.rows.has(number); }
  // Returns whether a record of the tier has changed.
  bool record_changed(std::uint32_t record) const { return changes_.records.has(record); }
  // Says whether a new record of the tier has changed, as the row that has moved there had.
  void set_record(std::uint32_t record, bool changed) noexcept { changes_.records.set(record, changed); }
  // Forgets what has changed: the next snapshot takes all rows.
  void forget() { changes_ = {}; }

  // Checks that a snapshot with these options may begin. Throws std::runtime_error if one is being read,
  // std::invalid_argument if the id is not a new one or changes since then are not known.
  void check(const SnapshotOptions& options) const;
  // Begins a snapshot of the rows of memory and of `records` records of the tier. Throws std::bad_alloc; then nothing
  // has changed.
  void begin(const SnapshotOptions& options, std::uint32_t expired_before, std::uint64_t records);
  // Returns the snapshot of this id. Throws std::runtime_error if it is not being read.
  Snapshot& reading(std::uint32_t id) const;
  // Appends the next rows of memory of the snapshot that is being read; see `Snapshot::read`.
  bool read(RowBatch& batch) { return open_->read(*rows_, changes_.rows, batch); }
  // Returns whether a snapshot is being read.
  bool reading() const { return open_ != nullptr; }
  // Marks the snapshot that is being read, if any, as lost.
  void fail(const char* why) {
    if (open_) open_->fail(why);
  }
  // Ends the snapshot, read or not.
  void end() { open_.reset(); }
  // Throws std::runtime_error if a snapshot is being read: its rows must not be removed or cleared.
  void check_none() const;

  // Returns the id of the snapshot since which changes are known; 0 if they are unknown.
  std::uint32_t since() const { return changes_.since; }
  // Returns the bytes of marks.
  std::uint64_t memory_bytes() const { return changes_.rows.bytes() + changes_.records.bytes(); }

 private:
  RowStore* rows_;
  std::unique_ptr<Snapshot> open_;
  Changes changes_;
};

}  // namespace persia
