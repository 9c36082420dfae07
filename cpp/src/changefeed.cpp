#include "persia/changefeed.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "persia/shard.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kMarksPerLock = std::uint64_t{1} << 22;  // positions to scan, half a megabyte of bits

}  // namespace

bool Shard::begin_changes(bool all, std::size_t removed_limit) {
  const std::lock_guard lock(mutex_);
  Changefeed& feed = changefeed_;
  if (!all) {
    if (!feed.known || feed.passing) return false;
    std::swap(feed.marked, feed.taking);  // `taking` is empty: the last pass has ended
    feed.removing = std::exchange(feed.removed, {});
  } else {
    Changefeed whole;
    whole.on = whole.known = true;
    whole.taking.fill(header_->rows_used);
    if (tier_) {
      whole.taking.append(rows_.mark_of(rows_.number_of(0)), tier_->log.live_bits());
      for (const std::uint32_t number : tier_->vacant) whole.taking.remove(number);
    }
    whole.expired_before = expiry_.expired_before();
    feed = std::move(whole);
  }
  feed.limit = removed_limit;
  feed.expire_before = expiry_.expired_before();
  feed.cursor = feed.swept = feed.searched = 0;
  feed.passing = true;
  return true;
}

void Shard::end_changes() {
  const std::lock_guard lock(mutex_);
  changefeed_.lose();
}

// Takes a piece under one lock at a time, so that requests wait for a few rows only.
bool Shard::take_changes(std::uint64_t max_rows, RowChanges& changes) {
  const std::size_t before = changes.ids.size() + changes.removed.size();
  do {
    const std::lock_guard lock(mutex_);
    Changefeed& feed = changefeed_;
    if (!feed.passing) throw std::runtime_error("what has changed is not known any more: begin with all rows");
    if (!feed.removing.empty()) {
      changes.removed.insert(changes.removed.end(), feed.removing.begin(), feed.removing.end());
      feed.removing = {};
    } else if (feed.expired_before < feed.expire_before && !search_left(changes)) {
      continue;
    } else if (feed.taking.count() > 0) {
      take_marked(changes);
    } else {
      feed.passing = false;
      return false;
    }
  } while (changes.ids.size() + changes.removed.size() - before < max_rows);
  return true;
}

// Looks at a few rows for those that have left since the last pass. Returns whether all have been looked at.
bool Shard::search_left(RowChanges& changes) {
  Changefeed& feed = changefeed_;
  const auto leaves = [&](std::uint32_t stamp) { return stamp >= feed.expired_before && stamp < feed.expire_before; };
  if (feed.swept < header_->rows_used) {
    const std::uint64_t end = std::min(feed.swept + kRowsPerLock, header_->rows_used);
    for (; feed.swept < end; ++feed.swept) {
      const auto number = static_cast<std::uint32_t>(feed.swept);
      if (!rows_.vacant(number) && leaves(rows_.row(number)->stamp))
        changes.removed.push_back(rows_.row(number)->key());
    }
    return false;
  }
  if (tier_ && feed.searched < tier_->log.end_record()) {
    const auto from = static_cast<std::uint32_t>(feed.searched);
    const std::uint32_t segment = tier_->log.segment_of(from);
    const std::uint64_t end = (std::uint64_t{segment} + 1) * tier_->log.segment_records();
    if (tier_->newest_in(segment, header_->clock) < feed.expired_before ||
        tier_->oldest_in(segment) >= feed.expire_before) {
      feed.searched = end;
      return false;
    }
    const auto to = static_cast<std::uint32_t>(std::min(end, from + kRowsPerLock));
    read_live(from, to);
    for (std::size_t i = 0; i < tier_->records.size(); ++i) {
      const ColdRow cold = cold_row(i);
      if (leaves(stamp_of(cold))) changes.removed.push_back(reinterpret_cast<const RowHeader*>(cold.row)->key());
    }
    feed.searched = to;
    return false;
  }
  feed.expired_before = feed.expire_before;
  return true;
}

// Takes a few marked rows, from the cursor on; it starts again at the end, as rows may have moved behind it.
void Shard::take_marked(RowChanges& changes) {
  Changefeed& feed = changefeed_;
  if (feed.cursor >= feed.taking.end()) feed.cursor = 0;
  const std::uint64_t end = std::min(feed.cursor + kMarksPerLock, feed.taking.end());
  const std::uint64_t disk = tier_ ? rows_.mark_of(rows_.number_of(0)) : end;
  const auto append_values = [&](const std::byte* bytes) {
    const auto& r = *reinterpret_cast<const RowHeader*>(bytes);
    changes.ids.push_back(r.key());
    changes.embeddings.resize(changes.embeddings.size() + rows_.dim());
    rows_.read_embedding(bytes, changes.embeddings.data() + changes.embeddings.size() - rows_.dim());
  };
  const auto pass = [&](std::uint64_t at) {
    feed.taking.remove(at);
    feed.marked.remove(at);
  };
  std::uint64_t count = 0;
  std::uint64_t at = feed.taking.next(feed.cursor, std::min(end, disk));
  for (; at < std::min(end, disk) && count < kRowsPerLock; at = feed.taking.next(at + 1, std::min(end, disk))) {
    const auto number = static_cast<std::uint32_t>(at);
    if (!rows_.vacant(number) && rows_.row(number)->stamp >= feed.expire_before) append_values(rows_.row_bytes(number));
    pass(at);
    ++count;
  }
  feed.cursor = at;
  if (count > 0 || at >= end) return;
  auto& records = tier_->records;
  records.clear();
  for (at = feed.taking.next(std::max(at, disk), end); at < end && records.size() < kRowsPerLock;
       at = feed.taking.next(at + 1, end)) {
    records.push_back(static_cast<std::uint32_t>(at - disk));
  }
  read_records();
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (const ColdRow cold = cold_row(i); stamp_of(cold) >= feed.expire_before) append_values(cold.row);
    pass(disk + records[i]);
  }
  feed.cursor = at;
}

}  // namespace persia
