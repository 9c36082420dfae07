#include "persia/row_index.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "persia/memory.hpp"

namespace persia {
namespace {

// Slots of a growing index that get memory ahead of growth, for each row that still fits. Between two growths there are
// 1.7 such slots for each row that comes, so this begins past halfway, and the last ones have memory in time.
constexpr std::uint64_t kAheadSlots = 4;

}  // namespace

RowIndex::RowIndex(RowStore& rows, const TableConfig& config) : rows_(&rows) {
  Header& header = rows.header();
  const Layout& layout = rows.layout();
  if (!config.files.attach) {
    header.index_slots = std::min(Index::kFirstSlots, layout.max_slots);
    back_slots(header.index_slots + kIndexTail);
  }
  slots_ = Index(reinterpret_cast<std::uint64_t*>(rows.section(layout.index)), header.index_slots, layout.max_slots,
                 header.index_old_slots, header.index_frontier, config.tiered() ? Index::kEighth : Index::kThird);
}

std::uint32_t RowIndex::find(std::uint64_t id) const {
  return slots_.find(Index::tag_of(hash_id(id)),
                     [&](std::uint32_t number) { return rows_->in_memory(number) && rows_->row(number)->key() == id; });
}

std::uint32_t RowIndex::tag_of_row(std::uint32_t number) const {
  const Header& header = rows_->header();
  const std::uint64_t hash = hash_id(rows_->row(number)->key());
  if (shard_of_hash(hash, header.shards) != header.shard) {
    throw std::runtime_error(rows_->where() + ": row " + std::to_string(number) +
                             " belongs to another shard, so its rows are damaged. Remove it with `persia cluster "
                             "regions --clean`, and go on from a checkpoint");
  }
  crash_point();
  return Index::tag_of(hash);
}

void RowIndex::make_room(std::uint64_t rows) {
  back_slots_ahead(rows);
  if (!slots_.full(rows)) return;
  mark_busy();
  while (move_slots()) {  // Growth has ended long ago, unless ids share hashes.
  }
  slots_.grow();
  Header& header = rows_->header();
  barrier();
  header.index_old_slots = slots_.old_slots();
  header.index_frontier = slots_.frontier();
  barrier();
  header.index_slots = slots_.slot_count();
  barrier();
}

// Grows by a step. Returns whether there are more.
bool RowIndex::move_slots() {
  if (!slots_.growing()) return false;
  const bool moved = slots_.move(Index::kMoves);
  Header& header = rows_->header();
  barrier();
  header.index_frontier = slots_.frontier();
  header.index_old_slots = slots_.old_slots();
  return moved && slots_.growing();
}

// Memory for this number of slots, the tail included; published when it is there.
void RowIndex::back_slots(std::uint64_t slots) {
  constexpr std::size_t size = sizeof(std::uint64_t);
  Header& header = rows_->header();
  rows_->back(rows_->layout().index + header.index_backed * size, (slots - header.index_backed) * size);
  barrier();
  header.index_backed = slots;
  barrier();
}

// Room for the slots of the next growth, piece by piece while rows come: growth uses the last of them first.
void RowIndex::back_slots_ahead(std::uint64_t rows) {
  const Header& header = rows_->header();
  const std::uint64_t needed = slots_.grown() + kIndexTail;
  while (header.index_backed < needed) {
    const std::uint64_t missing = needed - header.index_backed;
    const std::size_t bytes = rows_->in_file() ? kFilePiece : kHugePage;
    if (missing + rows_->ahead(bytes) / sizeof(std::uint64_t) <= kAheadSlots * slots_.room(rows)) return;
    back_slots(header.index_backed + std::min<std::uint64_t>(missing, bytes / sizeof(std::uint64_t)));
  }
}

void RowIndex::rebuild() {
  Header& header = rows_->header();
  header.busy |= kIndexBusy;
  barrier();
  slots_.build(header.rows_used, [&](std::uint64_t number) { return tag_of_row(static_cast<std::uint32_t>(number)); });
  barrier();
  header.index_old_slots = 0;
  header.index_frontier = 0;
}

void RowIndex::rebuild(std::vector<std::uint64_t>& slots) {
  Header& header = rows_->header();
  header.busy |= kIndexBusy;
  barrier();
  slots_.build(slots);
  barrier();
  header.index_old_slots = 0;
  header.index_frontier = 0;
}

void RowIndex::clear() {
  slots_.clear();
  rows_->header().index_old_slots = 0;
  rows_->header().index_frontier = 0;
}

}  // namespace persia
