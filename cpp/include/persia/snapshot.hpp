// Snapshots of a shard's rows, read while the shard keeps changing them. The code calls a snapshot a cut.
//
// A snapshot starts a new dirty epoch. Before a row changes for the first time after it, its bytes are appended to a
// spill, unless the reader has passed it already. The reader reads the rows in order: those of an older epoch are
// unchanged since the snapshot, all others are in the spill or were added later.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "persia/layout.hpp"

namespace persia {

// Number of rows for which a reader locks the shard at a time. It may get up to as many more than requested.
inline constexpr std::uint64_t kRowsPerLock = 4096;

// Old rows by row number. A few stay in memory; the rest is in an unnamed file, in runs sorted by number. The reader
// proceeds from low to high numbers, so it reads each run once, in order. Not thread-safe: the shard's lock guards it.
class Spill {
 public:
  // Keeps up to `buffer_bytes` in memory, and briefly 64 KiB more. Creates the file in `directory` when needed.
  Spill(std::string directory, std::size_t stride, std::size_t buffer_bytes);
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;
  ~Spill();

  // Adds an old row. Throws std::runtime_error if the file cannot be written.
  void add(std::uint32_t number, const std::byte* row);
  struct Old {
    std::uint32_t number;
    const std::byte* row;
  };
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
  std::size_t record_;  // number, padded, and row
  std::size_t buffer_records_;
  int file_ = -1;
  std::uint64_t file_bytes_ = 0;
  std::vector<std::uint32_t> numbers_;  // of the rows in the buffer
  std::unique_ptr<std::byte[]> buffer_;
  std::vector<Run> runs_;
  std::vector<std::byte> taken_;
  std::vector<Old> old_;
};

struct CutOptions {
  std::uint32_t epoch = 1;  // of rows that change from the snapshot on
  std::uint32_t since = 0;  // leaves out rows that have not changed in this epoch or later
  std::string directory;    // of the spill
  std::size_t buffer_bytes = std::size_t{1} << 20;
  std::size_t evicted_limit = 0;  // ids of rows evicted from the snapshot on are remembered, so many at most
  bool live = false;              // rows as they are when they are read, instead: nothing is spilled
};

// A snapshot in work. The shard's lock guards it.
class Cut {
 public:
  // A snapshot of `rows` rows of `stride` bytes; `evicted` are the ids evicted since `CutOptions::since`.
  Cut(const CutOptions& options, std::uint64_t rows, std::size_t stride, std::vector<std::uint64_t> evicted);

  // Keeps a row before it changes. Does not throw: on failure the snapshot is lost and training continues.
  void keep(std::uint32_t number, const std::byte* row) noexcept {
    const auto* header = reinterpret_cast<const RowHeader*>(row);
    if (!live_ && number >= next_ && number < rows_ && wanted(*header) && failure_.empty()) spill_row(number, row);
  }
  // Marks the snapshot as lost.
  void fail(const std::string& why) noexcept;

  // Returns whether a row that is unchanged since the snapshot belongs to it.
  bool wanted(const RowHeader& row) const { return row.dirty_epoch >= since_ && (live_ || row.dirty_epoch < epoch_); }
  // Returns the number of the snapshot.
  std::uint32_t epoch() const { return epoch_; }
  // Returns the row number that the reader has reached.
  std::uint64_t next() const { return next_; }
  // Returns the number of rows when the snapshot began.
  std::uint64_t rows() const { return rows_; }
  // Notes that the reader has passed all rows below `end`. Returns the old ones among them; throws if the snapshot is
  // lost.
  const std::vector<Spill::Old>& pass(std::uint64_t end);
  // Returns the ids that were evicted before the snapshot.
  const std::vector<std::uint64_t>& evicted() const { return evicted_; }
  // Returns the bytes written to the file of old rows.
  std::uint64_t spilled_bytes() const { return spill_.file_bytes(); }

 private:
  void spill_row(std::uint32_t number, const std::byte* row) noexcept;

  std::uint32_t epoch_;
  std::uint32_t since_;
  bool live_;
  std::uint64_t rows_;
  std::uint64_t next_ = 0;
  Spill spill_;
  std::vector<std::uint64_t> evicted_;
  std::string failure_;
};

// Ids of the rows that were evicted since the start of an epoch; `since` is 0 while they are unknown.
struct Evictions {
  std::uint32_t since = 0;
  std::size_t limit = 0;
  std::vector<std::uint64_t> ids;

  // Adds an id. Does not throw: without memory, the ids become unknown.
  void add(std::uint64_t id) noexcept {
    if (since == 0) return;
    try {
      if (ids.size() < limit) return ids.push_back(id);
    } catch (const std::bad_alloc&) {
    }
    since = 0;
    ids = {};
  }
};

}  // namespace persia
