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

void Shard::mark() {
  begun_ = true;
  header_->busy |= kRowsBusy;
  barrier();
}

std::uint32_t Shard::find(std::uint64_t id) const {
  return index_.find(Index::tag_of(hash_id(id)),
                     [&](std::uint32_t number) { return in_memory(number) && row(number)->key() == id; });
}

// `left` is the row of this id if it has one, which has left, or none.
std::uint32_t Shard::admit(std::uint64_t id, std::uint32_t left) {
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
  return insert(id, left);
}

std::uint32_t Shard::insert(std::uint64_t id, std::uint32_t left) {
  const std::uint32_t number = left == Index::kNone ? acquire(id) : renewed(left);
  const std::uint32_t stamp = first_stamp();
  RowHeader& r = *row(number);
  r.set_key(id);
  r.update_count = 0;
  if (!taken_vacant(number)) r.stamp = stamp;
  set_last_step(number, 0);
  crash_point();
  const std::uint64_t random = row_key(header_->seed, header_->name_hash, id);
  if (values_.narrow()) {
    initialize(config_->initializer, scratch_.data(), dim_, random);
    store_embedding(number, scratch_.data());
  } else {
    initialize(config_->initializer, weight(number), dim_, random);
  }
  // Moments begin with zeros, which are zeros in each dtype.
  optimizer_->initialize_state(state(number), states_.words(header_->state_width));
  publish(id, number, stamp);
  changefeed_.mark(number);
  return number;
}

// A row number to write to: that of a row that has left, the next unused one, or that of the least recently used row.
// The place of a row in the index goes to the new id. Whatever may fail comes first: then nothing has changed.
std::uint32_t Shard::acquire(std::uint64_t id) {
  if (tier_) {
    make_vacant();
    if (rows_total() >= tier_->capacity) evict_cold();
    return tier_->vacant.back();
  }
  const std::uint32_t left = reusable();
  if (left == Index::kNone && header_->rows_used < header_->capacity) {
    const bool few = header_->rows_used + rows_ahead_ >= header_->rows_backed;
    if (few && header_->rows_backed < header_->capacity) back_rows();
    eviction_.prepare(stamps(), header_->clock, header_->capacity - header_->rows_used);
    return static_cast<std::uint32_t>(header_->rows_used);
  }
  const std::uint32_t number = left == Index::kNone ? eviction_.front(stamps(), header_->clock) : left;
  mark_changed(number);
  mark_index();
  move_index();
  index_.insert(Index::tag_of(hash_id(id)), number);
  save_undo(number);
  if (!index_.erase(Index::tag_of(hash_id(row(number)->key())), number)) {
    index_.erase(Index::tag_of(hash_id(id)), number);
    drop_undo();
    throw damaged(number);
  }
  if (left == Index::kNone) {
    eviction_.pop(stamps(), header_->clock);
    ++header_->counters.evicted;
  } else {
    renew(number);
  }
  changes_.evict(row(number)->key());
  changefeed_.remove(number, row(number)->key());
  return number;
}

std::runtime_error Shard::damaged(std::uint32_t number) const {
  return std::runtime_error(where() + ": row " + std::to_string(number) + " is damaged: the index has no such id");
}

// After a row has been written completely: makes it reachable, unless it has taken another's place.
void Shard::publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp) {
  if (taken_vacant(number)) {
    grow_index(rows_total() + 1);
    mark_index();
    move_index();
    index_.insert(Index::tag_of(hash_id(id)), number);
    barrier();
    row(number)->stamp = stamp;
    barrier();
    tier_->vacant.pop_back();
  } else if (number == header_->rows_used) {
    const std::uint64_t rows = std::uint64_t{number} + 1;
    grow_index(rows);
    mark_index();
    move_index();
    index_.insert(Index::tag_of(hash_id(id)), number);
    barrier();
    header_->rows_used = rows;
  }
  drop_undo();
}

// Before a row is inserted behind `rows` others: begins to grow if there is no room. Whatever may fail comes first.
void Shard::grow_index(std::uint64_t rows) {
  back_index_ahead(rows);
  if (!index_.full(rows)) return;
  mark_index();
  while (move_index()) {  // Growth has ended long ago, unless ids share hashes.
  }
  index_.grow();
  barrier();
  header_->index_old_slots = index_.old_slots();
  header_->index_frontier = index_.frontier();
  barrier();
  header_->index_slots = index_.slot_count();
  barrier();
}

// Grows by a step. Returns whether there are more.
bool Shard::move_index() {
  if (!index_.growing()) return false;
  const bool moved = index_.move(Index::kMoves);
  barrier();
  header_->index_frontier = index_.frontier();
  header_->index_old_slots = index_.old_slots();
  return moved && index_.growing();
}

void Shard::tick() {
  if (header_->clock >= kLastClock) {
    if (cut_) cut_->fail("the recency of all rows was numbered anew (once in 2^32 requests); save again");
    changefeed_.lose();
    renumber_rows();
  }
  ++header_->clock;
}

void Shard::save_undo(std::uint32_t number) {
  if (!header_->durable) return;
  std::byte* const undo = region_.base() + layout_.undo;
  std::memcpy(undo, row_bytes(number), stride_);
  const std::uint32_t step = last_step(number);
  std::memcpy(undo + stride_, &step, sizeof(step));
  header_->undo_mark = header_->push.rows_applied;
  barrier();
  header_->undo_row = std::uint64_t{number} + 1;
  barrier();
}

void Shard::drop_undo() {
  if (!header_->durable) return;
  barrier();
  header_->undo_row = 0;
  barrier();
}

// To the nearest, but 16-bit values not beyond the bound: rounding must not lead there.
void Shard::store_embedding(std::uint32_t number, const float* values) {
  const float bound = optimizer_->bound();
  if (values_.narrow() && bound < std::numeric_limits<float>::infinity()) {
    std::transform(values, values + dim_, scratch_.begin(), [&](float v) { return std::clamp(v, -bound, bound); });
    values = scratch_.data();
  }
  values_.store_nearest(values, weight(number), dim_);
}

void Shard::append(const std::byte* row, std::uint32_t last_step, RowBatch& rows) const {
  const auto& r = *reinterpret_cast<const RowHeader*>(row);
  const auto* values = reinterpret_cast<const float*>(row + sizeof(RowHeader));
  rows.ids.push_back(r.key());
  rows.update_counts.push_back(r.update_count);
  rows.last_steps.push_back(last_step);
  rows.stamps.push_back(r.stamp);
  if (!values_.narrow()) {
    rows.embeddings.insert(rows.embeddings.end(), values, values + dim_);
    rows.states.insert(rows.states.end(), values + dim_, values + dim_ + header_->state_width);
    return;
  }
  const std::size_t width = header_->state_width;
  rows.embeddings.resize(rows.embeddings.size() + dim_);
  values_.load(values, rows.embeddings.data() + rows.embeddings.size() - dim_, dim_);
  rows.states.resize(rows.states.size() + width);
  states_.load(values + words_, rows.states.data() + rows.states.size() - width, width);
}

void Shard::peek(const Slice& slice, std::uint8_t* found, RowBatch& rows) {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  const std::size_t width = header_->state_width;
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::size_t at = slice.position(i);
    const std::uint32_t known = find(slice.ids[at]), number = present(known);
    const std::byte* bytes = number == Index::kNone ? nullptr : row_bytes(number);
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
    const auto* values = reinterpret_cast<const float*>(bytes + sizeof(RowHeader));
    rows.update_counts[at] = r.update_count;
    if (number != Index::kNone) {
      rows.last_steps[at] = last_step(number);
      rows.stamps[at] = r.stamp;
    }
    values_.load(values, rows.embeddings.data() + at * dim_, dim_);
    if (width > 0) states_.load(values + words_, rows.states.data() + at * width, width);
  }
}

std::uint64_t Shard::export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t end = start + std::min(max_rows, header_->rows_used - std::min(start, header_->rows_used));
  for (std::uint64_t number = start; number < end; ++number) {
    if (const auto n = static_cast<std::uint32_t>(number); !has_left(n) && !vacant(n)) append(n, rows);
  }
  if (end < header_->rows_used) return end;
  return tier_ ? export_cold(std::max(start, header_->capacity), max_rows, rows) : kNoRow;
}

void Shard::import_rows(const Slice& slice, const RowView& rows) {
  if (slice.count == 0) return;
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  check_no_cut();
  changes_ = {};  // imported rows count as unchanged, so what has changed is no longer known
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
  const std::size_t width = header_->state_width;
  const std::uint32_t stamp = std::max(std::min(rows.stamps[at], kLastClock), least_stamp());
  std::uint32_t number = find(id);
  if (number == Index::kNone && tier_) number = promote(id);
  const bool known = number != Index::kNone;
  if (known) {
    save_undo(number);
  } else {
    if (!tier_ && header_->rows_used == header_->capacity) {
      const std::uint32_t oldest = eviction_.front(stamps(), header_->clock);
      if (row(oldest)->stamp >= stamp) {
        ++header_->counters.evicted;
        return;
      }
    }
    number = acquire(id);
  }
  RowHeader& r = *row(number);
  r.set_key(id);
  r.update_count = rows.update_counts[at];
  if (!taken_vacant(number)) r.stamp = stamp;
  set_last_step(number, rows.last_steps[at]);
  crash_point();
  store_embedding(number, rows.embeddings + at * dim_);
  if (width > 0) states_.store_nearest(rows.states + at * width, state(number), width);
  if (known) {
    drop_undo();
  } else {
    publish(id, number, stamp);
  }
  changefeed_.mark(number);
}

ShardState Shard::export_state() {
  const std::lock_guard lock(mutex_);
  ShardState s;
  s.clock = header_->clock;
  s.epoch = header_->epoch;
  s.client_clock = header_->client_clock;
  s.clients.assign(header_->clients, header_->clients + kClients);
  std::memcpy(s.counters.data(), &header_->counters, sizeof(Counters));
  const auto* counters = reinterpret_cast<const std::uint16_t*>(region_.base() + layout_.sketch);
  s.sketch.assign(counters, counters + header_->sketch_width * kSketchRows);
  s.ages = header_->ages;
  return s;
}

void Shard::import_state(const ShardState& s) {
  const std::lock_guard lock(mutex_);
  check_no_cut();
  if (!sound(s.ages, s.clock)) throw std::invalid_argument("the ages of the state contradict each other or its clock");
  if (s.clients.size() != kClients) throw std::invalid_argument("the state has another number of client entries");
  if (s.sketch.size() != header_->sketch_width * kSketchRows) {
    throw std::invalid_argument("the state has an admission sketch of " + std::to_string(s.sketch.size()) +
                                " counters, the shard one of " + std::to_string(header_->sketch_width * kSketchRows) +
                                ": use the same capacity, shards and admission");
  }
  const Stamps all = stamps();
  std::uint32_t clock = s.clock;
  for (std::uint64_t number = 0; number < all.count; ++number) {
    if (!vacant(static_cast<std::uint32_t>(number))) clock = std::max(clock, all[number]);
  }
  header_->clock = std::min(clock, kLastClock);
  changes_ = {};
  changefeed_.lose();
  header_->epoch = s.epoch;
  header_->client_clock = s.client_clock;
  std::copy(s.clients.begin(), s.clients.end(), header_->clients);
  std::memcpy(&header_->counters, s.counters.data(), sizeof(Counters));
  header_->ages = s.ages;
  forget_left();
  if (!s.sketch.empty()) {  // Null is not allowed, even for no bytes.
    std::memcpy(region_.base() + layout_.sketch, s.sketch.data(), s.sketch.size() * sizeof(std::uint16_t));
  }
  eviction_.clear();
}

void Shard::end_import() {
  const std::lock_guard lock(mutex_);
  make_eviction_ready();
}

void Shard::make_eviction_ready() noexcept {
  eviction_.make_ready(stamps(), header_->clock, header_->capacity - header_->rows_used);
}

void Shard::clear() {
  Shard* const self = this;
  const ShardLocks locks(Shards(&self, 1));
  check_no_cut();
  changes_ = {};
  changefeed_.lose();
  mark();
  mark_index();
  if (tier_) {
    header_->cold.rebuilding = kClearing;
    barrier();
  }
  clear_rows();
}

void Shard::clear_rows() {
  header_->rows_used = 0;
  barrier();
  header_->rows_backed = 0;
  barrier();
  index_.clear();
  header_->index_old_slots = 0;
  header_->index_frontier = 0;
  region_.discard(layout_.rows, layout_.total - layout_.rows);
  std::memset(region_.base() + layout_.sketch, 0, layout_.sketch_bytes);
  header_->ages = {};
  forget_left();
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

std::uint64_t Shard::size() {
  const std::lock_guard lock(mutex_);
  return rows_total();
}

std::uint64_t Shard::memory_bytes() {
  const std::lock_guard lock(mutex_);
  return layout_.sketch + layout_.sketch_bytes + header_->index_slots * sizeof(std::uint64_t) +
         header_->rows_used * (stride_ + (header_->keeps_last_steps != 0 ? sizeof(std::uint32_t) : 0)) +
         changes_.rows.bytes() + changes_.records.bytes() + changefeed_.bytes() +
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
