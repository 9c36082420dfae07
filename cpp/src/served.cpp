#include "persia/served.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <stdexcept>

#include "persia/memory.hpp"
#include "persia/mix.hpp"

namespace persia {
namespace {

constexpr std::size_t kGroup = 128;                   // ids of a lookup whose cache lines are fetched at a time
constexpr std::size_t kRowsPerReclaim = 64;           // changed rows between two attempts to free memory
constexpr std::size_t kFirstRows = 64;                // of the first chunk; each further one doubles the memory, ...
constexpr std::size_t kChunk = std::size_t{2} << 20;  // ... up to this size, of a huge page
constexpr unsigned kFirstBits = 4;

void prefetch_row(const float* values, std::size_t dim) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(values);
  // The hardware follows a longer row by itself.
  const std::size_t most = std::min(dim * sizeof(float), 4 * kLine);
  for (std::size_t at = 0; at < most; at += kLine) prefetch(bytes + at);
}

}  // namespace

float* RowMemory::take() {
  if (!free_.empty()) {
    float* const row = free_.back();
    free_.pop_back();
    return row;
  }
  if (left_ == 0) {
    const std::size_t as_much = std::max<std::size_t>(bytes(), kFirstRows * bytes_per_row_);
    const std::size_t rows = std::max<std::size_t>(std::min(as_much, kChunk) / bytes_per_row_, 1);
    const std::size_t size = rows * bytes_per_row_;
    const std::size_t alignment = size > kChunk / 2 ? kChunk : kLine;
    auto& chunk = chunks_.emplace_back(nullptr, Delete{alignment});
    chunk.reset(static_cast<std::byte*>(::operator new(size, std::align_val_t(alignment))));
    if (alignment == kChunk) madvise(chunk.get(), size, MADV_HUGEPAGE);
    next_ = chunk.get();
    left_ = rows;
    bytes_.fetch_add(size, std::memory_order_relaxed);
  }
  float* const row = reinterpret_cast<float*>(next_);
  next_ += bytes_per_row_;
  --left_;
  return row;
}

const float ServedTable::kGone = 0;

ServedTable::ServedTable(std::size_t dim) : dim_(dim), memory_(dim) {
  if (dim < 1 || dim > kMaxServedDim) throw std::invalid_argument("dim must be within 1 ... 65536");
}

ServedTable::ServedTable(std::size_t dim, const std::string& base) : ServedTable(dim) {
  base_ = std::make_unique<const ServedFile>(base);
  if (base_->dim() != dim) {
    throw std::runtime_error(base + ": the rows have " + std::to_string(base_->dim()) + " values instead of " +
                             std::to_string(dim));
  }
  hidden_ = std::make_unique<std::atomic<std::uint64_t>[]>(base_->rows() / 64 + 1);
  size_ = base_->rows();
}

ServedTable::~ServedTable() {
  for (Shard& shard : shards_) delete shard.index.load();
}

// --- lookups -------------------------------------------------------------------------------------------------------

// The slot of an id; null if it has none.
ServedTable::Slot* ServedTable::find(const Index* index, std::uint64_t id, std::uint64_t hash) {
  if (index == nullptr) return nullptr;
  const std::uint64_t mask = index->count() - 1;
  for (std::uint64_t at = index->home(hash);; at = (at + 1) & mask) {
    Slot& slot = index->slots[at];
    if (slot.values.load(std::memory_order_acquire) == nullptr) return nullptr;
    if (slot.id.load(std::memory_order_relaxed) == id) return &slot;
  }
}

const float* ServedTable::values_in(const Index* index, std::uint64_t id, std::uint64_t hash) {
  const Slot* const slot = find(index, id, hash);
  return slot == nullptr ? nullptr : slot->values.load(std::memory_order_acquire);
}

const float* ServedTable::overlay(std::uint64_t id, std::uint64_t hash) const {
  return values_in(shard_of(hash).index.load(std::memory_order_acquire), id, hash);
}

struct ServedTable::Group {
  std::size_t count;
  const std::uint64_t* ids;
  std::uint64_t hash[kGroup];
  const Index* index[kGroup];
  const float* values[kGroup];
  ServedFile::Range range[kGroup];
};

// Each pass reads what the one before it has begun to load, so that the cache misses of a group overlap.
void ServedTable::find_group(Group& group) const {
  for (std::size_t i = 0; i < group.count; ++i) {
    const std::uint64_t hash = group.hash[i] = hash_id(group.ids[i]);
    group.index[i] = shard_of(hash).index.load(std::memory_order_acquire);
    if (group.index[i] != nullptr) prefetch(&group.index[i]->slots[group.index[i]->home(hash)]);
    if (base_) base_->prefetch(hash);
  }
  for (std::size_t i = 0; i < group.count; ++i) {
    group.values[i] = values_in(group.index[i], group.ids[i], group.hash[i]);
    if (group.values[i] == nullptr) {
      if (base_) group.range[i] = base_->range(group.hash[i]);
    } else {
      prefetch_row(group.values[i], dim_);
    }
  }
  if (!base_) return;
  for (std::size_t i = 0; i < group.count; ++i) {
    if (group.values[i] != nullptr) continue;
    const std::uint64_t row = base_->find(group.ids[i], group.hash[i], group.range[i]);
    if (row == ServedFile::kNone) continue;
    // A row is hidden after it has been set, so if it is, the search above may have come too early.
    group.values[i] = hidden(row) ? overlay(group.ids[i], group.hash[i]) : base_->values(row);
    if (group.values[i] != nullptr) prefetch_row(group.values[i], dim_);
  }
}

std::uint64_t ServedTable::lookup(std::span<const std::uint64_t> ids, float* out, bool* found) const {
  const Epochs::Reader reader(epochs_);
  std::uint64_t rows = 0;
  Group group;
  for (std::size_t start = 0; start < ids.size(); start += kGroup) {
    group.count = std::min(kGroup, ids.size() - start);
    group.ids = ids.data() + start;
    find_group(group);
    for (std::size_t i = 0; i < group.count; ++i, out += dim_) {
      const float* const values = group.values[i];
      const bool there = values != nullptr && values != &kGone;
      if (there) {
        copy_floats(out, values, dim_);
      } else {
        std::fill_n(out, dim_, 0.0f);
      }
      if (found != nullptr) found[start + i] = there;
      rows += there;
    }
  }
  return rows;
}

// --- changes -------------------------------------------------------------------------------------------------------

// Notes the old values of a row, before they are replaced.
void ServedTable::retire(const float* row) { retired_rows_.push_back({epochs_.current(), const_cast<float*>(row)}); }

// Frees what no reader can hold.
void ServedTable::reclaim() {
  if (retired_rows_.empty() && retired_indices_.empty()) return;
  epochs_.advance();
  const std::uint64_t oldest = epochs_.oldest();
  for (; !retired_rows_.empty() && retired_rows_.front().epoch < oldest; retired_rows_.pop_front()) {
    memory_.give(retired_rows_.front().object);
  }
  for (; !retired_indices_.empty() && retired_indices_.front().epoch < oldest; retired_indices_.pop_front()) {
    index_bytes_.fetch_sub(retired_indices_.front().object->count() * sizeof(Slot), std::memory_order_relaxed);
  }
}

// The index of a shard, with an empty slot to spare: if need be another one, of the rows that there are.
ServedTable::Index& ServedTable::with_capacity(Shard& shard) {
  Index* const old = shard.index.load(std::memory_order_relaxed);
  if (old != nullptr && (old->used + 1) * 4 <= old->count() * 3) return *old;
  std::uint64_t kept = 0;
  const auto keeps = [](const float* values) { return values != nullptr && values != &kGone; };
  for (std::uint64_t at = 0; old != nullptr && at < old->count(); ++at) {
    kept += keeps(old->slots[at].values.load(std::memory_order_relaxed));
  }
  unsigned bits = kFirstBits;
  while ((std::uint64_t{1} << bits) < 2 * (kept + 1)) ++bits;
  auto fresh = std::make_unique<Index>(bits);
  for (std::uint64_t at = 0; old != nullptr && at < old->count(); ++at) {
    const float* const values = old->slots[at].values.load(std::memory_order_relaxed);
    if (!keeps(values)) continue;
    const std::uint64_t id = old->slots[at].id.load(std::memory_order_relaxed);
    std::uint64_t to = fresh->home(hash_id(id));
    while (fresh->slots[to].values.load(std::memory_order_relaxed) != nullptr) to = (to + 1) & (fresh->count() - 1);
    fresh->slots[to].id.store(id, std::memory_order_relaxed);
    fresh->slots[to].values.store(values, std::memory_order_relaxed);
    ++fresh->used;
  }
  if (old != nullptr) retired_indices_.push_back({epochs_.current(), std::unique_ptr<Index>()});
  index_bytes_.fetch_add(fresh->count() * sizeof(Slot), std::memory_order_relaxed);
  shard.index.store(fresh.get(), std::memory_order_release);
  if (old != nullptr) retired_indices_.back().object.reset(old);
  return *fresh.release();
}

// The row of the file with this id; kNone if there is none that is seen.
std::uint64_t ServedTable::seen_row(std::uint64_t id) const {
  if (!base_) return ServedFile::kNone;
  const std::uint64_t row = base_->find(id);
  return row == ServedFile::kNone || hidden(row) ? ServedFile::kNone : row;
}

void ServedTable::hide(std::uint64_t row) {
  hidden_[row / 64].fetch_or(std::uint64_t{1} << (row % 64), std::memory_order_release);
}

void ServedTable::set_row(std::uint64_t id, const float* values) {
  const std::uint64_t hash = hash_id(id);
  Shard& shard = shard_of(hash);
  Slot* slot = find(shard.index.load(std::memory_order_relaxed), id, hash);
  std::uint64_t covered = ServedFile::kNone;
  if (slot == nullptr) {
    covered = seen_row(id);
    Index& index = with_capacity(shard);
    std::uint64_t at = index.home(hash);
    while (index.slots[at].values.load(std::memory_order_relaxed) != nullptr) at = (at + 1) & (index.count() - 1);
    slot = &index.slots[at];
    slot->id.store(id, std::memory_order_relaxed);
    ++index.used;
  }
  const float* const old = slot->values.load(std::memory_order_relaxed);
  const bool had = old != nullptr && old != &kGone;
  float* const row = memory_.take();
  copy_floats(row, values, dim_);
  if (had) retire(old);
  slot->values.store(row, std::memory_order_release);
  if (covered != ServedFile::kNone) {
    crash_point();  // A test looks for the row from here.
    hide(covered);  // After its successor can be found: see `find_group`.
  } else if (!had) {
    size_.fetch_add(1, std::memory_order_relaxed);
  }
}

bool ServedTable::remove_row(std::uint64_t id) {
  const std::uint64_t hash = hash_id(id);
  Slot* const slot = find(shard_of(hash).index.load(std::memory_order_relaxed), id, hash);
  if (slot != nullptr) {
    const float* const old = slot->values.load(std::memory_order_relaxed);
    if (old == &kGone) return false;
    retire(old);
    slot->values.store(&kGone, std::memory_order_release);
  } else {
    const std::uint64_t row = seen_row(id);
    if (row == ServedFile::kNone) return false;
    hide(row);
  }
  size_.fetch_sub(1, std::memory_order_relaxed);
  return true;
}

void ServedTable::set(std::span<const std::uint64_t> ids, const float* values) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i % kRowsPerReclaim == 0) reclaim();
    set_row(ids[i], values + i * dim_);
  }
}

std::uint64_t ServedTable::remove(std::span<const std::uint64_t> ids) {
  const std::lock_guard lock(mutex_);
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i % kRowsPerReclaim == 0) reclaim();
    removed += remove_row(ids[i]);
  }
  return removed;
}

// --- all rows ------------------------------------------------------------------------------------------------------

std::uint64_t ServedTable::memory_bytes() const {
  const std::uint64_t marks = base_ ? (base_->rows() / 64 + 1) * sizeof(std::uint64_t) : 0;
  return sizeof *this + memory_.bytes() + index_bytes_.load(std::memory_order_relaxed) + marks;
}

// Rows in memory, in the order of the hashes of their ids.
std::vector<ServedFile::Row> ServedTable::overlay_rows() const {
  std::vector<ServedFile::Row> rows;
  for (const Shard& shard : shards_) {
    const Index* const index = shard.index.load(std::memory_order_relaxed);
    for (std::uint64_t at = 0; index != nullptr && at < index->count(); ++at) {
      const float* const values = index->slots[at].values.load(std::memory_order_relaxed);
      if (values == nullptr || values == &kGone) continue;
      rows.push_back({index->slots[at].id.load(std::memory_order_relaxed), values});
    }
  }
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return hash_id(a.id) < hash_id(b.id); });
  return rows;
}

template <class Use>
void ServedTable::for_each(std::span<const ServedFile::Row> overlay, Use&& use) const {
  auto next = overlay.begin();
  for (std::uint64_t row = 0; base_ && row < base_->rows(); ++row) {
    if (hidden(row)) continue;
    const std::uint64_t id = base_->ids()[row];
    for (; next != overlay.end() && hash_id(next->id) < hash_id(id); ++next) use(*next);
    use(ServedFile::Row{id, base_->values(row)});
  }
  for (; next != overlay.end(); ++next) use(*next);
}

std::vector<std::uint64_t> ServedTable::ids() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> ids;
  ids.reserve(size());
  for_each(overlay_rows(), [&](const ServedFile::Row& row) { ids.push_back(row.id); });
  return ids;
}

void ServedTable::write_file(const std::string& path, const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const std::vector<ServedFile::Row> overlay = overlay_rows();
  ServedFile::write(path, name, dim_, [&](const auto& use) { for_each(overlay, use); });
}

}  // namespace persia
