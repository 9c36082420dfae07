// Rows on disk: a log-structured file of fixed-size records, one file per shard.
//
// Records are numbered by their place, so a number is all that an index has to keep of a row on disk. They are appended
// to blocks of 64 KiB, blocks fill segments, and a segment whose records are all dead is used again. Which records are
// live is known to the caller, whose index refers to them; the log keeps a bit of each, and counts them by segment.
//
// The file is a header of 64 KiB, then segments. A record is a checksum of its number and of all that follows, the
// step of the row's last update, and the row. Records lie densely within a block, and none crosses a block. Nothing in
// the file says which records exist, so that no write has to be ordered after another: `attach` is told.
//
// Reads and writes bypass the page cache (O_DIRECT), which would hold cold rows a second time. Nothing is synced: as
// the regions, the file survives the death of the process, not that of the machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "persia/disk_reader.hpp"

namespace persia {

// Not thread-safe: guarded by the lock of its shard, but for methods marked as free, which read only what never
// changes and may run while any other one does.
class RowLog {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFF;       // no record, or no segment
  static constexpr std::size_t kBlockBytes = 64 << 10;     // of a block, unless a record is larger
  static constexpr std::size_t kPage = 4096;               // unit of reads and writes
  static constexpr std::size_t kFileHeader = kBlockBytes;  // bytes before the first segment
  static constexpr std::size_t kRecordHeader = 8;          // checksum and last step

  struct Options {
    std::string path;
    std::uint64_t id = 0;              // written to the file, so that a region and its file find each other
    std::size_t row_bytes = 0;         // of a row as in memory: RowHeader, values, state
    std::uint64_t max_records = 0;     // numbers stay below; at least one segment
    std::size_t segment_blocks = 256;  // 16 MiB
    bool keep = false;                 // the file outlives the process; else it has no name
    double lock_seconds = 5.0;         // maximum wait for a process that still holds the file
  };

  // Records of a log, and the place for their bytes.
  struct Wanted {
    const RowLog* log;
    std::span<const std::uint32_t> records;
    std::byte* out;
  };

  // Creates the file and locks it (flock). With `keep` it replaces an existing one, else it only needs the directory.
  // Throws std::runtime_error if it cannot be created or is in use, RegionFull if the disk is full.
  static RowLog create(const Options& options, DiskReader& reader);
  // Opens and locks the file of a process before. `next` is what its `next()` was. Whatever lies behind is ignored: a
  // block that a kill has torn. No record is live until `revive`, which must have been called for all of them before
  // the first `append`. Throws std::runtime_error if the file is gone, shorter than its records, damaged, of another
  // table (id, row_bytes, segment_blocks), or in use.
  static RowLog attach(const Options& options, std::uint64_t next, DiskReader& reader);

  RowLog(RowLog&&) noexcept = default;
  RowLog& operator=(RowLog&&) noexcept = default;

  // Appends a row to the block in memory. Returns its record number, which may be read after `flush`. Throws RegionFull
  // if all numbers are in use; then the records since the last flush are gone, and nothing else has changed.
  enum class For { kRows, kCompaction };  // the last segment is left for compaction
  std::uint32_t append(std::uint32_t last_step, const std::byte* row, For what = For::kRows);
  // Writes what has been appended since the last call. Blocks. Space for a whole segment is allocated when it is
  // begun, before anything is written. Throws RegionFull if the disk is full, std::runtime_error if it fails; then the
  // records since the last flush are gone, and nothing else has changed.
  void flush();
  // Returns the number behind the last record flushed, which `attach` needs.
  std::uint64_t next() const { return next_; }

  // Notes that a record is in use: after `flush`, as soon as the index refers to it, and before the next `append`,
  // which may use its segment again; or after `attach`. No-op if it is live. Throws std::runtime_error if the file
  // ends before it.
  void revive(std::uint32_t record);
  // Notes that no record is in use, as just after `attach`, which is when it may be called. Keeps their bytes.
  void forget();
  // Notes that a record is not in use any more. No-op if it is not live.
  void release(std::uint32_t record);
  // Returns whether a record is in use.
  bool live(std::uint32_t record) const {
    return record / 64 < live_bits_.size() && (live_bits_[record / 64] >> (record % 64) & 1u) != 0;
  }
  // Returns the number of records in use.
  std::uint64_t live_records() const { return live_records_; }
  // Returns whether each record is in use, a bit each from the lowest on.
  const std::vector<std::uint64_t>& live_bits() const { return live_bits_; }

  // Reads records, in any order and repeatedly if so given, to out[i * record_bytes()]. Blocks. Those that share pages
  // or neighbour each other are read at once. Does not verify them. Throws std::runtime_error if the disk fails or the
  // file is too short. Free.
  void read(std::span<const std::uint32_t> records, std::byte* out) const;
  // The same for several logs: a disk is fast only with many reads in flight. An error does not name the file. Free.
  static void read(std::span<const Wanted> wanted);
  // Returns the row in the bytes of a record, which is aligned as they are, to 4 bytes at most. Throws
  // std::runtime_error if its checksum does not match. Free.
  const std::byte* row_in(std::uint32_t record, const std::byte* bytes) const;
  // Returns the step of the last update in the bytes of a record. Free.
  static std::uint32_t last_step_in(const std::byte* bytes);
  // Returns the bytes of a record, a multiple of 4. Free.
  std::size_t record_bytes() const { return record_bytes_; }
  // Returns the number of records of a block, of rows of a size. Free.
  static std::size_t block_records(std::size_t row_bytes);

  // Returns the segment of a record, the number of records of each, and the path. Free.
  std::uint32_t segment_of(std::uint32_t record) const { return record / segment_records_; }
  std::uint32_t segment_records() const { return segment_records_; }
  const std::string& path() const { return path_; }

  // Returns how often the records of a segment have been given up. A record that was read without the lock is what it
  // was as long as this has not changed.
  std::uint32_t generation(std::uint32_t segment) const { return segments_[segment].generation; }
  // Returns whether a segment is not being written to.
  bool full(std::uint32_t segment) const { return !segments_[segment].writing; }
  // Returns the number of records of a segment that are in use.
  std::uint32_t live_in(std::uint32_t segment) const { return segments_[segment].live; }
  // Returns the number behind the last record of the last segment.
  std::uint64_t end_record() const { return segments_.size() * std::uint64_t{segment_records_}; }
  // Returns the segment that is cheapest to compact, that is to append the live records of again: of those that are
  // full and neither pinned nor set aside, the one with the fewest. kNone unless more than a third of their records are
  // dead, or numbers run out and it frees some. `spared` is left out, unless numbers run out.
  std::uint32_t candidate(std::uint32_t spared = kNone) const;
  // Returns whether no more segment may be begun but by compaction.
  bool exhausted() const;
  // Returns the full segment with live records that was begun first and is not set aside, for eviction; kNone if there
  // is none. After `attach`, the order is that of their numbers.
  std::uint32_t oldest() const;

  // Leaves a segment that cannot be read to those who ask for one of its records, until it is begun again, or until
  // `try_again`.
  void set_aside(std::uint32_t segment) noexcept { segments_[segment].aside = true; }
  void try_again() noexcept;
  bool is_set_aside(std::uint32_t segment) const { return segments_[segment].aside; }
  // Returns the number of such segments with live records.
  std::uint64_t set_aside_segments() const;

  // Keeps a segment from being used again although no record in it is live: an open snapshot reads it. Counts.
  void pin(std::uint32_t segment) noexcept { ++segments_[segment].pins; }
  void unpin(std::uint32_t segment) noexcept;
  void unpin_all() noexcept;

  // Returns the bytes that the file occupies.
  std::uint64_t disk_bytes() const;
  // Returns the number of records flushed since `create` or `attach`.
  std::uint64_t written_records() const { return written_records_; }
  // Removes all records, but not pins, and frees the space of segments that are not pinned.
  void clear();

 private:
  struct FreeBytes {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  using Bytes = std::unique_ptr<std::byte, FreeBytes>;  // aligned to a page

  class File {
   public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    File& operator=(File&& other) noexcept {
      std::swap(fd_, other.fd_);
      return *this;
    }
    ~File();
    int get() const { return fd_; }

   private:
    int fd_ = -1;
  };

  struct Segment {
    std::uint64_t born = 0;
    std::uint32_t live = 0;
    std::uint32_t generation = 0;
    std::uint32_t pins = 0;
    bool writing = false;   // or there are records of it that have not been flushed
    bool has_space = true;  // on disk
    bool aside = false;     // it could not be read

    bool is_free() const { return !writing && live == 0 && pins == 0; }
  };

  // A block that is being filled.
  struct Block {
    std::uint32_t first;  // record
    std::size_t records;
    std::size_t flushed;  // of them
    Bytes bytes;
  };

  RowLog(const Options& options, DiskReader& reader);
  class Window;

  static Bytes page_aligned(std::size_t bytes);
  void open_named(int flags);
  void open_unnamed();
  void adopt(int fd);
  bool leave_direct() const;
  void lock(double seconds) const;
  void write_header(const Options& options);
  void check_header(const Options& options);
  void load_last_block();
  std::uint64_t offset_of(std::uint32_t record) const;
  std::uint64_t offset_of_segment(std::uint64_t segment) const { return kFileHeader + segment * segment_bytes_; }
  std::uint32_t checksum(std::uint32_t record, const std::byte* bytes) const;
  void begin_block(For what);
  void begin_segment(For what);
  std::size_t free_segments() const;
  std::uint64_t segments_left() const;
  void allocate(std::uint32_t segment);
  void write(const std::byte* bytes, std::size_t count, std::uint64_t offset) const;
  void write_new(const Block& block) const;
  void drop_unflushed() noexcept;
  void settle(std::uint32_t segment) noexcept;
  void punch(std::uint32_t segment) noexcept;
  void trim(std::uint32_t segment) noexcept;
  [[noreturn]] void fail(const std::string& what, int error) const;
  [[noreturn]] void fail_full(int error) const;

  std::string path_;
  DiskReader* reader_;
  File file_;
  std::size_t row_bytes_, record_bytes_, block_records_, block_bytes_, segment_bytes_;
  std::uint32_t segment_records_;
  std::uint64_t max_segments_;

  std::vector<Segment> segments_;
  std::vector<std::uint64_t> live_bits_;
  std::uint64_t live_records_ = 0;
  std::uint64_t written_records_ = 0;
  std::uint64_t born_ = 0;     // segments begun
  std::vector<Block> blocks_;  // with records that have not been flushed; the last one may have room
  Bytes spare_;                // memory of a block
  std::uint64_t head_ = 0;     // number behind the last record appended ...
  std::uint64_t next_ = 0;     // ... and behind the last one flushed
};

}  // namespace persia
