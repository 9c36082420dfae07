// The rows of a prediction server: read by many threads while one applies changes, over an optional file that is
// mapped. docs/decisions/0017-serving-rows.md explains why this is not the store of training.
//
// A row is never written where readers see it: its new values go to fresh memory, and one store of a pointer replaces
// the old ones, which are freed once no reader can hold them (`Epochs`). An index that is full is rebuilt next to the
// old one and replaced in the same way. So a lookup takes no lock, and waits for nothing.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "persia/epochs.hpp"
#include "persia/served_file.hpp"

namespace persia {

// Memory for the values of rows, in chunks that are never given back. Not thread-safe, but for `bytes`.
class RowMemory {
 public:
  explicit RowMemory(std::size_t dim) : bytes_per_row_(dim * sizeof(float)) {}

  // Returns memory for a row. Throws std::bad_alloc.
  float* take();
  // Takes the memory of a row back, for another one. Throws std::bad_alloc.
  void give(float* row) { free_.push_back(row); }
  // Returns the bytes of all chunks.
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  struct Delete {
    std::size_t alignment;
    void operator()(std::byte* chunk) const { ::operator delete(chunk, std::align_val_t(alignment)); }
  };

  std::size_t bytes_per_row_;
  std::atomic<std::uint64_t> bytes_{0};
  std::byte* next_ = nullptr;
  std::size_t left_ = 0;  // rows
  std::vector<std::unique_ptr<std::byte[], Delete>> chunks_;
  std::vector<float*> free_;
};

// Thread-safe. `lookup` never waits for the other calls; of those that change rows or read all of
// them, one runs at a time.
class ServedTable {
 public:
  // An empty table. Throws std::invalid_argument for a dim that is not within 1 ... 65536.
  explicit ServedTable(std::size_t dim);
  // The rows of a file, to which changes are kept in memory. Throws std::runtime_error as `ServedFile` does, and if the
  // file has another dim.
  ServedTable(std::size_t dim, const std::string& base);
  ServedTable(const ServedTable&) = delete;
  ServedTable& operator=(const ServedTable&) = delete;
  ~ServedTable();

  std::size_t dim() const { return dim_; }
  // Returns the file, or null.
  const ServedFile* base() const { return base_.get(); }

  // Writes the values of each id to `out`, `dim` floats each, zeros where there is no row, and whether there is one to
  // `found` unless that is null. Returns the number of ids with a row. Each row has the values of one `set`. Throws
  // std::runtime_error if the file's directory is damaged.
  std::uint64_t lookup(std::span<const std::uint64_t> ids, float* out, bool* found) const;

  // Inserts or overwrites rows, in order. Throws std::bad_alloc; then the first rows have been set.
  void set(std::span<const std::uint64_t> ids, const float* values);
  // Removes rows; returns how many there were.
  std::uint64_t remove(std::span<const std::uint64_t> ids);

  // Returns the number of rows.
  std::uint64_t size() const { return size_.load(std::memory_order_relaxed); }
  // Returns the bytes of rows and indices in this process alone, so without the file.
  std::uint64_t memory_bytes() const;
  // Returns the ids of all rows, in the order of their hashes.
  std::vector<std::uint64_t> ids() const;
  // Writes all rows as of one moment: see `ServedFile::write`. Changes wait meanwhile.
  void write_file(const std::string& path, const std::string& name) const;

 private:
  // `id` never changes once `values` is not null.
  struct Slot {
    std::atomic<std::uint64_t> id{0};
    std::atomic<const float*> values{nullptr};
  };
  // An open hash table with linear probing, at least a quarter of it empty.
  struct Index {
    explicit Index(unsigned bits) : shift(64 - bits), slots(std::make_unique<Slot[]>(std::size_t{1} << bits)) {}
    std::uint64_t count() const { return std::uint64_t{1} << (64 - shift); }
    std::uint64_t home(std::uint64_t hash) const { return hash >> shift; }

    unsigned shift;
    std::uint64_t used = 0;  // slots with an id; the writer's
    std::unique_ptr<Slot[]> slots;
  };
  struct Shard {
    std::atomic<Index*> index{nullptr};
  };
  struct Group;
  template <class T>
  struct Retired {
    std::uint64_t epoch;
    T object;
  };

  static constexpr std::size_t kShards = 64;
  static const float kGone;  // `values` of a slot whose row has been removed point here

  Shard& shard_of(std::uint64_t hash) { return shards_[hash % kShards]; }
  const Shard& shard_of(std::uint64_t hash) const { return shards_[hash % kShards]; }
  static Slot* find(const Index* index, std::uint64_t id, std::uint64_t hash);
  static const float* values_in(const Index* index, std::uint64_t id, std::uint64_t hash);
  const float* overlay(std::uint64_t id, std::uint64_t hash) const;
  void find_group(Group& group) const;

  bool hidden(std::uint64_t row) const {
    return (hidden_[row / 64].load(std::memory_order_acquire) >> (row % 64) & 1u) != 0;
  }
  std::uint64_t seen_row(std::uint64_t id) const;
  void hide(std::uint64_t row);
  void set_row(std::uint64_t id, const float* values);
  bool remove_row(std::uint64_t id);
  Index& with_capacity(Shard& shard);
  void retire(const float* row);
  void reclaim();
  std::vector<ServedFile::Row> overlay_rows() const;
  template <class Use>
  void for_each(std::span<const ServedFile::Row> overlay, Use&& use) const;

  std::size_t dim_;
  std::unique_ptr<const ServedFile> base_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> hidden_;  // one bit for each row of the file
  std::array<Shard, kShards> shards_;
  std::atomic<std::uint64_t> size_{0};
  std::atomic<std::uint64_t> index_bytes_{0};
  mutable Epochs epochs_;

  mutable std::mutex mutex_;  // of all that follows, and of changes
  RowMemory memory_;
  std::deque<Retired<float*>> retired_rows_;
  std::deque<Retired<std::unique_ptr<Index>>> retired_indices_;
};

}  // namespace persia
