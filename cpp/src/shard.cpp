#include "persia/shard.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "persia/memory.hpp"

namespace persia {

PushCounts& PushCounts::operator+=(const PushCounts& other) {
  applied += other.applied;
  absent += other.absent;
  nonfinite += other.nonfinite;
  duplicates += other.duplicates;
  return *this;
}

Shard::Shard(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard, DiskReader* reader)
    : config_(&config),
      rows_(config, optimizer, shard),
      header_(&rows_.header()),
      index_(rows_, config),
      expiry_(config, rows_),
      snapshots_(rows_),
      sketch_(reinterpret_cast<std::uint16_t*>(rows_.section(rows_.layout().sketch)), header_->sketch_width),
      before_(config.dim + optimizer.state_width(config.dim)) {
  open_tier(reader);
  rows_.complete();
}

void Shard::mark() {
  begun_ = true;
  header_->busy |= kRowsBusy;
  barrier();
}

// `expired` is the row of this id if it has one, which has expired, or none.
std::uint32_t Shard::admit(std::uint64_t id, std::uint32_t expired) {
  bool admitted = true;
  if (config_->admission != Admission::kAll) {
    const std::uint32_t occurrence = sketch_.add(id);
    if (config_->admission == Admission::kMinFrequency) {
      admitted = occurrence >= config_->admission_value;
    } else {
      const std::uint64_t key = row_key(~header_->seed, header_->name_hash, id);
      admitted = static_cast<double>(random_bits(key, occurrence) >> 11) * 0x1p-53 < config_->admission_value;
    }
  }
  if (!admitted) {
    ++header_->counters.rejected;
    return Index::kNone;
  }
  ++header_->counters.admitted;
  return insert(id, expired);
}

std::uint32_t Shard::insert(std::uint64_t id, std::uint32_t expired) {
  std::uint32_t number = expired;
  if (number == Index::kNone) {
    number = acquire(id);
  } else {
    snapshots_.before_change(number);
    rows_.save_undo(number);
    renew(number);
  }
  const std::uint32_t stamp = first_stamp();
  RowHeader& r = *rows_.row(number);
  r.set_key(id);
  r.update_count = 0;
  if (!taken_vacant(number)) r.stamp = stamp;
  rows_.set_last_step(number, 0);
  crash_point();
  rows_.initialize(number, id);
  publish(id, number, stamp);
  changefeed_.mark(number);
  return number;
}

// A row number to write to: that of an expired row, the next unused one, or that of the least recently used row.
// The place of a row in the index goes to the new id. Whatever may fail comes first: then nothing has changed.
std::uint32_t Shard::acquire(std::uint64_t id) {
  if (tier_) {
    make_vacant();
    if (rows_total() >= tier_->capacity) evict_cold();
    return tier_->vacant.back();
  }
  const std::uint32_t expired = expiry_.reusable();
  if (expired == Index::kNone && header_->rows_used < header_->capacity) {
    rows_.back_next_row();
    eviction_.prepare(rows_.stamps(), header_->clock, header_->capacity - header_->rows_used);
    return static_cast<std::uint32_t>(header_->rows_used);
  }
  const std::uint32_t number = expired == Index::kNone ? eviction_.front(rows_.stamps(), header_->clock) : expired;
  snapshots_.before_change(number);
  index_.insert(id, number);
  rows_.save_undo(number);
  if (!index_.erase(rows_.row(number)->key(), number)) {
    index_.erase(id, number);
    rows_.drop_undo();
    throw rows_.damaged(number);
  }
  if (expired == Index::kNone) {
    eviction_.pop(rows_.stamps(), header_->clock);
    ++header_->counters.evicted;
  } else {
    renew(number);
  }
  snapshots_.evict(rows_.row(number)->key());
  changefeed_.remove(number, rows_.row(number)->key());
  return number;
}

// After a row has been written completely: makes it reachable, unless it has taken another's place.
void Shard::publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp) {
  if (taken_vacant(number)) {
    index_.make_room(rows_total() + 1);
    index_.insert(id, number);
    barrier();
    rows_.row(number)->stamp = stamp;
    barrier();
    tier_->vacant.pop_back();
  } else if (number == header_->rows_used) {
    const std::uint64_t rows = std::uint64_t{number} + 1;
    index_.make_room(rows);
    index_.insert(id, number);
    barrier();
    header_->rows_used = rows;
  }
  rows_.drop_undo();
}

void Shard::tick() {
  if (header_->clock >= kLastClock) {
    snapshots_.fail("the recency of all rows was numbered anew (once in 2^32 requests); save again");
    changefeed_.lose();
    expiry_.renumber();
    eviction_.clear();
  }
  ++header_->clock;
}

void Shard::peek(const Slice& slice, std::uint8_t* found, RowBatch& rows) {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  const std::size_t width = header_->state_width;
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::size_t at = slice.position(i);
    const std::uint32_t known = index_.find(slice.ids[at]), number = present(known);
    const std::byte* bytes = number == Index::kNone ? nullptr : rows_.row_bytes(number);
    if (known == Index::kNone && tier_) {
      fetch_cold(slice, i, 1);
      if (const ColdRow cold = find_cold(slice.ids[at]); present(cold)) {
        bytes = cold.row;
        rows.last_steps[at] = cold.last_step;
        rows.stamps[at] = stamp_of(cold);
      }
    }
    found[at] = bytes != nullptr;
    if (bytes == nullptr) continue;
    const auto& r = *reinterpret_cast<const RowHeader*>(bytes);
    rows.update_counts[at] = r.update_count;
    if (number != Index::kNone) {
      rows.last_steps[at] = rows_.last_step(number);
      rows.stamps[at] = r.stamp;
    }
    rows_.read_embedding(bytes, rows.embeddings.data() + at * rows_.dim());
    rows_.read_state(bytes, rows.states.data() + at * width);
  }
}

std::uint64_t Shard::export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t end = start + std::min(max_rows, header_->rows_used - std::min(start, header_->rows_used));
  for (std::uint64_t number = start; number < end; ++number) {
    if (const auto n = static_cast<std::uint32_t>(number); !expired(n) && !rows_.vacant(n)) rows_.append(n, rows);
  }
  if (end < header_->rows_used) return end;
  return tier_ ? export_cold(std::max(start, header_->capacity), max_rows, rows) : kNoRow;
}

void Shard::begin_snapshot(const SnapshotOptions& options) {
  const std::lock_guard lock(mutex_);
  snapshots_.check(options);
  if (tier_) prepare_cold_snapshot();
  snapshots_.begin(options, expiry_.expired_before(), tier_ ? tier_->log.end_record() : 0);
  if (tier_) begin_cold_snapshot();
}

bool Shard::export_snapshot(std::uint32_t id, std::uint64_t max_rows, RowBatch& rows) {
  for (const std::size_t before = rows.ids.size(); rows.ids.size() - before < max_rows;) {
    const std::lock_guard lock(mutex_);
    Snapshot& snapshot = snapshots_.reading(id);
    if (snapshots_.read(rows)) continue;
    if (!tier_ || !export_cold_snapshot(snapshot, rows)) return false;
  }
  return true;
}

std::vector<std::uint64_t> Shard::snapshot_evicted(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  return snapshots_.reading(id).evicted();
}

std::uint32_t Shard::changes_since() {
  const std::lock_guard lock(mutex_);
  return snapshots_.since();
}

void Shard::end_snapshot() {
  const std::lock_guard lock(mutex_);
  end_cold_snapshot();
  snapshots_.end();
}

void Shard::import_rows(const Slice& slice, const RowView& rows) {
  if (slice.count == 0) return;
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  snapshots_.check_none();
  snapshots_.forget();  // imported rows count as unchanged, so what has changed is no longer known
  mark();
  eviction_.clear();
  for (std::size_t i = 0; i < slice.count; ++i) {
    header_->clock = std::max(header_->clock, std::min(rows.stamps[slice.position(i)], kLastClock));
  }
  try {
    for (std::size_t i = 0; i < slice.count; ++i) import_row(rows, slice.position(i));
  } catch (...) {  // No space. The queue does not know the rows that are there.
    eviction_.clear();
    throw;
  }
  eviction_.clear();
}

void Shard::import_row(const RowView& rows, std::size_t at) {
  const std::uint64_t id = rows.ids[at];
  const std::uint32_t stamp = std::max(std::min(rows.stamps[at], kLastClock), expiry_.least_stamp());
  std::uint32_t number = index_.find(id);
  if (number == Index::kNone && tier_) number = promote(id);
  const bool known = number != Index::kNone;
  if (known) {
    rows_.save_undo(number);
  } else {
    if (!tier_ && header_->rows_used == header_->capacity) {
      const std::uint32_t oldest = eviction_.front(rows_.stamps(), header_->clock);
      if (rows_.row(oldest)->stamp >= stamp) {
        ++header_->counters.evicted;
        return;
      }
    }
    number = acquire(id);
  }
  RowHeader& r = *rows_.row(number);
  r.set_key(id);
  r.update_count = rows.update_counts[at];
  if (!taken_vacant(number)) r.stamp = stamp;
  rows_.set_last_step(number, rows.last_steps[at]);
  crash_point();
  rows_.write(number, rows.embeddings + at * rows_.dim(), rows.states + at * header_->state_width);
  if (known) {
    rows_.drop_undo();
  } else {
    publish(id, number, stamp);
  }
  changefeed_.mark(number);
}

ShardState Shard::export_state() {
  const std::lock_guard lock(mutex_);
  ShardState s;
  s.clock = header_->clock;
  s.snapshot = header_->snapshot;
  s.client_clock = header_->client_clock;
  s.clients.assign(header_->clients, header_->clients + kClients);
  std::memcpy(s.counters.data(), &header_->counters, sizeof(Counters));
  const auto* counters = reinterpret_cast<const std::uint16_t*>(rows_.section(rows_.layout().sketch));
  s.sketch.assign(counters, counters + header_->sketch_width * kSketchRows);
  s.ttl = header_->ttl;
  return s;
}

void Shard::import_state(const ShardState& s) {
  const std::lock_guard lock(mutex_);
  snapshots_.check_none();
  if (!Expiry::sound(s.ttl, s.clock))
    throw std::invalid_argument("the ages of the state contradict each other or its clock");
  if (s.clients.size() != kClients) throw std::invalid_argument("the state has another number of client entries");
  if (s.sketch.size() != header_->sketch_width * kSketchRows) {
    throw std::invalid_argument("the state has an admission sketch of " + std::to_string(s.sketch.size()) +
                                " counters, the shard one of " + std::to_string(header_->sketch_width * kSketchRows) +
                                ": use the same capacity, shards and admission");
  }
  const Stamps all = rows_.stamps();
  std::uint32_t clock = s.clock;
  for (std::uint64_t number = 0; number < all.count; ++number) {
    if (!rows_.vacant(static_cast<std::uint32_t>(number))) clock = std::max(clock, all[number]);
  }
  header_->clock = std::min(clock, kLastClock);
  snapshots_.forget();
  changefeed_.lose();
  header_->snapshot = s.snapshot;
  header_->client_clock = s.client_clock;
  std::copy(s.clients.begin(), s.clients.end(), header_->clients);
  std::memcpy(&header_->counters, s.counters.data(), sizeof(Counters));
  expiry_.set(s.ttl);
  if (!s.sketch.empty()) {  // Null is not allowed, even for no bytes.
    std::memcpy(rows_.section(rows_.layout().sketch), s.sketch.data(), s.sketch.size() * sizeof(std::uint16_t));
  }
  eviction_.clear();
}

void Shard::end_import() {
  const std::lock_guard lock(mutex_);
  make_eviction_ready();
}

void Shard::make_eviction_ready() noexcept {
  eviction_.make_ready(rows_.stamps(), header_->clock, header_->capacity - header_->rows_used);
}

void Shard::clear() {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  snapshots_.check_none();
  snapshots_.forget();
  changefeed_.lose();
  mark();
  index_.mark_busy();
  if (tier_) {
    header_->cold.rebuilding = kClearing;
    barrier();
  }
  clear_rows();
}

void Shard::clear_rows() {
  rows_.clear();
  index_.clear();
  expiry_.set({});
  barrier();
  header_->clock = 0;
  header_->counters = {};
  eviction_.clear();
  if (!tier_) return;
  clear_tier();
  barrier();
  header_->cold.rebuilding = 0;
  barrier();
}

void Shard::advance_clock(std::uint64_t by) {
  const std::lock_guard lock(mutex_);
  expiry_.advance_clock(by);
}

void Shard::keep_last_steps() {
  const std::lock_guard lock(mutex_);
  rows_.keep_last_steps();
}

Recovery Shard::recover() {
  const std::lock_guard lock(mutex_);
  Recovery found;
  found.busy = header_->busy != 0;
  found.undone = rows_.roll_back();
  expiry_.mend();
  found.open = header_->commit_slot == 0 && header_->push.client != 0;
  PushLog(*header_).recover();
  if (tier_) {
    found.rebuilt = recover_tier();
  } else {
    found.rebuilt = (header_->busy & kIndexBusy) != 0 || !index_.slots().sound(header_->rows_used);
    if (found.rebuilt) index_.rebuild();
  }
  index_.clear_behind();
  make_eviction_ready();
  barrier();
  header_->busy = 0;
  return found;
}

std::uint64_t Shard::size() {
  const std::lock_guard lock(mutex_);
  return rows_total();
}

std::uint64_t Shard::memory_bytes() {
  const std::lock_guard lock(mutex_);
  return rows_.memory_bytes() + index_.memory_bytes() + snapshots_.memory_bytes() + changefeed_.bytes() +
         (tier_ ? tier_->log.live_bits().size() * sizeof(std::uint64_t) : 0);
}

TierCounts Shard::tier_counts() {
  const std::lock_guard lock(mutex_);
  if (!tier_) return {};
  const Cold& c = header_->cold;
  const RowLog& log = tier_->log;
  const std::uint64_t unreadable = log.set_aside_segments() + tier_->damaged;
  return {log.live_records(), log.disk_bytes(), c.spilled, c.read, c.promoted, c.compacted, unreadable};
}

Counters Shard::counters() {
  const std::lock_guard lock(mutex_);
  return header_->counters;
}

}  // namespace persia
