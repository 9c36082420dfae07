#include "persia/snapshot.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

namespace persia {

void ChangedRows::set(std::uint32_t row, bool changed) noexcept {
  try {
    if (row / 64 >= words_.size()) words_.resize(row / 64 + 1, ~std::uint64_t{0});
  } catch (const std::bad_alloc&) {
    return;  // then it counts as changed
  }
  const std::uint64_t bit = std::uint64_t{1} << (row % 64);
  words_[row / 64] = changed ? words_[row / 64] | bit : words_[row / 64] & ~bit;
}

Snapshot::Snapshot(const SnapshotOptions& options, std::uint32_t expired_before, std::uint64_t rows, std::size_t stride,
                   Changes& before)
    : id_(options.id),
      all_(options.since == 0),
      live_(options.live),
      expired_before_(expired_before),
      only_(options.only),
      rows_(rows),
      old_(options.directory, stride, options.buffer_bytes),
      before_(std::move(before)) {}

void Snapshot::keep_old(OldRows::Tag tag, const std::byte* row) noexcept {
  try {
    old_.add(tag, row);
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void Snapshot::fail(const std::string& why) noexcept {
  try {
    failure_ = why;
  } catch (...) {
    failure_ = "lost";  // short enough to need no memory
  }
}

// Notes that the reader has passed all rows below `end`. Returns the old ones among them.
const std::vector<OldRows::Old>& Snapshot::pass(std::uint64_t end) {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  next_ = end;
  try {
    return old_.take(end);
  } catch (const std::exception& error) {
    fail(error.what());  // The old rows that have been taken are lost.
    throw;
  }
}

bool Snapshot::read(const RowStore& rows, const ChangedRows& now, RowBatch& batch) {
  const std::uint64_t begin = next_;
  const std::uint64_t end = std::min(begin + kRowsPerLock, rows_);
  const auto& old = pass(end);
  auto kept = old.begin();
  for (std::uint64_t number = begin; number < end; ++number) {
    if (kept != old.end() && kept->tag.number == number) {
      const auto& header = *reinterpret_cast<const RowHeader*>(kept->row);
      if (takes(header.key(), header.stamp)) rows.append(kept->row, kept->tag.last_step, batch);
      // A row that was about to change, and did not as there was no space, is there twice, with the same bytes.
      while (kept != old.end() && kept->tag.number == number) ++kept;
    } else if (const auto n = static_cast<std::uint32_t>(number); in_place(n, now)) {
      if (const RowHeader& header = *rows.row(n); takes(header.key(), header.stamp)) rows.append(n, batch);
    }
  }
  return end < rows_;
}

std::vector<std::uint64_t> Snapshot::evicted() const {
  std::vector<std::uint64_t> ids;
  std::copy_if(before_.evicted.begin(), before_.evicted.end(), std::back_inserter(ids),
               [this](std::uint64_t id) { return wants(id); });
  return ids;
}

void Snapshots::check(const SnapshotOptions& options) const {
  check_none();
  if (options.id <= rows_->header().snapshot) {
    throw std::invalid_argument("the number of a snapshot must be a new one");
  }
  if (options.since != 0 && options.since != changes_.since) {
    throw std::invalid_argument("what has changed since snapshot " + std::to_string(options.since) + " is not known");
  }
}

void Snapshots::begin(const SnapshotOptions& options, std::uint32_t expired_before, std::uint64_t records) {
  const std::uint64_t used = rows_->header().rows_used;
  Changes after{ChangedRows(used), ChangedRows(records), options.id, options.evicted_limit, {}};
  SnapshotOptions now = options;
  now.live = options.live && !rows_->tiered();  // rows that move to the tier and back would be missed, or read twice
  open_ = std::make_unique<Snapshot>(now, expired_before, used, rows_->stride(), changes_);
  changes_ = std::move(after);
  rows_->header().snapshot = options.id;
}

Snapshot& Snapshots::reading(std::uint32_t id) const {
  if (!open_ || open_->id() != id) throw std::runtime_error("there is no such snapshot of this shard: it was ended");
  return *open_;
}

void Snapshots::check_none() const {
  if (open_) throw std::runtime_error("a checkpoint is being read from these rows: wait for its end");
}

}  // namespace persia
