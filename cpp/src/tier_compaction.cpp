// Rows on disk: the space of those that have come back, have been changed or have left is freed.
#include <algorithm>

#include "persia/shard.hpp"

namespace persia {

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
    while (tier_->to_compact >= RowLog::block_records(rows_.stride())) {
      if (!compact_block()) return;
      tier_->to_compact -= RowLog::block_records(rows_.stride());
    }
  } catch (const std::runtime_error&) {
    // What asked for room has got it. If the disk cannot be written, the next row that leaves memory says so.
  }
}

// A segment that cannot be read is left alone. Whoever needs one of its rows gets the error.
void Shard::set_compacting_aside() {
  tier_->log.set_aside(tier_->compacting);
  tier_->compacting = RowLog::kNone;
}

// A segment whose rows have all left the table, or none.
std::uint32_t Shard::expired_segment() {
  const std::uint32_t expired_before = expiry_.expired_before();
  if (expired_before == tier_->looked_for) return RowLog::kNone;
  for (std::uint32_t segment = 0; segment < tier_->newest.size(); ++segment) {
    const RowLog& log = tier_->log;
    if (tier_->newest[segment] >= expired_before || !log.full(segment) || log.is_set_aside(segment)) continue;
    if (log.live_in(segment) > 0) return segment;
  }
  tier_->looked_for = expired_before;
  return RowLog::kNone;
}

// Appends a row to the log. It is there once the log has been flushed.
std::uint32_t Shard::append_to_log(const std::byte* row, std::uint32_t last_step, std::uint32_t stamp,
                                   RowLog::For what) {
  const std::uint32_t record = tier_->log.append(last_step, row, what);
  const std::uint32_t segment = tier_->log.segment_of(record);
  // After an attach, the stamps of older records are unknown.
  if (segment >= tier_->newest.size()) {
    tier_->newest.resize(segment + 1, header_->clock);
    tier_->oldest.resize(segment + 1, 0);
  }
  const bool first = record % tier_->log.segment_records() == 0;
  auto &newest = tier_->newest[segment], &oldest = tier_->oldest[segment];
  newest = first ? stamp : std::max(newest, stamp);
  oldest = first ? stamp : std::min(oldest, stamp);
  return record;
}

// Returns whether there was one.
bool Shard::compact_block() {
  RowLog& log = tier_->log;
  if (tier_->compacting == RowLog::kNone) {
    // What is about to be evicted must not become young again.
    const bool full = rows_total() + RowLog::block_records(rows_.stride()) >= tier_->capacity;
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
  const auto to =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(end, from + RowLog::block_records(rows_.stride())));
  std::vector<ColdRow> rows;
  try {
    read_live(from, to);
    for (std::size_t i = 0; i < tier_->records.size(); ++i) rows.push_back(cold_row(i));
  } catch (const std::runtime_error&) {
    set_compacting_aside();
    return true;
  }
  struct Moved {
    ColdRow from;
    std::uint32_t record;
  };
  std::vector<Moved> moved;
  for (const ColdRow& cold : rows) {
    if (!present(cold)) {
      try {
        drop_cold(cold.record, reinterpret_cast<const RowHeader*>(cold.row)->key());
      } catch (const std::runtime_error&) {
        set_compacting_aside();
        throw;
      }
    } else {
      moved.push_back({cold, append_to_log(cold.row, cold.last_step, stamp_of(cold), RowLog::For::kCompaction)});
    }
  }
  if (!moved.empty()) log.flush();
  header_->cold.next_record = log.next();
  barrier();
  for (const Moved& m : moved) {
    const std::uint64_t id = reinterpret_cast<const RowHeader*>(m.from.row)->key();
    if (!index_.replace(id, rows_.number_of(m.from.record), rows_.number_of(m.record))) {
      const std::runtime_error error = rows_.damaged(rows_.number_of(m.from.record));
      set_compacting_aside();
      throw error;
    }
    barrier();
    log.revive(m.record);
    snapshots_.set_record(m.record, snapshots_.record_changed(m.from.record));
    changefeed_.move(rows_.mark_of(rows_.number_of(m.from.record)), rows_.mark_of(rows_.number_of(m.record)));
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
  for (bool again = false;;) {
    const std::uint32_t full = log.oldest();
    if (full == RowLog::kNone && !again) {  // Those set aside come before rows that have just left memory.
      log.try_again();
      again = true;
      continue;
    }
    const std::uint32_t segment =
        full != RowLog::kNone ? full : log.segment_of(static_cast<std::uint32_t>(header_->cold.next_record - 1));
    try {
      if (evict_from(segment)) return;
    } catch (const std::runtime_error&) {
      if (full == RowLog::kNone) throw;
    }
    if (full == RowLog::kNone) break;
    log.set_aside(segment);  // Otherwise one record that cannot be read would keep new rows out for good.
  }
  throw std::runtime_error("rows on disk " + log.path() +
                           ": no row can leave to make room, as none of them can be read. Go on from a checkpoint, "
                           "with an empty table");
}

// Drops rows of a segment; returns whether there were any.
bool Shard::evict_from(std::uint32_t segment) {
  const auto of_block = static_cast<std::uint32_t>(RowLog::block_records(rows_.stride()));
  const std::uint32_t end = (segment + 1) * tier_->log.segment_records();
  for (std::uint32_t from = segment * tier_->log.segment_records(); from < end; from += of_block) {
    read_live(from, std::min(from + of_block, end));
    if (tier_->records.empty()) continue;
    const std::size_t most = std::max<std::uint64_t>(1, (tier_->capacity - header_->capacity) / kShareThatLeaves);
    for (std::size_t i = 0; i < std::min(most, tier_->records.size()); ++i) {
      const ColdRow cold = cold_row(i);
      drop_cold(cold.record, reinterpret_cast<const RowHeader*>(cold.row)->key());
      ++header_->counters.evicted;
    }
    return true;
  }
  return false;
}

}  // namespace persia
