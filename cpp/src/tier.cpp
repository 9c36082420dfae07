// Rows on disk: how they leave memory and come back. See tier_compaction.cpp and tier_recovery.cpp.
//
// The index refers to rows of memory and to records on disk alike: numbers from the capacity of memory on are records.
// So a row moves by one store, of its other number to its slot. Before it, the new place is complete: the row's record
// is in the file, or its bytes are in a vacant row of memory. After it, the old place is given up: the row of memory is
// marked vacant, or the record counts as dead. `Header::cold` says which row is moving, so that whoever attaches
// completes what is left of that. The slots of cold rows are nowhere else: no step of the index loses one (index.hpp).
#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>

#include "persia/memory.hpp"
#include "persia/shard.hpp"

namespace persia {
namespace {

// Records that are looked at for each row that leaves memory, while there is a segment to compact. A third of its
// records are dead at least, so this frees as many as come.
constexpr std::uint64_t kCompactedPerRow = 3;
constexpr std::uint64_t kLeastSegments = 16;

}  // namespace

TierCounts& TierCounts::operator+=(const TierCounts& other) {
  rows += other.rows;
  disk_bytes += other.disk_bytes;
  spilled += other.spilled;
  read += other.read;
  promoted += other.promoted;
  compacted += other.compacted;
  unreadable += other.unreadable;
  return *this;
}

RowLog::Wanted FetchedRecords::prepare(const RowLog& log) {
  std::sort(wanted_.begin(), wanted_.end());
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
  records_.resize(wanted_.size());
  std::transform(wanted_.begin(), wanted_.end(), records_.begin(), [](const auto& wanted) { return wanted.first; });
  bytes_.resize(records_.size() * log.record_bytes());
  return {&log, records_, bytes_.data()};
}

void FetchedRecords::read(std::span<const Pending> pending) {
  std::vector<RowLog::Wanted> wanted;
  for (const auto& [records, log] : pending) {
    if (!records->empty()) wanted.push_back(records->prepare(*log));
  }
  try {
    return RowLog::read(wanted);
  } catch (const std::runtime_error&) {
    // A file may have been cleared meanwhile: that is no reason to lose what the others have.
  }
  for (const auto& [records, log] : pending) {
    try {
      log->read(records->records_, records->bytes_.data());
    } catch (const std::runtime_error&) {
      records->records_.clear();  // Whoever needs one of them reads it, and reports.
    }
  }
}

const std::byte* FetchedRecords::find(const RowLog& log, std::uint32_t record) const {
  const auto at = std::lower_bound(records_.begin(), records_.end(), record);
  if (at == records_.end() || *at != record) return nullptr;
  const auto i = static_cast<std::size_t>(at - records_.begin());
  if (wanted_[i].second != log.generation(log.segment_of(record))) return nullptr;
  return bytes_.data() + i * log.record_bytes();
}

void Shard::open_tier(DiskReader* reader) {
  if (config_->tier.path.empty()) return;
  RowLog::Options options;
  options.path = config_->tier.path + "." + std::to_string(header_->shard);
  options.row_bytes = rows_.stride();
  // A third of the records may be dead, and more while a snapshot reads them.
  const std::uint64_t total = total_of(*config_, header_->shard), of_block = RowLog::block_records(rows_.stride());
  options.max_records = std::min(std::max(2 * total, kLeastSegments * of_block), kMaxRows - header_->capacity);
  options.segment_blocks = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(options.max_records / (of_block * kLeastSegments), 1, options.segment_blocks));
  options.keep = rows_.in_file();
  if (config_->files.attach) {
    options.id = header_->cold.log;
    tier_ = std::make_unique<Tier>(RowLog::attach(options, header_->cold.next_record, *reader), total);
    return;
  }
  std::random_device random;
  options.id = (std::uint64_t{random()} << 32 | random()) | 1;
  header_->cold.log = options.id;
  tier_ = std::make_unique<Tier>(RowLog::create(options, *reader), total);
}

// The place of an id on disk; the index may name records of other ids.
Shard::ColdRow Shard::find_cold(std::uint64_t id) {
  const std::uint32_t tag = Index::tag_of(hash_id(id));
  ColdRow found;
  index_.slots().find(tag, [&](std::uint32_t number) {
    if (rows_.in_memory(number)) return false;
    const std::uint32_t record = rows_.record_of(number);
    const std::byte* bytes = tier_->fetched == nullptr ? nullptr : tier_->fetched->find(tier_->log, record);
    if (bytes == nullptr) {
      tier_->bytes.resize(std::max(tier_->bytes.size(), tier_->log.record_bytes()));
      tier_->log.read({&record, 1}, tier_->bytes.data());
      ++header_->cold.read;
      bytes = tier_->bytes.data();
    }
    const std::byte* const row = row_of_request(record, bytes);
    if (reinterpret_cast<const RowHeader*>(row)->key() != id) return false;
    found = {record, row, RowLog::last_step_in(bytes)};
    return true;
  });
  return found;
}

// The row in the bytes of a record that a request needs. Counts those that are damaged.
const std::byte* Shard::row_of_request(std::uint32_t record, const std::byte* bytes) {
  try {
    return tier_->log.row_in(record, bytes);
  } catch (const std::runtime_error&) {
    ++tier_->damaged;
    throw;
  }
}

// Wants all records that may be those of an id. Returns whether there are any.
bool Shard::want_cold(std::uint64_t id, FetchedRecords& wanted) const {
  bool any = false;
  index_.slots().find(Index::tag_of(hash_id(id)), [&](std::uint32_t number) {
    if (!rows_.in_memory(number)) {
      wanted.want(tier_->log, rows_.record_of(number));
      any = true;
    }
    return false;
  });
  return any;
}

// Reads what the ids of a slice may need from disk, from the i-th on, in one batch.
void Shard::fetch_cold(const Slice& slice, std::size_t from, std::size_t shards) {
  if (tier_->fetched != nullptr) return;
  tier_->ahead = {};
  for (std::size_t i = from; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != header_->shard) continue;
    if (index_.find(id) == Index::kNone) want_cold(id, tier_->ahead);
  }
  const FetchedRecords::Pending all{&tier_->ahead, &tier_->log};
  FetchedRecords::read({&all, 1});
  header_->cold.read += tier_->ahead.size();
  tier_->fetched = &tier_->ahead;
}

std::uint32_t Shard::stamp_of(const ColdRow& cold) const {
  // Those of rows on disk are not numbered anew.
  return std::min(reinterpret_cast<const RowHeader*>(cold.row)->stamp, header_->clock);
}

// Whether there is such a row, and it has not left.
bool Shard::present(const ColdRow& cold) const { return cold.row != nullptr && !expiry_.expired(stamp_of(cold)); }

// The values of a row on disk, valid until the next record is read; nullptr if there is none.
const float* Shard::cold_values(std::uint64_t id) {
  const ColdRow cold = find_cold(id);
  return present(cold) ? reinterpret_cast<const float*>(cold.row + sizeof(RowHeader)) : nullptr;
}

// Brings the row of an id back to memory. Returns its number, or none.
std::uint32_t Shard::promote(std::uint64_t id) {
  const std::uint32_t tag = Index::tag_of(hash_id(id));
  const auto on_disk = [&](std::uint32_t number) { return !rows_.in_memory(number); };
  if (index_.slots().find(tag, on_disk) == Index::kNone) return Index::kNone;
  make_vacant();  // before the record is read, as this may move it
  const ColdRow cold = find_cold(id);
  if (cold.row == nullptr) return Index::kNone;
  if (!present(cold)) {
    drop_cold(cold.record, id);
    return Index::kNone;
  }
  const std::uint32_t number = tier_->vacant.back();
  std::byte* const to = rows_.row_bytes(number);  // but for the stamp, which comes last
  std::memcpy(to, cold.row, offsetof(RowHeader, stamp));
  crash_point();
  std::memcpy(to + sizeof(RowHeader), cold.row + sizeof(RowHeader), rows_.stride() - sizeof(RowHeader));
  rows_.set_last_step(number, cold.last_step);
  header_->cold.move_record = cold.record;
  barrier();
  header_->cold.move_row = std::uint64_t{number} + 1;
  barrier();
  if (!index_.replace(id, rows_.number_of(cold.record), number)) throw rows_.damaged(number);
  barrier();
  rows_.row(number)->stamp = header_->clock;
  barrier();
  header_->cold.move_row = 0;
  barrier();
  changefeed_.move(rows_.mark_of(rows_.number_of(cold.record)), number);
  tier_->vacant.pop_back();
  tier_->log.release(cold.record);
  ++header_->cold.promoted;
  return number;
}

// Brings all rows of a push back before its first gradient is applied: if that fails, nothing of it has been.
void Shard::promote_all(const Slice& slice, std::size_t shards, const Push& push) {
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != header_->shard) continue;
    if (begun_push_ == PushState::kNone) begin_push(push);
    if (begun_push_ == PushState::kDuplicate) return;
    if (index_.find(id) != Index::kNone) continue;
    fetch_cold(slice, i, shards);
    promote(id);
  }
}

// A row on disk that is not needed any more.
void Shard::drop_cold(std::uint32_t record, std::uint64_t id) {
  if (!index_.erase(id, rows_.number_of(record))) throw rows_.damaged(rows_.number_of(record));
  tier_->log.release(record);
  snapshots_.evict(id);
  changefeed_.remove(rows_.mark_of(rows_.number_of(record)), id);
}

// Whatever may fail comes first: then nothing has changed.
void Shard::make_vacant() {
  if (!tier_->vacant.empty()) return;
  tier_->vacant.reserve(1);
  const auto vacate = [&](std::uint32_t number) {
    rows_.row(number)->stamp = kVacant;
    barrier();
    tier_->vacant.push_back(number);
  };
  std::uint32_t left = expiry_.reusable();
  if (left == Index::kNone && header_->rows_used < header_->capacity) {
    rows_.back_next_row();
    eviction_.prepare(rows_.stamps(), header_->clock, header_->capacity - header_->rows_used);
    vacate(static_cast<std::uint32_t>(header_->rows_used));
    ++header_->rows_used;
    return;
  }
  const bool found = left != Index::kNone;
  if (!found) {
    left = eviction_.front(rows_.stamps(), header_->clock);
    if (!expired(left)) return make_room();
  }
  snapshots_.before_change(left);
  const std::uint64_t id = rows_.row(left)->key();
  if (!index_.erase(id, left)) throw rows_.damaged(left);
  snapshots_.evict(id);
  changefeed_.remove(left, id);
  // With any stamp but these two it would come back, if a kill came now.
  const std::uint32_t before = rows_.row(left)->stamp;
  if (!found) eviction_.pop(rows_.stamps(), header_->clock);
  vacate(left);
  if (found) eviction_.touch(rows_.stamps(), header_->clock, left, before);
}

// Moves the least recently used rows to disk.
void Shard::spill_rows() {
  struct Leaving {
    std::uint32_t number, record, stamp;
  };
  RowLog& log = tier_->log;
  std::vector<Leaving> leaving;
  const std::uint64_t most =
      std::clamp<std::uint64_t>(header_->capacity / kShareThatLeaves, 1, RowLog::block_records(rows_.stride()));
  leaving.reserve(most);
  tier_->vacant.reserve(tier_->vacant.size() + most);
  try {
    while (leaving.size() < most) {
      std::uint32_t number = eviction_.front(rows_.stamps(), header_->clock);
      if (!leaving.empty() && expired(number)) break;
      if (rows_.row(number)->stamp == header_->clock) {
        // All rows are of this request, which has more of them than memory: none is better than another.
        if (!leaving.empty() && leaving.front().stamp < header_->clock) break;
        number = tier_->hand = (tier_->hand + 1) % static_cast<std::uint32_t>(header_->rows_used);
        leaving.push_back(
            {number, append_to_log(rows_.row_bytes(number), rows_.last_step(number), header_->clock), header_->clock});
        continue;
      }
      RowHeader& r = *rows_.row(number);
      leaving.push_back({number, append_to_log(rows_.row_bytes(number), rows_.last_step(number), r.stamp), r.stamp});
      eviction_.pop(rows_.stamps(), header_->clock);
      r.stamp = header_->clock;  // so that it is not found again
    }
    log.flush();
  } catch (...) {
    for (const Leaving& l : leaving) rows_.row(l.number)->stamp = l.stamp;
    eviction_.clear();
    throw;
  }
  header_->cold.next_record = log.next();
  barrier();
  for (const Leaving& l : leaving) index_.prefetch(rows_.row(l.number)->key());
  for (const Leaving& l : leaving) {
    RowHeader& r = *rows_.row(l.number);
    r.stamp = l.stamp;
    const bool changed = snapshots_.changed(l.number);
    snapshots_.before_change(l.number);
    header_->cold.move_record = l.record;
    barrier();
    header_->cold.move_row = std::uint64_t{l.number} + 1;
    barrier();
    if (!index_.replace(r.key(), l.number, rows_.number_of(l.record))) throw rows_.damaged(l.number);
    barrier();
    r.stamp = kVacant;
    barrier();
    header_->cold.move_row = 0;
    barrier();
    log.revive(l.record);
    snapshots_.set_record(l.record, changed);
    changefeed_.move(l.number, rows_.mark_of(rows_.number_of(l.record)));
    tier_->vacant.push_back(l.number);
  }
  header_->cold.spilled += leaving.size();
  tier_->to_compact = std::min(tier_->to_compact + kCompactedPerRow * leaving.size(),
                               kCompactedPerRow * RowLog::block_records(rows_.stride()));
  compact();
}

// The same; if all records are in use, others come first. A snapshot that keeps them is lost, and training continues.
void Shard::make_room() {
  const auto compact_until_room = [&] {
    while (tier_->log.exhausted() && compact_block()) {
    }
  };
  try {
    return spill_rows();
  } catch (const RegionFull&) {
    if (!tier_->log.exhausted()) throw;
  }
  compact_until_room();
  if (tier_->log.exhausted()) {
    tier_->log.try_again();
    compact_until_room();
  }
  if (tier_->log.exhausted() && snapshots_.reading()) {
    snapshots_.fail(
        "rows moved to disk until all records were in use, of which the snapshot kept those of rows that came "
        "back: save again, or raise the capacity of the table");
    end_cold_snapshot();
    compact_until_room();
  }
  spill_rows();
}

void Shard::append_cold(const ColdRow& cold, RowBatch& rows) const {
  rows_.append(cold.row, cold.last_step, rows);
  rows.stamps.back() = stamp_of(cold);
}

// Appends rows from the record of a row number on, as `export_rows` does.
std::uint64_t Shard::export_cold(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows) {
  const std::uint64_t first = start - header_->capacity, end = tier_->log.end_record();
  auto& records = tier_->records;
  records.clear();
  std::uint64_t record = first;
  for (; record < end && records.size() < std::min(max_rows, kRowsPerLock); ++record) {
    if (tier_->log.live(static_cast<std::uint32_t>(record))) records.push_back(static_cast<std::uint32_t>(record));
  }
  read_records();
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (const ColdRow cold = cold_row(i); present(cold)) append_cold(cold, rows);
  }
  return record < end ? header_->capacity + record : kNoRow;
}

// After the index has been cleared.
void Shard::clear_tier() {
  header_->cold.move_row = 0;
  header_->cold.next_record = 0;
  barrier();
  tier_->log.clear();
  tier_->vacant.clear();
  tier_->compacting = RowLog::kNone;
  tier_->newest.clear();
  tier_->oldest.clear();
  tier_->looked_for = 0;
  tier_->damaged = 0;
  Cold& cold = header_->cold;
  cold.spilled = cold.read = cold.promoted = cold.compacted = 0;
}

// The records of a snapshot: those that are live now. Their segments stay as they are until they have been read.
void Shard::prepare_cold_snapshot() {
  tier_->snapshot = tier_->log.live_bits();
  tier_->snapshot_next = 0;
  tier_->snapshot_end = tier_->log.end_record();
}

void Shard::begin_cold_snapshot() noexcept {
  // Rows of memory that hold none are not in the snapshot, whatever comes there.
  for (const std::uint32_t number : tier_->vacant) {
    snapshots_.skip(number);
  }
  for (std::uint64_t record = 0; record < tier_->snapshot_end; record += tier_->log.segment_records()) {
    tier_->log.pin(tier_->log.segment_of(static_cast<std::uint32_t>(record)));
  }
}

// Appends rows of a segment, so many at most as are read under one lock. Returns whether there may be more.
bool Shard::export_cold_snapshot(Snapshot& snapshot, RowBatch& rows) {
  auto& records = tier_->records;
  auto& next = tier_->snapshot_next;
  if (next >= tier_->snapshot_end) return false;
  const std::uint32_t segment = tier_->log.segment_of(static_cast<std::uint32_t>(next));
  const std::uint64_t end = (std::uint64_t{segment} + 1) * tier_->log.segment_records();
  records.clear();
  while (next < end && records.size() < kRowsPerLock) {
    const std::uint64_t bits = next / 64 < tier_->snapshot.size() ? tier_->snapshot[next / 64] >> (next % 64) : 0;
    next += bits == 0 ? 64 - next % 64 : static_cast<unsigned>(std::countr_zero(bits));
    if (bits == 0 || next >= end) continue;
    const auto record = static_cast<std::uint32_t>(next++);
    if (snapshot.wants_record(record)) records.push_back(record);
  }
  next = std::min(next, end);
  try {
    read_records();
    for (std::size_t i = 0; i < records.size(); ++i) {
      if (const ColdRow cold = cold_row(i); !snapshot.had_expired(stamp_of(cold))) append_cold(cold, rows);
    }
  } catch (const std::exception& error) {
    snapshot.fail(error.what());  // These rows have been passed.
    throw;
  }
  if (next == end) tier_->log.unpin(segment);
  return true;
}

void Shard::end_cold_snapshot() {
  if (!tier_) return;
  tier_->log.unpin_all();
  tier_->log.try_again();  // A disk may have been away for a while.
  tier_->snapshot = {};
  tier_->snapshot_next = tier_->snapshot_end = 0;
}

}  // namespace persia
