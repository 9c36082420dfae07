// How the tier frees the space of records whose rows are back in memory, are removed or have expired.
#include <algorithm>
#include <stdexcept>

#include "persia/tier.hpp"

namespace persia {

// Reads the live ones of these records; `row` returns them.
void Tier::read_live(std::uint32_t from, std::uint32_t end) {
  records_.clear();
  for (std::uint32_t record = from; record < end; ++record) {
    if (log_.live(record)) records_.push_back(record);
  }
  read_records();
}

void Tier::read_records() {
  bytes_.resize(std::max(bytes_.size(), records_.size() * log_.record_bytes()));
  if (!records_.empty()) log_.read(records_, bytes_.data());
}

TierRow Tier::row(std::size_t i) const {
  const std::byte* const bytes = bytes_.data() + i * log_.record_bytes();
  const std::uint32_t record = records_[i];
  return {record, log_.row_in(record, bytes), RowLog::last_step_in(bytes)};
}

// Writes the live records of sparse segments again, a few blocks at a time.
void Tier::compact() {
  try {
    while (to_compact_ >= block_records()) {
      if (!compact_block()) return;
      to_compact_ -= block_records();
    }
  } catch (const std::runtime_error&) {
    // What asked for space has got it. If the disk cannot be written, the next row that moves to the tier says so.
  }
}

// A segment that cannot be read is left alone. Whoever needs one of its rows gets the error.
void Tier::set_compacting_aside() {
  log_.set_aside(compacting_);
  compacting_ = RowLog::kNone;
}

// A segment whose rows have all expired, or none.
std::uint32_t Tier::expired_segment() {
  const std::uint32_t expired_before = memory_->expiry.expired_before();
  if (expired_before == looked_for_) return RowLog::kNone;
  for (std::uint32_t segment = 0; segment < newest_.size(); ++segment) {
    if (newest_[segment] >= expired_before || !log_.full(segment) || log_.is_set_aside(segment)) continue;
    if (log_.live_in(segment) > 0) return segment;
  }
  looked_for_ = expired_before;
  return RowLog::kNone;
}

bool Tier::find_expired(std::uint64_t& at, std::uint32_t from, std::uint32_t before, std::vector<std::uint64_t>& ids) {
  if (at >= log_.end_record()) return false;
  const auto first = static_cast<std::uint32_t>(at);
  const std::uint32_t segment = log_.segment_of(first);
  const std::uint64_t end = (std::uint64_t{segment} + 1) * log_.segment_records();
  if (newest_in(segment) < from || oldest_in(segment) >= before) {
    at = end;
    return true;
  }
  const auto to = static_cast<std::uint32_t>(std::min(end, first + kRowsPerLock));
  read_live(first, to);
  for (std::size_t i = 0; i < records_.size(); ++i) {
    const TierRow stored = row(i);
    if (const std::uint32_t stamp = stamp_of(stored); stamp >= from && stamp < before) {
      ids.push_back(stored.header().key());
    }
  }
  at = to;
  return true;
}

// Appends a row to the log. It is there once the log has been flushed.
std::uint32_t Tier::append_to_log(const std::byte* row, std::uint32_t last_step, std::uint32_t stamp,
                                  RowLog::For what) {
  const std::uint32_t record = log_.append(last_step, row, what);
  const std::uint32_t segment = log_.segment_of(record);
  // After an attach, the stamps of older records are unknown.
  if (segment >= newest_.size()) {
    newest_.resize(segment + 1, header_->clock);
    oldest_.resize(segment + 1, 0);
  }
  const bool first = record % log_.segment_records() == 0;
  auto &newest = newest_[segment], &oldest = oldest_[segment];
  newest = first ? stamp : std::max(newest, stamp);
  oldest = first ? stamp : std::min(oldest, stamp);
  return record;
}

// Returns whether there was one.
bool Tier::compact_block() {
  if (compacting_ == RowLog::kNone) {
    // What is about to be evicted must not become young again.
    const bool full = rows_total() + block_records() >= capacity_;
    compacting_ = log_.candidate(full ? log_.oldest() : RowLog::kNone);
    if (compacting_ == RowLog::kNone) compacting_ = expired_segment();
    if (compacting_ == RowLog::kNone) return false;
    cursor_ = compacting_ * log_.segment_records();
    generation_ = log_.generation(compacting_);
  }
  if (generation_ != log_.generation(compacting_)) {  // Others have emptied it, and it is used again.
    compacting_ = RowLog::kNone;
    return true;
  }
  const std::uint32_t end = (compacting_ + 1) * log_.segment_records();
  const std::uint32_t from = cursor_;
  const auto to = static_cast<std::uint32_t>(std::min<std::uint64_t>(end, from + block_records()));
  std::vector<TierRow> rows;
  try {
    read_live(from, to);
    for (std::size_t i = 0; i < records_.size(); ++i) rows.push_back(row(i));
  } catch (const std::runtime_error&) {
    set_compacting_aside();
    return true;
  }
  struct Moved {
    TierRow from;
    std::uint32_t record;
  };
  std::vector<Moved> moved;
  for (const TierRow& stored : rows) {
    if (!present(stored)) {
      try {
        drop(stored.record, stored.header().key());
      } catch (const std::runtime_error&) {
        set_compacting_aside();
        throw;
      }
    } else {
      moved.push_back(
          {stored, append_to_log(stored.row, stored.last_step, stamp_of(stored), RowLog::For::kCompaction)});
    }
  }
  if (!moved.empty()) log_.flush();
  header_->tier.next_record = log_.next();
  barrier();
  for (const Moved& m : moved) {
    const std::uint64_t id = m.from.header().key();
    if (!memory_->index.replace(id, store().number_of(m.from.record), store().number_of(m.record))) {
      const std::runtime_error error = store().damaged(store().number_of(m.from.record));
      set_compacting_aside();
      throw error;
    }
    barrier();
    log_.revive(m.record);
    memory_->snapshots.set_record(m.record, memory_->snapshots.record_changed(m.from.record));
    memory_->changes.move(store().mark_of(store().number_of(m.from.record)),
                          store().mark_of(store().number_of(m.record)));
    log_.release(m.from.record);
  }
  header_->tier.compacted += moved.size();
  cursor_ = to;
  if (to == end) compacting_ = RowLog::kNone;
  return true;
}

// Makes space for a row in a table at its capacity: rows that have been on disk for the longest are lost.
void Tier::evict() {
  if (log_.live_records() == 0) return;
  for (bool again = false;;) {
    const std::uint32_t full = log_.oldest();
    if (full == RowLog::kNone && !again) {  // Those set aside come before rows that have just come from memory.
      log_.try_again();
      again = true;
      continue;
    }
    const std::uint32_t segment =
        full != RowLog::kNone ? full : log_.segment_of(static_cast<std::uint32_t>(header_->tier.next_record - 1));
    try {
      if (evict_from(segment)) return;
    } catch (const std::runtime_error&) {
      if (full == RowLog::kNone) throw;
    }
    if (full == RowLog::kNone) break;
    log_.set_aside(segment);  // Otherwise one record that cannot be read would keep new rows out for good.
  }
  throw std::runtime_error(
      "rows on disk " + log_.path() +
      ": no row can be removed to make space, as none of them can be read. Go on from a checkpoint, "
      "with an empty table");
}

// Drops rows of a segment; returns whether there were any.
bool Tier::evict_from(std::uint32_t segment) {
  const auto of_block = static_cast<std::uint32_t>(block_records());
  const std::uint32_t end = (segment + 1) * log_.segment_records();
  for (std::uint32_t from = segment * log_.segment_records(); from < end; from += of_block) {
    read_live(from, std::min(from + of_block, end));
    if (records_.empty()) continue;
    const std::size_t most = std::max<std::uint64_t>(1, (capacity_ - header_->capacity) / kMovedShare);
    for (std::size_t i = 0; i < std::min(most, records_.size()); ++i) {
      const TierRow stored = row(i);
      drop(stored.record, stored.header().key());
      ++header_->counters.evicted;
    }
    return true;
  }
  return false;
}

}  // namespace persia
