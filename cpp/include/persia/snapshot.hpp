// Snapshots of a shard's rows, read while the shard keeps changing them. The code calls a snapshot a cut.
//
// A snapshot starts a new set of changed rows. Before a row joins it, its bytes are appended to a spill, unless the
// reader has passed it already. The reader reads the rows in order: those not in the set are unchanged since the
// snapshot, all others are in the spill or were added later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace persia {

// Number of rows for which a reader locks the shard at a time. It may get up to as many more than requested.
inline constexpr std::uint64_t kRowsPerLock = 4096;

// The rows that have changed since a moment: one bit for each row that there was, and all rows added since.
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

// What has changed since the snapshot of number `since`; 0 while that is unknown. It is not in the region: a process
// that attaches to one does not know, and its next increment is a whole snapshot.
struct Changes {
  std::uint32_t since = 0;
  std::size_t limit = 0;
  std::vector<std::uint64_t> evicted;  // ids
  ChangedRows rows;                    // also read by the snapshot that began it, even if `since` is 0 by now
  ChangedRows records;                 // of rows on disk

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

// Old rows by row number. A few stay in memory; the rest is in an unnamed file, in runs sorted by number. The reader
// proceeds from low to high numbers, so it reads each run once, in order. Not thread-safe: the shard's lock guards it.
class Spill {
 public:
  // Keeps up to `buffer_bytes` in memory, and briefly 64 KiB more. Creates the file in `directory` when needed.
  Spill(std::string directory, std::size_t stride, std::size_t buffer_bytes);
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;
  ~Spill();

  // What is kept of a row beside its bytes.
  struct Tag {
    std::uint32_t number;
    std::uint32_t last_step;
  };
  struct Old {
    Tag tag;
    const std::byte* row;
  };
  // Adds an old row. Throws std::runtime_error if the file cannot be written.
  void add(Tag tag, const std::byte* row);
  // Moves all rows with a number below `end` out, sorted; they are valid until the next call.
  const std::vector<Old>& take(std::uint64_t end);

  // Returns the bytes written to the file.
  std::uint64_t file_bytes() const { return file_bytes_; }

 private:
  struct Run {
    std::uint64_t at;    // of its next record in the file
    std::uint64_t left;  // records
    std::uint32_t next;  // number of its next record
  };

  void flush();
  void copy_record(std::size_t i, std::byte* to) const;
  void open_file();
  void read_run(Run& run, std::uint64_t end);
  void write_all(const std::byte* data, std::size_t bytes);
  void read_all(std::uint64_t at, std::byte* data, std::size_t bytes) const;

  std::string directory_;
  std::size_t stride_;
  std::size_t record_;  // tag and row
  std::size_t buffer_records_;
  int file_ = -1;
  std::uint64_t file_bytes_ = 0;
  std::vector<Tag> tags_;  // of the rows in the buffer
  std::unique_ptr<std::byte[]> buffer_;
  std::vector<Run> runs_;
  std::vector<std::byte> taken_;
  std::vector<Old> old_;
};

struct CutOptions {
  std::uint32_t epoch = 1;  // number of the snapshot
  std::uint32_t since = 0;  // leaves out rows that have not changed since the snapshot of this number
  std::string directory;    // of the spill
  std::size_t buffer_bytes = std::size_t{1} << 20;
  std::size_t evicted_limit = 0;     // ids of rows evicted from the snapshot on are remembered, so many at most
  bool live = false;                 // rows as they are when they are read, instead: nothing is spilled
  std::uint32_t expired_before = 0;  // rows with lower stamps have left the table
};

// A snapshot in work. The shard's lock guards it.
class Cut {
 public:
  // A snapshot of `rows` rows of `stride` bytes. Takes what has changed before it out of `before`, unless it throws.
  Cut(const CutOptions& options, std::uint64_t rows, std::size_t stride, Changes& before);

  // Keeps a row of the snapshot before its first change. Does not throw: on failure the snapshot is lost and training
  // continues.
  void keep(Spill::Tag tag, const std::byte* row) noexcept {
    if (!live_ && tag.number >= next_ && changed_before(tag.number) && failure_.empty()) spill_row(tag, row);
  }
  // Marks the snapshot as lost.
  void fail(const std::string& why) noexcept;

  // Returns whether a row belongs to the snapshot and is to be read from its place; `now` is what has changed since.
  bool wanted(std::uint32_t number, const ChangedRows& now) const {
    return live_ ? changed_before(number) || now.has(number) : changed_before(number) && !now.has(number);
  }
  // Returns whether a row with this stamp had left the table when the snapshot began.
  bool had_expired(std::uint32_t stamp) const { return stamp < expired_before_; }
  // Returns the number of the snapshot.
  std::uint32_t epoch() const { return epoch_; }
  // Returns the row number that the reader has reached.
  std::uint64_t next() const { return next_; }
  // Returns whether a record that was live when the snapshot began belongs to it.
  bool wants_record(std::uint32_t record) const { return all_ || before_.records.has(record); }
  // Returns the number of rows when the snapshot began.
  std::uint64_t rows() const { return rows_; }
  // Notes that the reader has passed all rows below `end`. Returns the old ones among them; throws if the snapshot is
  // lost.
  const std::vector<Spill::Old>& pass(std::uint64_t end);
  // Returns the ids that were evicted before the snapshot.
  const std::vector<std::uint64_t>& evicted() const { return before_.evicted; }
  // Returns the bytes written to the file of old rows.
  std::uint64_t spilled_bytes() const { return spill_.file_bytes(); }

 private:
  void spill_row(Spill::Tag tag, const std::byte* row) noexcept;
  bool changed_before(std::uint32_t number) const { return all_ || before_.rows.has(number); }

  std::uint32_t epoch_;
  bool all_;
  bool live_;
  std::uint32_t expired_before_;
  std::uint64_t rows_;
  std::uint64_t next_ = 0;
  Spill spill_;
  std::string failure_;
  Changes before_;
};

}  // namespace persia
