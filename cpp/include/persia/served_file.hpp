// An immutable file of rows that processes map and share: docs/reference/served-rows.md specifies it.
//
// Rows are sorted by the hash of their id, and a directory says where each range of hashes begins. So a search reads
// one place in the directory, in the ids and in the values, and opening the file reads its header only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "persia/memory.hpp"
#include "persia/mix.hpp"

namespace persia {

inline constexpr std::uint64_t kMaxServedDim = 65536;

// A file that is mapped for reading. Thread-safe. The file may be replaced or removed meanwhile (by name), but its
// bytes must not change.
class ServedFile {
 public:
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};

  // Throws std::runtime_error if the file cannot be read, is not of this format and version, or has another size than
  // its header says.
  explicit ServedFile(const std::string& path);
  ServedFile(const ServedFile&) = delete;
  ServedFile& operator=(const ServedFile&) = delete;
  ~ServedFile();

  std::size_t dim() const { return dim_; }
  std::uint64_t rows() const { return rows_; }
  const std::string& path() const { return path_; }
  // Returns the name of the table; may be empty.
  const std::string& name() const { return name_; }
  // Returns the ids of all rows, in the order of their hashes.
  std::span<const std::uint64_t> ids() const { return {ids_, static_cast<std::size_t>(rows_)}; }
  // Returns the values of a row, `dim` floats.
  const float* values(std::uint64_t row) const { return values_ + row * dim_; }

  // The rows begin ... end - 1 of one range of hashes.
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
  };
  // Begins to load what `range` reads.
  void prefetch(std::uint64_t hash) const { persia::prefetch(starts_ + bucket(hash)); }
  // Returns the rows among which those with this hash are, and begins to load their ids. Throws std::runtime_error if
  // the directory is damaged.
  Range range(std::uint64_t hash) const {
    const std::uint64_t at = bucket(hash);
    const Range found{starts_[at], starts_[at + 1]};
    if (found.begin > found.end || found.end > rows_) damaged(at);
    persia::prefetch(ids_ + found.begin);
    return found;
  }
  // Returns the row of an id; kNone if there is none.
  std::uint64_t find(std::uint64_t id, std::uint64_t hash, Range range) const;
  std::uint64_t find(std::uint64_t id) const {
    const std::uint64_t hash = hash_id(id);
    return find(id, hash, range(hash));
  }

  // Reads the whole file. Throws std::runtime_error if its bytes are not those that were written.
  void verify() const;

  struct Row {
    std::uint64_t id;
    const float* values;
  };
  // Calls its argument for each row, in the order of the hashes of their ids; the same rows each time.
  using Source = std::function<void(const std::function<void(Row)>&)>;
  // Writes a file and syncs it, under another name until it is complete. Replaces a file of that name. Throws
  // std::runtime_error if it cannot be written, and leaves nothing behind then.
  static void write(const std::string& path, const std::string& name, std::size_t dim, const Source& source);

 private:
  std::uint64_t bucket(std::uint64_t hash) const { return ((hash >> 32) * buckets_) >> 32; }
  [[noreturn]] void damaged(std::uint64_t bucket) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  std::string name_;
  std::size_t dim_ = 0;
  std::uint64_t rows_ = 0;
  std::uint64_t buckets_ = 0;
  std::uint32_t checksum_ = 0;
  const std::byte* mapping_ = nullptr;
  std::size_t bytes_ = 0;
  const std::uint64_t* starts_ = nullptr;
  const std::uint64_t* ids_ = nullptr;
  const float* values_ = nullptr;
};

}  // namespace persia
