// How rows move between memory and the tier. See tier_compaction.cpp and tier_recovery.cpp.
#include "persia/tier.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>

#include "persia/memory.hpp"

namespace persia {
namespace {

// Records that are looked at for each row that moves to the tier, while there is a segment to compact. A third of its
// records are dead at least, so this frees as many as come.
constexpr std::uint64_t kCompactedPerRow = 3;
constexpr std::uint64_t kLeastSegments = 16;

RowLog open_log(MemoryRows& memory, DiskReader& reader) {
  const TableConfig& config = memory.config;
  Header& header = memory.header;
  RowLog::Options options;
  options.path = config.tier.path + "." + std::to_string(header.shard);
  options.row_bytes = memory.store.stride();
  // A third of the records may be dead, and more while a snapshot reads them.
  const std::uint64_t total = total_of(config, header.shard), of_block = RowLog::block_records(options.row_bytes);
  options.max_records = std::min(std::max(2 * total, kLeastSegments * of_block), kMaxRows - header.capacity);
  options.segment_blocks = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(options.max_records / (of_block * kLeastSegments), 1, options.segment_blocks));
  options.keep = memory.store.in_file();
  if (config.files.attach) {
    options.id = header.tier.log;
    return RowLog::attach(options, header.tier.next_record, reader);
  }
  std::random_device random;
  options.id = (std::uint64_t{random()} << 32 | random()) | 1;
  header.tier.log = options.id;
  return RowLog::create(options, reader);
}

}  // namespace

TierCounts& TierCounts::operator+=(const TierCounts& other) {
  rows += other.rows;
  disk_bytes += other.disk_bytes;
  demoted += other.demoted;
  read += other.read;
  promoted += other.promoted;
  compacted += other.compacted;
  unreadable += other.unreadable;
  return *this;
}

Tier::Tier(MemoryRows& memory, DiskReader& reader)
    : memory_(&memory),
      header_(&memory.header),
      capacity_(total_of(memory.config, memory.header.shard)),
      log_(open_log(memory, reader)) {}

TierCounts Tier::counts() const {
  const TierState& t = header_->tier;
  const std::uint64_t unreadable = log_.set_aside_segments() + damaged_;
  return {log_.live_records(), log_.disk_bytes(), t.demoted, t.read, t.promoted, t.compacted, unreadable};
}

// The index may name records of other ids.
TierRow Tier::find(std::uint64_t id) {
  const std::uint32_t tag = Index::tag_of(hash_id(id));
  TierRow found;
  memory_->index.slots().find(tag, [&](std::uint32_t number) {
    if (store().in_memory(number)) return false;
    const std::uint32_t record = store().record_of(number);
    const std::byte* bytes = fetched_ == nullptr ? nullptr : fetched_->find(log_, record);
    if (bytes == nullptr) {
      bytes_.resize(std::max(bytes_.size(), log_.record_bytes()));
      log_.read({&record, 1}, bytes_.data());
      ++header_->tier.read;
      bytes = bytes_.data();
    }
    const TierRow row{record, checked_row(record, bytes), RowLog::last_step_in(bytes)};
    if (row.header().key() != id) return false;
    found = row;
    return true;
  });
  return found;
}

// The row in the bytes of a record that a request needs. Counts those that are damaged.
const std::byte* Tier::checked_row(std::uint32_t record, const std::byte* bytes) {
  try {
    return log_.row_in(record, bytes);
  } catch (const std::runtime_error&) {
    ++damaged_;
    throw;
  }
}

bool Tier::want(std::uint64_t id, FetchedRecords& wanted) const {
  bool any = false;
  memory_->index.slots().find(Index::tag_of(hash_id(id)), [&](std::uint32_t number) {
    if (!store().in_memory(number)) {
      wanted.want(log_, store().record_of(number));
      any = true;
    }
    return false;
  });
  return any;
}

void Tier::fetch(const Slice& slice, std::size_t from, std::size_t shards) {
  if (fetched_ != nullptr) return;
  ahead_ = {};
  for (std::size_t i = from; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != header_->shard) continue;
    if (memory_->index.find(id) == Index::kNone) want(id, ahead_);
  }
  const FetchedRecords::Pending all{&ahead_, &log_};
  FetchedRecords::read({&all, 1});
  header_->tier.read += ahead_.size();
  fetched_ = &ahead_;
}

void Tier::use(const FetchedRecords& fetched) {
  fetched_ = &fetched;
  header_->tier.read += fetched.size();
}

std::uint32_t Tier::stamp_of(const TierRow& stored) const {
  // Those of the tier are not renumbered.
  return std::min(stored.header().stamp, header_->clock);
}

const float* Tier::embedding(std::uint64_t id) {
  const TierRow stored = find(id);
  return present(stored) ? reinterpret_cast<const float*>(stored.row + sizeof(RowHeader)) : nullptr;
}

std::uint32_t Tier::promote(std::uint64_t id) {
  const std::uint32_t tag = Index::tag_of(hash_id(id));
  const auto on_disk = [&](std::uint32_t number) { return !store().in_memory(number); };
  if (memory_->index.slots().find(tag, on_disk) == Index::kNone) return Index::kNone;
  make_vacant();  // before the record is read, as this may move it
  const TierRow stored = find(id);
  if (stored.row == nullptr) return Index::kNone;
  if (!present(stored)) {
    drop(stored.record, id);
    return Index::kNone;
  }
  const std::uint32_t number = vacant_.back();
  std::byte* const to = store().row_bytes(number);  // but for the stamp, which comes last
  std::memcpy(to, stored.row, offsetof(RowHeader, stamp));
  crash_point();
  std::memcpy(to + sizeof(RowHeader), stored.row + sizeof(RowHeader), store().stride() - sizeof(RowHeader));
  store().set_last_step(number, stored.last_step);
  header_->tier.move_record = stored.record;
  barrier();
  header_->tier.move_row = std::uint64_t{number} + 1;
  barrier();
  if (!memory_->index.replace(id, store().number_of(stored.record), number)) throw store().damaged(number);
  barrier();
  store().row(number)->stamp = header_->clock;
  barrier();
  header_->tier.move_row = 0;
  barrier();
  memory_->changes.move(store().mark_of(store().number_of(stored.record)), number);
  vacant_.pop_back();
  log_.release(stored.record);
  ++header_->tier.promoted;
  return number;
}

void Tier::drop(std::uint32_t record, std::uint64_t id) {
  if (!memory_->index.erase(id, store().number_of(record))) throw store().damaged(store().number_of(record));
  log_.release(record);
  memory_->note_removed(store().number_of(record), id);
}

// Whatever may fail comes first: then nothing has changed.
void Tier::make_vacant() {
  if (!vacant_.empty()) return;
  vacant_.reserve(1);
  const auto vacate = [&](std::uint32_t number) {
    store().row(number)->stamp = kVacant;
    barrier();
    vacant_.push_back(number);
  };
  std::uint32_t number = memory_->expiry.reusable();
  if (number == Index::kNone && header_->rows_used < header_->capacity) {
    vacate(memory_->next_place());
    ++header_->rows_used;
    return;
  }
  const bool reused = number != Index::kNone;
  if (!reused) {
    number = memory_->eviction.front(store().stamps(), header_->clock);
    if (!memory_->expired(number)) return demote_or_make_room();
  }
  memory_->snapshots.before_change(number);
  const std::uint64_t id = store().row(number)->key();
  if (!memory_->index.erase(id, number)) throw store().damaged(number);
  memory_->note_removed(number, id);
  // With any stamp but these two it would come back, if a kill came now.
  const std::uint32_t before = store().row(number)->stamp;
  if (!reused) memory_->eviction.pop(store().stamps(), header_->clock);
  vacate(number);
  if (reused) memory_->eviction.touch(store().stamps(), header_->clock, number, before);
}

// If a kill comes before the stamp, the row is back.
void Tier::vacate(std::uint32_t number) {
  const std::uint64_t id = store().row(number)->key();
  if (vacant_.size() == vacant_.capacity()) vacant_.reserve(2 * vacant_.size() + 1);
  if (!memory_->index.erase(id, number)) throw store().damaged(number);
  memory_->note_removed(number, id);
  barrier();
  store().row(number)->stamp = kVacant;
  barrier();
  vacant_.push_back(number);
}

std::uint32_t Tier::acquire() {
  make_vacant();
  if (rows_total() >= capacity_) evict();
  return vacant_.back();
}

void Tier::publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp) {
  if (!acquired(number)) return;
  memory_->index.make_room(rows_total() + 1);
  memory_->index.insert(id, number);
  barrier();
  store().row(number)->stamp = stamp;
  barrier();
  vacant_.pop_back();
}

// Moves the least recently used rows from memory.
void Tier::demote() {
  struct Moving {
    std::uint32_t number, record, stamp;
  };
  std::vector<Moving> moving;
  const std::uint64_t most = std::clamp<std::uint64_t>(header_->capacity / kMovedShare, 1, block_records());
  moving.reserve(most);
  vacant_.reserve(vacant_.size() + most);
  try {
    while (moving.size() < most) {
      std::uint32_t number = memory_->eviction.front(store().stamps(), header_->clock);
      if (!moving.empty() && memory_->expired(number)) break;
      if (store().row(number)->stamp == header_->clock) {
        // All rows are of this request, which has more of them than memory: none is better than another.
        if (!moving.empty() && moving.front().stamp < header_->clock) break;
        number = hand_ = (hand_ + 1) % static_cast<std::uint32_t>(header_->rows_used);
        moving.push_back({number, append_to_log(store().row_bytes(number), store().last_step(number), header_->clock),
                          header_->clock});
        continue;
      }
      RowHeader& r = *store().row(number);
      moving.push_back({number, append_to_log(store().row_bytes(number), store().last_step(number), r.stamp), r.stamp});
      memory_->eviction.pop(store().stamps(), header_->clock);
      r.stamp = header_->clock;  // so that it is not found again
    }
    log_.flush();
  } catch (...) {
    for (const Moving& l : moving) store().row(l.number)->stamp = l.stamp;
    memory_->eviction.clear();
    throw;
  }
  header_->tier.next_record = log_.next();
  barrier();
  for (const Moving& l : moving) memory_->index.prefetch(store().row(l.number)->key());
  for (const Moving& l : moving) {
    RowHeader& r = *store().row(l.number);
    r.stamp = l.stamp;
    const bool changed = memory_->snapshots.changed(l.number);
    memory_->snapshots.before_change(l.number);
    header_->tier.move_record = l.record;
    barrier();
    header_->tier.move_row = std::uint64_t{l.number} + 1;
    barrier();
    if (!memory_->index.replace(r.key(), l.number, store().number_of(l.record))) throw store().damaged(l.number);
    barrier();
    r.stamp = kVacant;
    barrier();
    header_->tier.move_row = 0;
    barrier();
    log_.revive(l.record);
    memory_->snapshots.set_record(l.record, changed);
    memory_->changes.move(l.number, store().mark_of(store().number_of(l.record)));
    vacant_.push_back(l.number);
  }
  header_->tier.demoted += moving.size();
  to_compact_ = std::min(to_compact_ + kCompactedPerRow * moving.size(), kCompactedPerRow * block_records());
  compact();
}

// The same; if all records are in use, others come first. A snapshot that keeps them is lost, and training continues.
void Tier::demote_or_make_room() {
  const auto compact_until_room = [&] {
    while (log_.exhausted() && compact_block()) {
    }
  };
  try {
    return demote();
  } catch (const RegionFull&) {
    if (!log_.exhausted()) throw;
  }
  compact_until_room();
  if (log_.exhausted()) {
    log_.try_again();
    compact_until_room();
  }
  if (log_.exhausted() && memory_->snapshots.reading()) {
    memory_->snapshots.fail(
        "rows moved to disk until all records were in use, of which the snapshot kept those of rows that came "
        "back: save again, or raise the capacity of the table");
    end_snapshot();
    compact_until_room();
  }
  demote();
}

void Tier::append(const TierRow& stored, RowBatch& rows) const {
  store().append(stored.row, stored.last_step, rows);
  rows.stamps.back() = stamp_of(stored);
}

std::uint64_t Tier::export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows) {
  const std::uint64_t first = start - header_->capacity, end = log_.end_record();
  records_.clear();
  std::uint64_t record = first;
  for (; record < end && records_.size() < std::min(max_rows, kRowsPerLock); ++record) {
    if (log_.live(static_cast<std::uint32_t>(record))) records_.push_back(static_cast<std::uint32_t>(record));
  }
  read_records();
  for (std::size_t i = 0; i < records_.size(); ++i) {
    if (const TierRow stored = row(i); present(stored)) append(stored, rows);
  }
  return record < end ? header_->capacity + record : ~std::uint64_t{0};
}

void Tier::prepare_snapshot() {
  snapshot_ = log_.live_bits();
  snapshot_next_ = 0;
  snapshot_end_ = log_.end_record();
}

void Tier::begin_snapshot() noexcept {
  // Rows of memory that hold none are not in the snapshot, whatever comes there.
  for (const std::uint32_t number : vacant_) memory_->snapshots.skip(number);
  for (std::uint64_t record = 0; record < snapshot_end_; record += log_.segment_records()) {
    log_.pin(log_.segment_of(static_cast<std::uint32_t>(record)));
  }
}

// Appends rows of one segment.
bool Tier::read_snapshot(Snapshot& snapshot, RowBatch& rows) {
  std::uint64_t& next = snapshot_next_;
  if (next >= snapshot_end_) return false;
  const std::uint32_t segment = log_.segment_of(static_cast<std::uint32_t>(next));
  const std::uint64_t end = (std::uint64_t{segment} + 1) * log_.segment_records();
  records_.clear();
  while (next < end && records_.size() < kRowsPerLock) {
    const std::uint64_t bits = next / 64 < snapshot_.size() ? snapshot_[next / 64] >> (next % 64) : 0;
    next += bits == 0 ? 64 - next % 64 : static_cast<unsigned>(std::countr_zero(bits));
    if (bits == 0 || next >= end) continue;
    const auto record = static_cast<std::uint32_t>(next++);
    if (snapshot.wants_record(record)) records_.push_back(record);
  }
  next = std::min(next, end);
  try {
    read_records();
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const TierRow stored = row(i);
      if (snapshot.takes(stored.header().key(), stamp_of(stored))) append(stored, rows);
    }
  } catch (const std::exception& error) {
    snapshot.fail(error.what());  // These rows have been passed.
    throw;
  }
  if (next == end) log_.unpin(segment);
  return true;
}

void Tier::end_snapshot() {
  log_.unpin_all();
  log_.try_again();  // A disk may have been away for a while.
  snapshot_ = {};
  snapshot_next_ = snapshot_end_ = 0;
}

}  // namespace persia
