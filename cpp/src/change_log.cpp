#include "persia/change_log.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "persia/row_store.hpp"
#include "persia/snapshot.hpp"
#include "persia/tier.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kMarksPerLock = std::uint64_t{1} << 22;  // positions to scan, half a megabyte of bits

}  // namespace

bool ChangeLog::begin(bool all, std::size_t removed_limit, const RowStore& rows, const Tier* tier) {
  const Header& header = rows.header();
  if (!all) {
    if (!known_ || passing_) return false;
    std::swap(marked_, taking_);  // `taking_` is empty: the last pass has ended
    removing_ = std::exchange(removed_, {});
  } else {
    ChangeLog whole;
    whole.on_ = whole.known_ = true;
    whole.taking_.fill(header.rows_used);
    if (tier != nullptr) {
      whole.taking_.append(rows.mark_of(rows.number_of(0)), tier->log().live_bits());
      for (const std::uint32_t number : tier->vacant()) whole.taking_.remove(number);
    }
    whole.expired_before_ = header.ttl.expired_before;
    *this = std::move(whole);
  }
  limit_ = removed_limit;
  expire_before_ = header.ttl.expired_before;
  cursor_ = swept_ = searched_ = 0;
  passing_ = true;
  return true;
}

bool ChangeLog::take(const RowStore& rows, Tier* tier, RowChanges& changes) {
  if (!passing_) throw std::runtime_error("what has changed is not known any more: begin with all rows");
  if (!removing_.empty()) {
    changes.removed.insert(changes.removed.end(), removing_.begin(), removing_.end());
    removing_ = {};
  } else if (expired_before_ < expire_before_ && find_expired(rows, tier, changes)) {
    return true;
  } else if (taking_.count() > 0) {
    take_marked(rows, tier, changes);
  } else {
    passing_ = false;
    return false;
  }
  return true;
}

// Looks at a few rows for those that have expired since the last pass. Returns whether there may be more.
bool ChangeLog::find_expired(const RowStore& rows, Tier* tier, RowChanges& changes) {
  const std::uint64_t used = rows.header().rows_used;
  if (swept_ < used) {
    const std::uint64_t end = std::min(swept_ + kRowsPerLock, used);
    for (; swept_ < end; ++swept_) {
      const auto number = static_cast<std::uint32_t>(swept_);
      const std::uint32_t stamp = rows.row(number)->stamp;
      if (!rows.vacant(number) && stamp >= expired_before_ && stamp < expire_before_) {
        changes.removed.push_back(rows.row(number)->key());
      }
    }
    return true;
  }
  if (tier != nullptr && tier->find_expired(searched_, expired_before_, expire_before_, changes.removed)) return true;
  expired_before_ = expire_before_;
  return false;
}

// Takes a few marked rows, from the cursor on; it starts again at the end, as rows may have moved behind it.
void ChangeLog::take_marked(const RowStore& rows, Tier* tier, RowChanges& changes) {
  if (cursor_ >= taking_.end()) cursor_ = 0;
  const std::uint64_t end = std::min(cursor_ + kMarksPerLock, taking_.end());
  const std::uint64_t first_record = tier != nullptr ? rows.mark_of(rows.number_of(0)) : end;
  const std::uint64_t rows_end = std::min(end, first_record);
  const auto append_values = [&](const std::byte* bytes) {
    changes.ids.push_back(reinterpret_cast<const RowHeader*>(bytes)->key());
    changes.embeddings.resize(changes.embeddings.size() + rows.dim());
    rows.read_embedding(bytes, changes.embeddings.data() + changes.embeddings.size() - rows.dim());
  };
  const auto pass = [&](std::uint64_t at) {
    taking_.remove(at);
    marked_.remove(at);
  };
  std::uint64_t count = 0;
  std::uint64_t at = taking_.next(cursor_, rows_end);
  for (; at < rows_end && count < kRowsPerLock; at = taking_.next(at + 1, rows_end)) {
    const auto number = static_cast<std::uint32_t>(at);
    if (!rows.vacant(number) && rows.row(number)->stamp >= expire_before_) append_values(rows.row_bytes(number));
    pass(at);
    ++count;
  }
  cursor_ = at;
  if (count > 0 || at >= end) return;
  auto& records = tier->records();
  records.clear();
  for (at = taking_.next(std::max(at, first_record), end); at < end && records.size() < kRowsPerLock;
       at = taking_.next(at + 1, end)) {
    records.push_back(static_cast<std::uint32_t>(at - first_record));
  }
  tier->read_records();
  for (std::size_t i = 0; i < records.size(); ++i) {
    if (const TierRow row = tier->row(i); tier->stamp_of(row) >= expire_before_) append_values(row.row);
    pass(first_record + records[i]);
  }
  cursor_ = at;
}

}  // namespace persia
