// The index of a shard in its region: the memory of its slots, growth, and repair after a kill.
#pragma once
#include <cstdint>
#include <vector>

#include "persia/index.hpp"
#include "persia/mix.hpp"
#include "persia/row_store.hpp"

namespace persia {

// Not thread-safe: guarded by the lock of its shard. While it changes, the region is marked as `kIndexBusy`, so that
// whoever attaches after a kill rebuilds it.
class RowIndex {
 public:
  // Creates the index of a new region, or attaches to that of an existing one. Throws RegionFull. `rows` must outlive
  // it.
  RowIndex(RowStore& rows, const TableConfig& config);
  RowIndex(const RowIndex&) = delete;
  RowIndex& operator=(const RowIndex&) = delete;

  // Returns the slots, for searches.
  const Index& slots() const { return slots_; }
  // Returns the row of memory of an id; kNone if there is none.
  std::uint32_t find(std::uint64_t id) const;
  // Begins to load the slots of an id.
  void prefetch(std::uint64_t id) const { slots_.prefetch(slots_.home(Index::tag_of(hash_id(id)))); }
  // Returns the tag of a row of memory. Throws std::runtime_error if its id belongs to another shard.
  std::uint32_t tag_of_row(std::uint32_t number) const;

  // Marks the index as being changed, for whoever attaches after a kill.
  void mark_busy() {
    Header& header = rows_->header();
    if ((header.busy & kIndexBusy) != 0) return;
    header.busy |= kIndexBusy;
    barrier();
  }
  // Prepares an insertion that makes `rows` rows: begins to grow if there is no room. Throws RegionFull; then nothing
  // has changed.
  void make_room(std::uint64_t rows);
  // Inserts a number, and continues growth by a step. Throws std::runtime_error if thousands of ids share one hash.
  void insert(std::uint64_t id, std::uint32_t number) {
    mark_busy();
    move_slots();
    slots_.insert(Index::tag_of(hash_id(id)), number);
  }
  // Erases a number. Returns false if it is not there.
  bool erase(std::uint64_t id, std::uint32_t number) {
    mark_busy();
    return slots_.erase(Index::tag_of(hash_id(id)), number);
  }
  // Replaces the number of an id by another, with one store. Returns false if it is not there.
  bool replace(std::uint64_t id, std::uint32_t number, std::uint32_t by) {
    return slots_.replace(Index::tag_of(hash_id(id)), number, by);
  }

  // Rebuilds the index from the rows of memory.
  void rebuild();
  // Rebuilds it from slots (tag << 32 | number), in any order.
  void rebuild(std::vector<std::uint64_t>& slots);
  // Zeroes what a kill may have left behind the slots, at the end of a recovery.
  void clear_behind() { slots_.clear_behind(rows_->in_file() ? rows_->header().index_backed : 0); }
  // Removes all numbers.
  void clear();
  // Returns the bytes of slots in use.
  std::uint64_t memory_bytes() const { return rows_->header().index_slots * sizeof(std::uint64_t); }

 private:
  bool move_slots();
  void back_slots(std::uint64_t slots);
  void back_slots_ahead(std::uint64_t rows);

  RowStore* rows_;
  alignas(kLine) Index slots_;  // for each lookup one line
};

}  // namespace persia
