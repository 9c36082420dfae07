// The rows of one shard: their bytes in its region, the memory behind them, and the undo slot.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "persia/eviction_queue.hpp"
#include "persia/half.hpp"
#include "persia/layout.hpp"
#include "persia/memory.hpp"
#include "persia/region.hpp"
#include "persia/table_config.hpp"

namespace persia {

// Whole rows, column by column. Values are float32, whatever the dtype of the table: reading is exact, and importing
// rounds to the nearest, within the bound.
struct RowBatch {
  std::vector<std::uint64_t> ids;
  std::vector<float> embeddings;  // [rows, dim]
  std::vector<float> states;      // [rows, state width]
  std::vector<std::uint32_t> update_counts;
  std::vector<std::uint32_t> last_steps;  // zeros, unless the table keeps them
  std::vector<std::uint32_t> stamps;
};

// Bytes by which the memory of a file grows at most.
inline constexpr std::size_t kFilePiece = std::size_t{256} << 10;

// A gradient of one row, [dim], and what else its update depends on.
struct RowUpdate {
  const float* gradient;
  float lr;
  std::uint32_t step;
  float* before;  // scratch memory: gets the row as it was, [dim + state width]
};

// Not thread-safe: guarded by the lock of its shard.
//
// A number below the capacity of memory is a row of memory. Numbers from there on are records of the tier, so that the
// index refers to both alike.
class RowStore {
 public:
  // Creates the region of shard number `shard`, or attaches to its file. A new region counts as one only after
  // `complete`. Throws as `Store::create_table` does. `config` and `optimizer` must outlive the store.
  RowStore(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard);
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // Marks a new region as complete, and notes this process as its owner.
  void complete();
  // Returns the header of the region.
  Header& header() const { return *header_; }
  // Returns the offsets of the region's sections.
  const Layout& layout() const { return layout_; }
  // Returns a section of the region, by its offset.
  std::byte* section(std::size_t offset) const { return region_.base() + offset; }
  // Returns the counters of the admission sketch.
  std::uint16_t* sketch() const { return reinterpret_cast<std::uint16_t*>(section(layout_.sketch)); }
  // Returns whether the region is a file, which outlives the process.
  bool in_file() const { return region_.is_file(); }
  // Returns the name of the region or, without a file, of the table, for messages.
  std::string where() const;
  // Returns the error of a row that the index does not have.
  std::runtime_error damaged(std::uint32_t number) const;

  // Returns the first byte of a row.
  std::byte* row_bytes(std::uint32_t number) const { return rows_ + std::size_t{number} * stride_; }
  // Returns the header of a row.
  RowHeader* row(std::uint32_t number) const { return reinterpret_cast<RowHeader*>(row_bytes(number)); }
  // Returns the words of a row's embedding; floats, if its dtype is float32.
  float* embedding(std::uint32_t number) const {
    return reinterpret_cast<float*>(row_bytes(number) + sizeof(RowHeader));
  }
  // Returns the words of a row's optimizer state; floats, if its dtype is float32.
  float* state(std::uint32_t number) const { return embedding(number) + words_; }
  // Returns the number of values of an embedding, the words that they occupy, and the bytes of a row.
  std::size_t dim() const { return dim_; }
  std::size_t words() const { return words_; }
  std::size_t stride() const { return stride_; }
  // Returns the stamps of all rows.
  Stamps stamps() const { return {rows_, stride_, header_->rows_used}; }
  // Returns whether the table has a tier.
  bool tiered() const { return tiered_; }
  // Returns whether a row of memory holds none, as its row has moved to the tier.
  bool vacant(std::uint32_t number) const { return tiered_ && row(number)->stamp == kVacant; }

  // Returns whether a number is a row of memory, not a record of the tier.
  bool in_memory(std::uint32_t number) const { return number < capacity_; }
  // Returns the number of a record of the tier.
  std::uint32_t number_of(std::uint32_t record) const { return static_cast<std::uint32_t>(capacity_ + record); }
  // Returns the record of the tier that a number stands for.
  std::uint32_t record_of(std::uint32_t number) const { return static_cast<std::uint32_t>(number - capacity_); }
  // Returns the position of a number among marks, of which those of records begin in a word of their own.
  std::uint64_t mark_of(std::uint32_t number) const {
    return in_memory(number) ? number : align_up(capacity_, 64) + record_of(number);
  }

  // Returns the step of a row's last change; 0 if the table does not keep it.
  std::uint32_t last_step(std::uint32_t number) const {
    return header_->keeps_last_steps != 0 ? last_steps()[number] : 0;
  }
  // Sets it, if the table keeps it.
  void set_last_step(std::uint32_t number, std::uint32_t step) {
    if (header_->keeps_last_steps != 0) last_steps()[number] = step;
  }
  // Returns the last steps of all rows, in use if the table keeps them.
  std::uint32_t* last_steps() const { return reinterpret_cast<std::uint32_t*>(section(layout_.last_steps)); }
  // Keeps last steps from now on. Throws RegionFull.
  void keep_last_steps();

  // Writes the first embedding and state of an id.
  void initialize(std::uint32_t number, std::uint64_t id);
  // Overwrites embedding and state, rounded to the nearest. 16-bit values stay within the bound.
  void write(std::uint32_t number, const float* embedding, const float* state);
  // Updates embedding and state by a gradient, and returns whether it has: if a new value would not be finite, the
  // row stays as it was.
  bool update(std::uint32_t number, const RowUpdate& update) {
    if (values_.narrow()) return update_narrow(number, update);
    return optimizer_->apply(
        {embedding(number), state(number), update.gradient, dim_, update.lr, row(number)->update_count, update.before});
  }
  // Reads the values in the bytes of a row, of memory or of the tier. The state may be empty.
  void read_embedding(const std::byte* row, float* embedding) const;
  void read_state(const std::byte* row, float* state) const;
  // Appends the row in these bytes.
  void append(const std::byte* row, std::uint32_t last_step, RowBatch& rows) const;
  // Appends a row of memory.
  void append(std::uint32_t number, RowBatch& rows) const { append(row_bytes(number), last_step(number), rows); }

  // Keeps a row's bytes in the undo slot of a durable table, until `drop_undo`.
  void save_undo(std::uint32_t number) {
    if (header_->durable) write_undo(number);
  }
  // Gives up the undo slot: the row is complete.
  void drop_undo() {
    if (header_->durable) erase_undo();
  }
  // Rolls back the row that a killed process was writing. Returns whether there was one.
  bool roll_back();

  // Gives the place of a row, which is removed, to the last row, and drops the last place.
  void move_last_to(std::uint32_t number);
  // Completes the move that a killed process was making.
  void finish_removal();
  // Frees the memory behind the rows, but for some rows more.
  void release_unused();

  // Backs memory for one row more, a piece at a time. Throws RegionFull.
  void back_next_row() {
    const bool few = header_->rows_used + rows_ahead_ >= header_->rows_backed;
    if (few && header_->rows_backed < header_->capacity) back_rows();
  }
  // Backs a part of the region in which nothing lies yet. Throws RegionFull; then none of it has memory, as others may
  // need less.
  void back(std::size_t offset, std::size_t bytes) const;
  // Returns by how many bytes to ask for a piece before it is needed. All shards of a table fill alike, so each asks
  // at another time, and no request waits for the pieces of all. Pieces of files are small, and must not be refused
  // before they are needed.
  std::size_t ahead(std::size_t piece) const { return in_file() ? 0 : piece * header_->shard / header_->shards; }
  // Returns the bytes of the header, the undo slot, the admission sketch, rows and last steps in use.
  std::uint64_t memory_bytes() const;
  // Removes all rows, frees their memory, and clears the admission sketch. The index must be cleared next.
  void clear();

 private:
  void open_region();
  void format();
  void check_identity() const;
  void check_counts() const;
  void back_all();
  void back_rows();
  void write_undo(std::uint32_t number);
  void erase_undo();
  bool update_narrow(std::uint32_t number, const RowUpdate& update);

  const TableConfig* config_;
  const Optimizer* optimizer_;
  ValueCodec values_;
  ValueCodec states_;
  std::uint32_t shard_;
  Layout layout_;
  Region region_;
  std::uint64_t rows_ahead_ = 0;  // with fewer unused rows that have memory than these, more get it
  std::vector<float> scratch_;    // embedding and state of a row, if they have 16 bits
  // Each lookup reads these: they share a cache line. The headers of a table's regions lie alike, and so compete for
  // the same few lines of the cache.
  alignas(kLine) bool tiered_;
  std::size_t dim_;
  std::size_t words_;
  std::size_t stride_;
  std::uint64_t capacity_ = 0;  // that of the header
  Header* header_;
  std::byte* rows_;
};

}  // namespace persia
