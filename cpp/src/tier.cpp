// Rows on disk: how they leave memory, how they come back, and what a process does that finds them.
//
// The index refers to rows of memory and to records on disk alike: numbers from the capacity of memory on are records.
// So a row moves by one store, of its other number to its slot. Before it, the new place is complete: the row's record
// is in the file, or its bytes are in a vacant row of memory. After it, the old place is given up: the row of memory is
// marked vacant, or the record counts as dead. `Header::cold` says which row is moving, so that whoever attaches
// completes what is left of that. The slots of cold rows are nowhere else: no step of the index loses one (index.hpp).
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <random>
#include <stdexcept>

#include "persia/memory.hpp"
#include "persia/shard.hpp"

namespace persia {
namespace {

// Rows that leave memory together, or the disk: those of a block, but only so many of a small table.
constexpr std::uint64_t kShareThatLeaves = 8;
// Records that are looked at for each row that leaves memory, while there is a segment to compact. A third of its
// records are dead at least, so this frees as many as come.
constexpr std::uint64_t kCompactedPerRow = 3;
constexpr std::uint64_t kLeastSegments = 16;

class File {
 public:
  File(const std::string& path, int flags) : file_(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return file_; }

 private:
  int file_;
};

}  // namespace

TierCounts& TierCounts::operator+=(const TierCounts& other) {
  rows += other.rows;
  disk_bytes += other.disk_bytes;
  spilled += other.spilled;
  read += other.read;
  promoted += other.promoted;
  compacted += other.compacted;
  return *this;
}

void FetchedRecords::read(const RowLog& log) {
  std::sort(wanted_.begin(), wanted_.end());
  wanted_.erase(std::unique(wanted_.begin(), wanted_.end()), wanted_.end());
  records_.resize(wanted_.size());
  std::transform(wanted_.begin(), wanted_.end(), records_.begin(), [](const auto& wanted) { return wanted.first; });
  bytes_.resize(records_.size() * log.record_bytes());
  try {
    log.read(records_, bytes_.data());
  } catch (const std::runtime_error&) {
    records_.clear();  // The file may have been cleared meanwhile; else whoever needs a record reads it, and reports.
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
  if (config_->spill.path.empty()) return;
  RowLog::Options options;
  options.path = config_->spill.path + "." + std::to_string(number_);
  options.row_bytes = stride_;
  // A third of the records may be dead, and more while a snapshot reads them.
  const std::uint64_t total = total_of(*config_, number_), of_block = RowLog::block_records(stride_);
  options.max_records = std::min(std::max(2 * total, kLeastSegments * of_block), kMaxRows - header_->capacity);
  options.segment_blocks = static_cast<std::size_t>(
      std::clamp<std::uint64_t>(options.max_records / (of_block * kLeastSegments), 1, options.segment_blocks));
  options.keep = region_.is_file();
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
  index_.find(tag, [&](std::uint32_t number) {
    if (in_memory(number)) return false;
    const std::uint32_t record = record_of(number);
    const std::byte* bytes = tier_->fetched == nullptr ? nullptr : tier_->fetched->find(tier_->log, record);
    if (bytes == nullptr) {
      tier_->bytes.resize(std::max(tier_->bytes.size(), tier_->log.record_bytes()));
      tier_->log.read({&record, 1}, tier_->bytes.data());
      ++header_->cold.read;
      bytes = tier_->bytes.data();
    }
    const std::byte* const row = tier_->log.row_in(record, bytes);
    if (reinterpret_cast<const RowHeader*>(row)->key() != id) return false;
    found = {record, row, RowLog::last_step_in(bytes)};
    return true;
  });
  return found;
}

// Wants all records that may be those of an id. Returns whether there are any.
bool Shard::want_cold(std::uint64_t id, FetchedRecords& wanted) const {
  bool any = false;
  index_.find(Index::tag_of(hash_id(id)), [&](std::uint32_t number) {
    if (!in_memory(number)) {
      wanted.want(tier_->log, record_of(number));
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
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != number_) continue;
    if (find(id) == Index::kNone) want_cold(id, tier_->ahead);
  }
  tier_->ahead.read(tier_->log);
  header_->cold.read += tier_->ahead.size();
  tier_->fetched = &tier_->ahead;
}

std::uint32_t Shard::stamp_of(const ColdRow& cold) const {
  // Those of rows on disk are not numbered anew.
  return std::min(reinterpret_cast<const RowHeader*>(cold.row)->stamp, header_->clock);
}

// Whether there is such a row, and it has not left.
bool Shard::present(const ColdRow& cold) const {
  return cold.row != nullptr && stamp_of(cold) >= header_->ages.left_before;
}

// The values of a row on disk, valid until the next record is read; nullptr if there is none.
const float* Shard::cold_values(std::uint64_t id) {
  const ColdRow cold = find_cold(id);
  return present(cold) ? reinterpret_cast<const float*>(cold.row + sizeof(RowHeader)) : nullptr;
}

// Brings the row of an id back to memory. Returns its number, or none.
std::uint32_t Shard::promote(std::uint64_t id) {
  const std::uint32_t tag = Index::tag_of(hash_id(id));
  const auto on_disk = [&](std::uint32_t number) { return !in_memory(number); };
  if (index_.find(tag, on_disk) == Index::kNone) return Index::kNone;
  make_vacant();  // before the record is read, as this may move it
  const ColdRow cold = find_cold(id);
  if (cold.row == nullptr) return Index::kNone;
  if (!present(cold)) {
    drop_cold(cold.record, id);
    return Index::kNone;
  }
  const std::uint32_t number = tier_->vacant.back();
  std::byte* const to = row_bytes(number);  // but for the stamp, which comes last
  std::memcpy(to, cold.row, offsetof(RowHeader, stamp));
  crash_point();
  std::memcpy(to + sizeof(RowHeader), cold.row + sizeof(RowHeader), stride_ - sizeof(RowHeader));
  set_last_step(number, cold.last_step);
  header_->cold.move_record = cold.record;
  barrier();
  header_->cold.move_row = std::uint64_t{number} + 1;
  barrier();
  if (!index_.replace(tag, number_of(cold.record), number)) throw damaged(number);
  barrier();
  row(number)->stamp = header_->clock;
  barrier();
  header_->cold.move_row = 0;
  barrier();
  tier_->vacant.pop_back();
  tier_->log.release(cold.record);
  ++header_->cold.promoted;
  return number;
}

// Brings all rows of a push back before its first gradient is applied: if that fails, nothing of it has been.
void Shard::promote_all(const Slice& slice, std::size_t shards, const Push& push) {
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != number_) continue;
    if (begun_push_ == PushState::kNone) begin_push(push);
    if (begun_push_ == PushState::kDuplicate) return;
    if (find(id) != Index::kNone) continue;
    fetch_cold(slice, i, shards);
    promote(id);
  }
}

// A row on disk that is not needed any more.
void Shard::drop_cold(std::uint32_t record, std::uint64_t id) {
  mark_index();
  if (!index_.erase(Index::tag_of(hash_id(id)), number_of(record))) throw damaged(number_of(record));
  tier_->log.release(record);
  changes_.evict(id);
}

// Whatever may fail comes first: then nothing has changed.
void Shard::make_vacant() {
  if (!tier_->vacant.empty()) return;
  tier_->vacant.reserve(1);
  const auto vacate = [&](std::uint32_t number) {
    row(number)->stamp = kVacant;
    barrier();
    tier_->vacant.push_back(number);
  };
  std::uint32_t left = reusable();
  if (left == Index::kNone && header_->rows_used < header_->capacity) {
    const bool few = header_->rows_used + rows_ahead_ >= header_->rows_backed;
    if (few && header_->rows_backed < header_->capacity) back_rows();
    victims_.prepare(stamps(), header_->clock, header_->capacity - header_->rows_used);
    vacate(static_cast<std::uint32_t>(header_->rows_used));
    ++header_->rows_used;
    return;
  }
  const bool found = left != Index::kNone;
  if (!found) {
    left = victims_.front(stamps(), header_->clock);
    if (!has_left(left)) return make_room();
  }
  mark_changed(left);
  mark_index();
  const std::uint64_t id = row(left)->key();
  if (!index_.erase(Index::tag_of(hash_id(id)), left)) throw damaged(left);
  changes_.evict(id);
  // With any stamp but these two it would come back, if a kill came now.
  const std::uint32_t before = row(left)->stamp;
  if (!found) victims_.pop(stamps(), header_->clock);
  vacate(left);
  if (found) victims_.touch(stamps(), header_->clock, left, before);
}

// Moves the least recently used rows to disk.
void Shard::spill_rows() {
  struct Leaving {
    std::uint32_t number, record, stamp;
  };
  RowLog& log = tier_->log;
  std::vector<Leaving> leaving;
  const std::uint64_t most =
      std::clamp<std::uint64_t>(header_->capacity / kShareThatLeaves, 1, RowLog::block_records(stride_));
  leaving.reserve(most);
  tier_->vacant.reserve(tier_->vacant.size() + most);
  try {
    while (leaving.size() < most) {
      std::uint32_t number = victims_.front(stamps(), header_->clock);
      if (!leaving.empty() && has_left(number)) break;
      if (row(number)->stamp == header_->clock) {
        // All rows are of this request, which has more of them than memory: none is better than another.
        if (!leaving.empty() && leaving.front().stamp < header_->clock) break;
        number = tier_->hand = (tier_->hand + 1) % static_cast<std::uint32_t>(header_->rows_used);
        leaving.push_back(
            {number, append_to_log(row_bytes(number), last_step(number), header_->clock), header_->clock});
        continue;
      }
      RowHeader& r = *row(number);
      leaving.push_back({number, append_to_log(row_bytes(number), last_step(number), r.stamp), r.stamp});
      victims_.pop(stamps(), header_->clock);
      r.stamp = header_->clock;  // so that it is not found again
    }
    log.flush();
  } catch (...) {
    for (const Leaving& l : leaving) row(l.number)->stamp = l.stamp;
    victims_.clear();
    throw;
  }
  header_->cold.next_record = log.next();
  barrier();
  for (const Leaving& l : leaving) index_.prefetch(index_.home(Index::tag_of(hash_id(row(l.number)->key()))));
  for (const Leaving& l : leaving) {
    RowHeader& r = *row(l.number);
    r.stamp = l.stamp;
    const bool changed = changes_.rows.has(l.number);
    mark_changed(l.number);
    header_->cold.move_record = l.record;
    barrier();
    header_->cold.move_row = std::uint64_t{l.number} + 1;
    barrier();
    if (!index_.replace(Index::tag_of(hash_id(r.key())), l.number, number_of(l.record))) throw damaged(l.number);
    barrier();
    r.stamp = kVacant;
    barrier();
    header_->cold.move_row = 0;
    barrier();
    log.revive(l.record);
    changes_.records.set(l.record, changed);
    tier_->vacant.push_back(l.number);
  }
  header_->cold.spilled += leaving.size();
  tier_->to_compact = std::min(tier_->to_compact + kCompactedPerRow * leaving.size(),
                               kCompactedPerRow * RowLog::block_records(stride_));
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
  if (tier_->log.exhausted() && cut_) {
    cut_->fail(
        "rows moved to disk until all records were in use, of which the snapshot kept those of rows that came "
        "back: save again, or raise the capacity of the table");
    end_cold_cut();
    compact_until_room();
  }
  spill_rows();
}

// Reads the live ones of these records, which are left in `Tier::records`.
void Shard::read_live(std::uint32_t from, std::uint32_t end) {
  auto& records = tier_->records;
  records.clear();
  for (std::uint32_t record = from; record < end; ++record) {
    if (tier_->log.live(record)) records.push_back(record);
  }
  read_records();
}

void Shard::read_records() {
  const auto& records = tier_->records;
  tier_->bytes.resize(std::max(tier_->bytes.size(), records.size() * tier_->log.record_bytes()));
  if (!records.empty()) tier_->log.read(records, tier_->bytes.data());
}

Shard::ColdRow Shard::cold_row(std::size_t i) const {
  const std::byte* const bytes = tier_->bytes.data() + i * tier_->log.record_bytes();
  const std::uint32_t record = tier_->records[i];
  return {record, tier_->log.row_in(record, bytes), RowLog::last_step_in(bytes)};
}

// Writes the live records of sparse segments again, a few blocks at a time.
void Shard::compact() {
  try {
    while (tier_->to_compact >= RowLog::block_records(stride_)) {
      if (!compact_block()) return;
      tier_->to_compact -= RowLog::block_records(stride_);
    }
  } catch (const RegionFull&) {  // What asked for room has got it.
  } catch (const std::runtime_error&) {
    // A segment that cannot be read is left alone. Whoever needs one of its rows gets the error.
    if (tier_->compacting != RowLog::kNone) tier_->log.pin(tier_->compacting);
    tier_->compacting = RowLog::kNone;
  }
}

// A segment whose rows have all left the table, or none.
std::uint32_t Shard::expired_segment() {
  const std::uint32_t left_before = header_->ages.left_before;
  if (left_before == tier_->looked_for) return RowLog::kNone;
  for (std::uint32_t segment = 0; segment < tier_->newest.size(); ++segment) {
    if (tier_->newest[segment] < left_before && tier_->log.full(segment) && tier_->log.live_in(segment) > 0) {
      return segment;
    }
  }
  tier_->looked_for = left_before;
  return RowLog::kNone;
}

// Appends a row to the log. It is there once the log has been flushed.
std::uint32_t Shard::append_to_log(const std::byte* row, std::uint32_t last_step, std::uint32_t stamp,
                                   RowLog::For what) {
  const std::uint32_t record = tier_->log.append(last_step, row, what);
  const std::uint32_t segment = tier_->log.segment_of(record);
  // After an attach, the stamps of older records are unknown.
  if (segment >= tier_->newest.size()) tier_->newest.resize(segment + 1, header_->clock);
  auto& newest = tier_->newest[segment];
  newest = record % tier_->log.segment_records() == 0 ? stamp : std::max(newest, stamp);
  return record;
}

// Returns whether there was one.
bool Shard::compact_block() {
  RowLog& log = tier_->log;
  if (tier_->compacting == RowLog::kNone) {
    // What is about to be evicted must not become young again.
    const bool full = rows_total() + RowLog::block_records(stride_) >= tier_->capacity;
    tier_->compacting = log.candidate(full ? log.oldest() : RowLog::kNone);
    if (tier_->compacting == RowLog::kNone) tier_->compacting = expired_segment();
    if (tier_->compacting == RowLog::kNone) return false;
    tier_->cursor = tier_->compacting * log.segment_records();
    tier_->generation = log.generation(tier_->compacting);
  }
  if (tier_->generation != log.generation(tier_->compacting)) {  // Others have emptied it, and it is used again.
    tier_->compacting = RowLog::kNone;
    return true;
  }
  const std::uint32_t end = (tier_->compacting + 1) * log.segment_records();
  const std::uint32_t from = tier_->cursor;
  const auto to = static_cast<std::uint32_t>(std::min<std::uint64_t>(end, from + RowLog::block_records(stride_)));
  read_live(from, to);
  struct Moved {
    ColdRow from;
    std::uint32_t record;
  };
  std::vector<Moved> moved;
  for (std::size_t i = 0; i < tier_->records.size(); ++i) {
    const ColdRow cold = cold_row(i);
    if (!present(cold)) {
      drop_cold(cold.record, reinterpret_cast<const RowHeader*>(cold.row)->key());
    } else {
      moved.push_back({cold, append_to_log(cold.row, cold.last_step, stamp_of(cold), RowLog::For::kCompaction)});
    }
  }
  if (!moved.empty()) log.flush();
  header_->cold.next_record = log.next();
  barrier();
  for (const Moved& m : moved) {
    const std::uint64_t id = reinterpret_cast<const RowHeader*>(m.from.row)->key();
    if (!index_.replace(Index::tag_of(hash_id(id)), number_of(m.from.record), number_of(m.record))) {
      throw damaged(number_of(m.from.record));
    }
    barrier();
    log.revive(m.record);
    changes_.records.set(m.record, changes_.records.has(m.from.record));
    log.release(m.from.record);
  }
  header_->cold.compacted += moved.size();
  tier_->cursor = to;
  if (to == end) tier_->compacting = RowLog::kNone;
  return true;
}

// Makes room for a row in a table at its capacity: rows that have been on disk for the longest are lost.
void Shard::evict_cold() {
  RowLog& log = tier_->log;
  if (log.live_records() == 0) return;
  const std::uint32_t full = log.oldest();
  const std::uint32_t segment =
      full != RowLog::kNone ? full : log.segment_of(static_cast<std::uint32_t>(header_->cold.next_record - 1));
  const auto of_block = static_cast<std::uint32_t>(RowLog::block_records(stride_));
  for (std::uint32_t from = segment * log.segment_records();; from += of_block) {
    read_live(from, std::min(from + of_block, (segment + 1) * log.segment_records()));
    if (tier_->records.empty()) continue;
    const std::size_t most = std::max<std::uint64_t>(1, (tier_->capacity - header_->capacity) / kShareThatLeaves);
    for (std::size_t i = 0; i < std::min(most, tier_->records.size()); ++i) {
      const ColdRow cold = cold_row(i);
      drop_cold(cold.record, reinterpret_cast<const RowHeader*>(cold.row)->key());
      ++header_->counters.evicted;
    }
    return;
  }
}

void Shard::append_cold(const ColdRow& cold, RowBatch& rows) const {
  append(cold.row, cold.last_step, rows);
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
  tier_->looked_for = 0;
  Cold& cold = header_->cold;
  cold.spilled = cold.read = cold.promoted = cold.compacted = 0;
}

// The records of a snapshot: those that are live now. Their segments stay as they are until they have been read.
void Shard::prepare_cold_cut() {
  tier_->cut = tier_->log.live_bits();
  tier_->cut_next = 0;
  tier_->cut_end = tier_->log.end_record();
}

void Shard::begin_cold_cut() noexcept {
  // Rows of memory that hold none are not in the snapshot, whatever comes there.
  for (const std::uint32_t number : tier_->vacant) {
    if (!changes_.rows.has(number)) changes_.rows.add(number);
  }
  for (std::uint64_t record = 0; record < tier_->cut_end; record += tier_->log.segment_records()) {
    tier_->log.pin(tier_->log.segment_of(static_cast<std::uint32_t>(record)));
  }
}

// Appends rows of a segment, so many at most as are read under one lock. Returns whether there may be more.
bool Shard::export_cold_cut(Cut& cut, RowBatch& rows) {
  auto& records = tier_->records;
  auto& next = tier_->cut_next;
  if (next >= tier_->cut_end) return false;
  const std::uint32_t segment = tier_->log.segment_of(static_cast<std::uint32_t>(next));
  const std::uint64_t end = (std::uint64_t{segment} + 1) * tier_->log.segment_records();
  records.clear();
  while (next < end && records.size() < kRowsPerLock) {
    const std::uint64_t bits = next / 64 < tier_->cut.size() ? tier_->cut[next / 64] >> (next % 64) : 0;
    next += bits == 0 ? 64 - next % 64 : static_cast<unsigned>(std::countr_zero(bits));
    if (bits == 0 || next >= end) continue;
    const auto record = static_cast<std::uint32_t>(next++);
    if (cut.wants_record(record)) records.push_back(record);
  }
  next = std::min(next, end);
  try {
    read_records();
    for (std::size_t i = 0; i < records.size(); ++i) {
      if (const ColdRow cold = cold_row(i); !cut.had_left(stamp_of(cold))) append_cold(cold, rows);
    }
  } catch (const std::exception& error) {
    cut.fail(error.what());  // These rows have been passed.
    throw;
  }
  if (next == end) tier_->log.unpin(segment);
  return true;
}

void Shard::end_cold_cut() {
  if (!tier_) return;
  tier_->log.unpin_all();
  tier_->cut = {};
  tier_->cut_next = tier_->cut_end = 0;
}

// A process died while a row moved. The bytes of its new place are complete, so the slot says where it is.
void Shard::finish_move() {
  Cold& cold = header_->cold;
  if (cold.move_row == 0) return;
  RowHeader& r = *row(static_cast<std::uint32_t>(cold.move_row - 1));
  const std::uint64_t slot = std::uint64_t{Index::tag_of(hash_id(r.key()))} << 32 | number_of(cold.move_record);
  bool on_disk = false;
  index_.for_each([&](std::uint64_t other) { on_disk |= other == slot; });
  if (on_disk) {
    r.stamp = kVacant;
  } else if (r.stamp == kVacant) {
    r.stamp = header_->clock;
  }
  barrier();
  cold.move_row = 0;
  barrier();
}

// Finds out which rows are where. Returns whether the index was rebuilt.
bool Shard::recover_tier() {
  if (header_->cold.rebuilding == kClearing) {
    clear_rows();
    return true;
  }
  finish_move();
  std::vector<std::uint64_t> slots;
  if (header_->cold.rebuilding != 0) {
    slots = read_slots();
  } else if ((header_->busy & kIndexBusy) != 0 || !revive_rows()) {
    // As often as a slot was copied; that of a row of memory says nothing, as the row may be vacant.
    index_.for_each([&](std::uint64_t slot) {
      if (const auto number = static_cast<std::uint32_t>(slot) & kRowMask; !in_memory(number)) slots.push_back(slot);
    });
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    write_slots(slots);
    barrier();
    header_->cold.rebuilding = kRebuilding;
    barrier();
  }
  if (header_->cold.rebuilding == 0) return false;
  rebuild_with_tier(std::move(slots));
  tier_->log.forget();
  tier_->vacant.clear();
  if (!revive_rows()) {
    throw std::runtime_error(where() +
                             ": its index is damaged: it names rows twice. Remove it with `persia cluster "
                             "regions --clean`, and go on from a checkpoint");
  }
  return true;
}

// Notes which records are in use and which rows of memory are vacant. Returns whether each row of memory and only
// records that may be there are in the index, once each. One pass: a process that restarts waits for it.
bool Shard::revive_rows() {
  RowLog& log = tier_->log;
  std::vector<bool> rows(header_->rows_used);
  std::uint64_t found = 0, expected = 0;
  const bool sound = index_.sound_if([&](std::uint32_t number) {
    if (in_memory(number)) {
      if (number >= rows.size() || rows[number] || vacant(number)) return false;
      ++found;
      rows[number] = true;
      return true;
    }
    const std::uint32_t record = record_of(number);
    if (record >= log.end_record() || log.live(record)) return false;
    log.revive(record);
    return true;
  });
  for (std::uint64_t number = 0; number < header_->rows_used; ++number) {
    const auto n = static_cast<std::uint32_t>(number);
    if (vacant(n)) {
      tier_->vacant.push_back(n);
    } else {
      ++expected;
    }
  }
  return sound && found == expected;
}

void Shard::rebuild_with_tier(std::vector<std::uint64_t> slots) {
  for (const std::uint64_t slot : slots) {
    if (record_of(static_cast<std::uint32_t>(slot) & kRowMask) >= tier_->log.end_record()) {
      throw std::runtime_error(where() + ": its index is damaged: it names rows behind the end of " +
                               tier_->log.path() +
                               ". Remove both with `persia cluster regions --clean`, and go on from a checkpoint");
    }
  }
  for (std::uint64_t number = 0; number < header_->rows_used; ++number) {
    const auto n = static_cast<std::uint32_t>(number);
    if (!vacant(n)) slots.push_back(std::uint64_t{checked_tag(n)} << 32 | n);
  }
  header_->busy |= kIndexBusy;
  barrier();
  index_.build(slots);
  barrier();
  header_->index_old_slots = 0;
  header_->index_frontier = 0;
  barrier();
  header_->cold.rebuilding = 0;
  barrier();
  unlink(slots_path().c_str());
}

std::string Shard::slots_path() const { return config_->spill.path + "." + std::to_string(number_) + ".slots"; }

// The only copy while the index is being rebuilt: a process may die during that, too.
void Shard::write_slots(const std::vector<std::uint64_t>& slots) const {
  const std::string path = slots_path();
  const File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  const auto* bytes = reinterpret_cast<const std::byte*>(slots.data());
  for (std::size_t done = 0, all = slots.size() * sizeof(slots[0]); done < all;) {
    const ssize_t count = file.get() < 0 ? -1 : write(file.get(), bytes + done, all - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      throw RegionFull(where() + ": no room for the index of " + path + ", which a crash has left to rebuild (" +
                       std::strerror(count == 0 ? ENOSPC : errno) + "). Free " + std::to_string((all >> 20) + 1) +
                       " MiB there, and start the process again");
    }
    done += static_cast<std::size_t>(count);
  }
}

std::vector<std::uint64_t> Shard::read_slots() const {
  const std::string path = slots_path();
  const File file(path, O_RDONLY);
  struct stat status{};
  const bool known = file.get() >= 0 && fstat(file.get(), &status) == 0;
  std::vector<std::uint64_t> slots(known ? static_cast<std::size_t>(status.st_size) / sizeof(std::uint64_t) : 0);
  auto* const bytes = reinterpret_cast<std::byte*>(slots.data());
  const std::size_t all = slots.size() * sizeof(slots[0]);
  std::size_t done = 0;
  while (known && done < all) {
    const ssize_t count = ::read(file.get(), bytes + done, all - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    done += static_cast<std::size_t>(count);
  }
  if (!known || done < all) {
    throw std::runtime_error(where() + ": " + path + " cannot be read, which has what a crash left of its index (" +
                             std::strerror(errno) +
                             "). Put it back, or remove the region with `persia cluster regions --clean`, and go on "
                             "from a checkpoint");
  }
  return slots;
}

}  // namespace persia
