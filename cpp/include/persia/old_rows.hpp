// Rows as they were when a snapshot began, kept in memory and in an unnamed file until the snapshot is read.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace persia {

// Old rows by row number. A few stay in memory; the rest is in an unnamed file, in runs sorted by number. The reader
// proceeds from low to high numbers, so it reads each run once, in order. Not thread-safe: the shard's lock guards it.
class OldRows {
 public:
  // Keeps up to `buffer_bytes` in memory, and briefly 64 KiB more. Creates the file in `directory` when needed.
  OldRows(std::string directory, std::size_t stride, std::size_t buffer_bytes);
  OldRows(const OldRows&) = delete;
  OldRows& operator=(const OldRows&) = delete;
  ~OldRows();

  // What is kept of a row in addition to its bytes.
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

}  // namespace persia
