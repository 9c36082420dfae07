#include "persia/shard.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "persia/memory.hpp"
#include "persia/push_log.hpp"

namespace persia {
namespace {

constexpr std::size_t kAhead = 8;  // rows to import whose place in the index is prefetched

}  // namespace

PushCounts& PushCounts::operator+=(const PushCounts& other) {
  applied += other.applied;
  absent += other.absent;
  nonfinite += other.nonfinite;
  duplicates += other.duplicates;
  return *this;
}

Shard::Shard(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard, DiskReader* reader)
    : memory_(config, optimizer, shard),
      header_(&memory_.header),
      before_(optimizer.before_width(config.dim)),
      sketch_(memory_.store.sketch(), header_->sketch_width) {
  if (config.tiered()) tier_ = std::make_unique<Tier>(memory_, *reader);
  memory_.store.complete();
}

void Shard::mark() {
  begun_ = true;
  header_->busy |= kRowsBusy;
  barrier();
}

// Whether an id without a row gets one.
bool Shard::admits(std::uint64_t id) {
  const TableConfig& config = memory_.config;
  bool admitted = true;
  if (config.admission != Admission::kAll) {
    const std::uint32_t occurrence = sketch_.add(id);
    if (config.admission == Admission::kMinFrequency) {
      admitted = occurrence >= config.admission_value;
    } else {
      const std::uint64_t key = row_key(~header_->seed, header_->name_hash, id);
      admitted = static_cast<double>(random_bits(key, occurrence) >> 11) * 0x1p-53 < config.admission_value;
    }
  }
  ++(admitted ? header_->counters.admitted : header_->counters.rejected);
  return admitted;
}

// Makes a new row of an id. `expired` is its row in memory, which has expired, or kNone.
std::uint32_t Shard::insert(std::uint64_t id, std::uint32_t expired) {
  std::uint32_t number = expired;
  if (number == Index::kNone) {
    number = acquire(id);
  } else {
    memory_.reuse(number);
  }
  const std::uint32_t stamp = memory_.first_stamp();
  RowHeader& r = *memory_.store.row(number);
  r.set_key(id);
  r.update_count = 0;
  if (!stamped_last(number)) r.stamp = stamp;
  memory_.store.set_last_step(number, 0);
  crash_point();
  memory_.store.initialize(number, id);
  publish(id, number, stamp);
  memory_.changes.mark(number);
  return number;
}

std::uint32_t Shard::acquire(std::uint64_t id) { return tier_ ? tier_->acquire() : memory_.acquire(id); }

// After a row has been written completely: makes it reachable, unless it has taken the place of another.
void Shard::publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp) {
  if (tier_) {
    tier_->publish(id, number, stamp);
  } else {
    memory_.publish(id, number);
  }
  memory_.store.drop_undo();
}

void Shard::peek(const Slice& slice, std::uint8_t* found, RowBatch& rows) {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  const std::size_t width = header_->state_width;
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::size_t at = slice.position(i);
    const std::uint32_t known = memory_.index.find(slice.ids[at]), number = memory_.present(known);
    const std::byte* bytes = number == Index::kNone ? nullptr : memory_.store.row_bytes(number);
    if (known == Index::kNone && tier_) {
      tier_->fetch(slice, i, 1);
      if (const TierRow stored = tier_->find(slice.ids[at]); tier_->present(stored)) {
        bytes = stored.row;
        rows.last_steps[at] = stored.last_step;
        rows.stamps[at] = tier_->stamp_of(stored);
      }
    }
    found[at] = bytes != nullptr;
    if (bytes == nullptr) continue;
    const auto& r = *reinterpret_cast<const RowHeader*>(bytes);
    rows.update_counts[at] = r.update_count;
    if (number != Index::kNone) {
      rows.last_steps[at] = memory_.store.last_step(number);
      rows.stamps[at] = r.stamp;
    }
    memory_.store.read_embedding(bytes, rows.embeddings.data() + at * memory_.store.dim());
    memory_.store.read_state(bytes, rows.states.data() + at * width);
  }
}

std::uint64_t Shard::export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t end = start + std::min(max_rows, header_->rows_used - std::min(start, header_->rows_used));
  for (std::uint64_t number = start; number < end; ++number) {
    if (const auto n = static_cast<std::uint32_t>(number); !memory_.expired(n) && !memory_.store.vacant(n))
      memory_.store.append(n, rows);
  }
  if (end < header_->rows_used) return end;
  return tier_ ? tier_->export_rows(std::max(start, header_->capacity), max_rows, rows) : kNoRow;
}

void Shard::begin_snapshot(const SnapshotOptions& options) {
  const std::lock_guard lock(mutex_);
  memory_.snapshots.check(options);
  if (tier_) tier_->prepare_snapshot();
  memory_.snapshots.begin(options, memory_.expiry.expired_before(), tier_ ? tier_->log().end_record() : 0);
  if (tier_) tier_->begin_snapshot();
}

bool Shard::export_snapshot(std::uint32_t id, std::uint64_t max_rows, RowBatch& rows) {
  std::uint64_t passed = 0;  // With those that are left out: they take time as well, most of all if read from disk.
  while (passed < max_rows) {
    const std::lock_guard lock(mutex_);
    Snapshot& snapshot = memory_.snapshots.reading(id);
    const std::uint64_t before = rows.ids.size() + snapshot.left_out();
    if (!memory_.snapshots.read(rows) && (!tier_ || !tier_->read_snapshot(snapshot, rows))) return false;
    passed += rows.ids.size() + snapshot.left_out() - before;
  }
  return true;
}

std::vector<std::uint64_t> Shard::snapshot_evicted(std::uint32_t id) {
  const std::lock_guard lock(mutex_);
  return memory_.snapshots.reading(id).evicted();
}

std::uint32_t Shard::changes_since() {
  const std::lock_guard lock(mutex_);
  return memory_.snapshots.since();
}

void Shard::end_snapshot() {
  const std::lock_guard lock(mutex_);
  if (tier_) tier_->end_snapshot();
  memory_.snapshots.end();
}

bool Shard::begin_changes(bool all, std::size_t removed_limit) {
  const std::lock_guard lock(mutex_);
  return memory_.changes.begin(all, removed_limit, memory_.store, tier_.get());
}

bool Shard::take_changes(std::uint64_t max_rows, RowChanges& changes) {
  const std::size_t before = changes.size();
  do {
    const std::lock_guard lock(mutex_);
    if (!memory_.changes.take(memory_.store, tier_.get(), changes)) return false;
  } while (changes.size() - before < max_rows);
  return true;
}

void Shard::end_changes() {
  const std::lock_guard lock(mutex_);
  memory_.changes.lose();
}

void Shard::import_rows(const Slice& slice, const RowView& rows) {
  if (slice.count == 0) return;
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  mark();
  memory_.eviction.clear();
  for (std::size_t i = 0; i < slice.count; ++i) {
    header_->clock = std::max(header_->clock, std::min(rows.stamps[slice.position(i)], kLastClock));
  }
  try {
    for (std::size_t i = 0; i < slice.count; ++i) {
      if (i + kAhead < slice.count) memory_.index.prefetch(rows.ids[slice.position(i + kAhead)]);
      import_row(rows, slice.position(i));
    }
  } catch (...) {  // No space. The queue does not know the rows that are there.
    memory_.eviction.clear();
    throw;
  }
  memory_.eviction.clear();
}

void Shard::import_row(const RowView& rows, std::size_t at) {
  const std::uint64_t id = rows.ids[at];
  const std::uint32_t stamp = std::max(std::min(rows.stamps[at], kLastClock), memory_.expiry.least_stamp());
  std::uint32_t number = memory_.index.find(id);
  if (number == Index::kNone && tier_) number = tier_->promote(id);
  const bool known = number != Index::kNone;
  if (known) {
    memory_.snapshots.before_change(number);
    memory_.store.save_undo(number);
  } else {
    if (!tier_ && header_->rows_used == header_->capacity) {
      const std::uint32_t oldest = memory_.eviction.front(memory_.store.stamps(), header_->clock);
      if (memory_.store.row(oldest)->stamp >= stamp) {
        ++header_->counters.evicted;
        return;
      }
    }
    number = acquire(id);
  }
  RowHeader& r = *memory_.store.row(number);
  r.set_key(id);
  r.update_count = rows.update_counts[at];
  if (!stamped_last(number)) r.stamp = stamp;
  memory_.store.set_last_step(number, rows.last_steps[at]);
  crash_point();
  memory_.store.write(number, rows.embeddings + at * memory_.store.dim(), rows.states + at * header_->state_width);
  if (known) {
    memory_.store.drop_undo();
  } else {
    publish(id, number, stamp);
  }
  memory_.changes.mark(number);
}

// Before the first row is removed under a lock.
void Shard::begin_removal() {
  mark();
  memory_.snapshots.forget();  // The rows that get other places count as unchanged.
  memory_.eviction.clear();
  memory_.expiry.forget();
}

void Shard::remove_from_memory(std::uint32_t number) {
  if (tier_) {
    tier_->vacate(number);
  } else {
    memory_.remove(number);
  }
}

std::uint64_t Shard::remove_rows(const Slice& slice) {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  memory_.snapshots.check_none();
  begin_removal();
  std::uint64_t removed = 0;
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (const std::uint32_t number = memory_.index.find(id); number != Index::kNone) {
      remove_from_memory(number);
      ++removed;
    } else if (tier_) {
      tier_->fetch(slice, i, 1);
      if (const TierRow stored = tier_->find(id); stored.row != nullptr) {
        tier_->drop(stored.record, id);
        ++removed;
      }
    }
  }
  memory_.expiry.look_again();
  return removed;
}

// From the end, so that what takes the place of a removed row has been looked at, or has come since.
std::uint64_t Shard::remove_from_memory(const BucketSet& buckets) {
  Shard* const self = this;
  std::uint64_t removed = 0;
  for (std::uint64_t end = kNoRow; end > 0;) {
    const ShardLocks locks(Shards(&self, 1));
    memory_.snapshots.check_none();
    end = std::min(end, header_->rows_used);
    const std::uint64_t first = end - std::min(end, kRowsPerLock);
    const std::uint64_t before = removed;
    while (end > first) {
      const auto number = static_cast<std::uint32_t>(--end);
      if (number >= header_->rows_used || memory_.store.vacant(number)) continue;
      if (!buckets.has(memory_.store.row(number)->key())) continue;
      if (removed == before) begin_removal();
      remove_from_memory(number);
      ++removed;
    }
    if (removed > before) memory_.expiry.look_again();
    if (end == 0 && !tier_) memory_.store.release_unused();
  }
  return removed;
}

std::uint64_t Shard::remove_buckets(const BucketSet& buckets) {
  std::uint64_t removed = remove_from_memory(buckets);
  // Rows move from memory to the tier meanwhile, and from one record to another.
  Shard* const self = this;
  for (bool again = tier_ != nullptr; again;) {
    again = false;
    for (std::uint64_t record = 0;;) {
      const ShardLocks locks(Shards(&self, 1));
      if (record >= tier_->log().end_record()) break;
      memory_.snapshots.check_none();
      mark();
      const std::uint64_t of_block = tier_->remove(record, [&](std::uint64_t id) { return buckets.has(id); });
      if (of_block > 0) memory_.snapshots.forget();
      again |= of_block > 0;
      removed += of_block;
    }
  }
  end_import();
  return removed;
}

ShardState Shard::export_state() {
  const std::lock_guard lock(mutex_);
  ShardState s;
  s.clock = header_->clock;
  s.snapshot = header_->snapshot;
  s.client_clock = header_->client_clock;
  s.clients.assign(header_->clients, header_->clients + kClients);
  const Counters counted = count();
  std::memcpy(s.counters.data(), &counted, sizeof(Counters));
  const std::uint16_t* const counters = memory_.store.sketch();
  s.sketch.assign(counters, counters + header_->sketch_width * kSketchRows);
  s.ttl = header_->ttl;
  return s;
}

void Shard::import_state(const ShardState& s) {
  const std::lock_guard lock(mutex_);
  memory_.snapshots.check_none();
  if (!Expiry::sound(s.ttl, s.clock))
    throw std::invalid_argument("the ages of the state contradict each other or its clock");
  if (s.clients.size() != kClients) throw std::invalid_argument("the state has another number of client entries");
  if (s.sketch.size() != header_->sketch_width * kSketchRows) {
    throw std::invalid_argument("the state has an admission sketch of " + std::to_string(s.sketch.size()) +
                                " counters, the shard one of " + std::to_string(header_->sketch_width * kSketchRows) +
                                ": use the same capacity, shards and admission");
  }
  const Stamps all = memory_.store.stamps();
  std::uint32_t clock = s.clock;
  for (std::uint64_t number = 0; number < all.count; ++number) {
    if (!memory_.store.vacant(static_cast<std::uint32_t>(number))) clock = std::max(clock, all[number]);
  }
  header_->clock = std::min(clock, kLastClock);
  memory_.snapshots.forget();
  memory_.changes.lose();
  header_->snapshot = s.snapshot;
  header_->client_clock = s.client_clock;
  std::copy(s.clients.begin(), s.clients.end(), header_->clients);
  std::memcpy(&header_->counters, s.counters.data(), sizeof(Counters));
  memory_.expiry.set(s.ttl);
  if (!s.sketch.empty()) {  // Null is not allowed, even for no bytes.
    std::memcpy(memory_.store.sketch(), s.sketch.data(), s.sketch.size() * sizeof(std::uint16_t));
  }
  memory_.eviction.clear();
}

void Shard::end_import() {
  const std::lock_guard lock(mutex_);
  memory_.prepare_eviction();
}

void Shard::clear() {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  memory_.snapshots.check_none();
  memory_.snapshots.forget();
  memory_.changes.lose();
  mark();
  memory_.index.mark_busy();
  if (tier_) {
    tier_->clear();
  } else {
    memory_.clear();
  }
}

void Shard::advance_clock(std::uint64_t by) {
  const std::lock_guard lock(mutex_);
  memory_.expiry.advance_clock(by);
}

void Shard::keep_last_steps() {
  const std::lock_guard lock(mutex_);
  memory_.store.keep_last_steps();
}

Recovery Shard::recover() {
  const std::lock_guard lock(mutex_);
  Recovery found;
  found.busy = header_->busy != 0;
  found.undone = memory_.store.roll_back();
  memory_.store.finish_removal();
  memory_.expiry.mend();
  found.open = header_->commit_slot == 0 && header_->push.client != 0;
  PushLog(*header_).recover();
  if (tier_) {
    found.rebuilt = tier_->recover();
  } else {
    found.rebuilt = (header_->busy & kIndexBusy) != 0 || !memory_.index.slots().sound(header_->rows_used);
    if (found.rebuilt) memory_.index.rebuild();
  }
  memory_.index.clear_behind();
  memory_.prepare_eviction();
  barrier();
  header_->busy = 0;
  return found;
}

std::uint64_t Shard::size() {
  const std::lock_guard lock(mutex_);
  return tier_ ? tier_->rows_total() : header_->rows_used;
}

std::uint64_t Shard::memory_bytes() {
  const std::lock_guard lock(mutex_);
  return memory_.store.memory_bytes() + memory_.index.memory_bytes() + memory_.snapshots.memory_bytes() +
         memory_.changes.memory_bytes() + (tier_ ? tier_->memory_bytes() : 0);
}

TierCounts Shard::tier_counts() {
  const std::lock_guard lock(mutex_);
  return tier_ ? tier_->counts() : TierCounts{};
}

Counters Shard::counters() {
  const std::lock_guard lock(mutex_);
  return count();
}

Counters Shard::count() const {
  Counters counters = header_->counters;
  counters.lookups = counters.hits + counters.misses;
  return counters;
}

}  // namespace persia
