#include "persia/eviction_queue.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <new>
#include <utility>

#include "persia/layout.hpp"
#include "persia/memory.hpp"
#include "persia/mix.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kSample = 512;
constexpr std::uint64_t kShare = 8;     // a queue has an eighth of the rows ...
constexpr std::uint64_t kReserve = 16;  // ... and the scan for the next one begins when a sixteenth is left
constexpr std::uint64_t kPart = 4;      // the scan leaves one in this number of them
constexpr std::uint64_t kMidpoint = 3;  // in shares
constexpr std::uint64_t kAhead = 32;
constexpr std::size_t kAheadInRun = 2;
constexpr std::size_t kSkipped = 4;  // rows that have left, for each one that leaves
constexpr std::size_t kAll = std::numeric_limits<std::size_t>::max();

// The i-th of `kSample` rows. They are not evenly spaced: neither may be the rows of a feature, or of a request.
std::uint64_t sampled(std::uint64_t i, std::uint64_t rows) {
  return rows <= kSample ? i : ((mix64(i) >> 32) * rows) >> 32;
}

}  // namespace

std::uint32_t& Stamps::operator[](std::uint64_t row) const {
  return reinterpret_cast<RowHeader*>(rows + row * stride)->stamp;
}

std::uint32_t EvictionQueue::front(const Stamps& stamps, std::uint32_t clock) {
  for (;;) {
    while (current_.live > 0 && !current_.heads.empty()) {
      const std::uint64_t entry = current_.heads.front().entry;
      const auto row = static_cast<std::uint32_t>(entry);
      if (stamps[row] == entry >> 32) return row;
      skip(current_, stamps, kAll);
    }
    if (exhausted_ == clock) return 0;
    try {
      if (!refill(stamps, clock)) exhausted_ = clock;
    } catch (...) {
      clear();
      throw;
    }
  }
}

void EvictionQueue::pop(const Stamps& stamps, std::uint32_t clock) noexcept {
  space_ = 0;
  used_ = true;
  advance(stamps, clock);  // before the row leaves: its stamp is still the old one
  if (current_.live == 0 || current_.heads.empty()) return;
  --current_.live;
  if (scanning() && static_cast<std::uint32_t>(current_.heads.front().entry) < cursor_) --next_.live;
  skip(current_, stamps, kAll);
  // The next row is one of these, which came to the heads of their runs long ago.
  for (std::size_t i = 0; i < std::min<std::size_t>(3, current_.heads.size()); ++i) {
    const auto* const row = &stamps[static_cast<std::uint32_t>(current_.heads[i].entry)];
    prefetch(row);
    prefetch(reinterpret_cast<const std::byte*>(row) + kLine);
  }
}

void EvictionQueue::prepare(const Stamps& stamps, std::uint32_t clock, std::uint64_t space) noexcept {
  space_ = space;
  used_ = true;
  advance(stamps, clock);
}

void EvictionQueue::make_ready(const Stamps& stamps, std::uint32_t clock, std::uint64_t space) noexcept {
  if (current_.live > 0 || scanning() || space > stamps.count / kReserve) return;
  space_ = space;
  try {
    refill(stamps, clock);
  } catch (const std::bad_alloc&) {
    clear();
  }
}

void EvictionQueue::clear() {
  current_ = {};
  next_ = {};
  cursor_ = rows_ = 0;
  used_ = false;
  unsorted_.clear();
  exhausted_ = midpoint_ = 0;
}

void EvictionQueue::leave(const Stamps& stamps, std::uint32_t clock, std::uint32_t row, std::uint32_t before) noexcept {
  if (before < current_.end) --current_.live;
  if (scanning() && row < cursor_) --next_.live;
  if (first_has_left(current_, stamps)) skip(current_, stamps, kSkipped);
  advance(stamps, clock);
}

bool EvictionQueue::first_has_left(const Queue& queue, const Stamps& stamps) {
  if (queue.heads.empty()) return false;
  const std::uint64_t entry = queue.heads.front().entry;
  return stamps[static_cast<std::uint32_t>(entry)] != entry >> 32;
}

// Replaces the first head by the next row of its run that has not left; or goes on by `most` that have.
void EvictionQueue::skip(Queue& queue, const Stamps& stamps, std::size_t most) {
  auto& heads = queue.heads;
  std::pop_heap(heads.begin(), heads.end(), std::greater<>());
  Run& run = queue.runs[heads.back().run];
  while (++run.at < run.size) {
    if (run.at + kAheadInRun < run.size) __builtin_prefetch(&stamps[run.rows[run.at + kAheadInRun]], 1);
    const std::uint32_t row = run.rows[run.at];
    const std::uint64_t stamp = stamps[row];
    if (stamp < queue.end) {
      heads.back().entry = stamp << 32 | row;
    } else {
      ++skipped_;
      if (--most > 0) continue;
    }
    std::push_heap(heads.begin(), heads.end(), std::greater<>());
    return;
  }
  run.rows.reset();
  heads.pop_back();
}

// With the queue empty, ends the scan or makes a whole one. Returns whether there is a row older than the clock.
bool EvictionQueue::refill(const Stamps& stamps, std::uint32_t clock) {
  if (scanning()) {
    finish(stamps);
    if (current_.live > 0) return true;
  }
  clear();
  begin(stamps, clock);
  if (scanning()) finish(stamps);
  return current_.live > 0;
}

// A row has left the queue or the rows of the scan, or has been added. While a scan went on, up to three quarters of
// the queue have left, and come first in its own. A quarter remains before that is needed: each row that leaves skips
// three of them, and one for itself.
void EvictionQueue::advance(const Stamps& stamps, std::uint32_t clock) noexcept {
  try {
    if (scanning() && cursor_ < rows_) {
      collect(stamps, pace_);
    } else if (scanning()) {
      if (first_has_left(next_, stamps)) skip(next_, stamps, kSkipped);
      if (current_.live == 0 || !first_has_left(next_, stamps)) change();
    } else if (used_ && current_.live + space_ <= stamps.count / kReserve) {
      begin(stamps, clock);
    }
  } catch (const std::bad_alloc&) {
    clear();
  }
}

// The threshold comes from a sample; since all rows up to it are taken, the order is exact whatever it is.
void EvictionQueue::begin(const Stamps& stamps, std::uint32_t clock) {
  if (clock <= current_.end) return;
  std::array<std::uint32_t, kSample> sample;
  const std::uint64_t total = std::min(kSample, stamps.count);
  std::size_t found = 0;
  for (std::uint64_t i = 0; i < total; ++i) {
    const std::uint32_t stamp = stamps[sampled(i, stamps.count)];
    if (stamp >= current_.end) sample[found++] = stamp;
  }
  read_ += total;
  unsorted_.reserve(run_);
  next_.runs.reserve((current_.live + stamps.count / kShare) / run_ * 2 + 1);
  next_.heads.reserve(next_.runs.capacity());
  const std::size_t rank = total / kShare;
  next_.end = clock;
  if (rank < found) {
    std::nth_element(sample.begin(), sample.begin() + rank, sample.begin() + found);
    next_.end = std::min(sample[rank], clock - 1) + 1;
  }
  // Rows of the queue, which are not in the sample, are older.
  const std::size_t middle = std::min<std::size_t>(total * kMidpoint / kShare, total - 1);
  midpoint_ = next_.end;
  if (middle >= total - found) {
    const auto at = sample.begin() + (middle - (total - found));
    std::nth_element(sample.begin(), at, sample.begin() + found);
    midpoint_ = std::max(midpoint_, std::min(*at, clock));
  }
  cursor_ = 0;
  rows_ = stamps.count;  // Rows added later are too recent.
  pace_ = rows_ * kPart / ((current_.live + space_) * (kPart - 1) + 1) + 1;
  used_ = false;
}

void EvictionQueue::collect(const Stamps& stamps, std::uint64_t count) {
  const std::uint64_t end = std::min(cursor_ + count, rows_);
  read_ += end - cursor_;
  for (; cursor_ < end; ++cursor_) {
    __builtin_prefetch(&stamps[cursor_ + kAhead]);
    const std::uint64_t stamp = stamps[cursor_];
    if (stamp >= next_.end) continue;
    unsorted_.push_back(stamp << 32 | cursor_);
    ++next_.live;
    if (unsorted_.size() == run_) end_run();
  }
  if (cursor_ < rows_) return;
  if (!unsorted_.empty()) end_run();
  std::make_heap(next_.heads.begin(), next_.heads.end(), std::greater<>());
}

void EvictionQueue::end_run() {
  std::sort(unsorted_.begin(), unsorted_.end());
  auto rows = std::make_unique_for_overwrite<std::uint32_t[]>(unsorted_.size());
  std::transform(unsorted_.begin(), unsorted_.end(), rows.get(),
                 [](std::uint64_t entry) { return static_cast<std::uint32_t>(entry); });
  next_.heads.push_back({unsorted_[0], next_.runs.size()});
  next_.runs.push_back({std::move(rows), 0, unsorted_.size()});
  unsorted_.clear();
}

// Ends the scan if it goes on, and uses its queue immediately.
void EvictionQueue::finish(const Stamps& stamps) {
  if (cursor_ < rows_) collect(stamps, rows_);
  change();
}

// After a scan: what is left of the queue before is in the new one, too.
void EvictionQueue::change() {
  current_ = std::exchange(next_, {});
  next_.end = current_.end;
}

std::uint32_t renumber(const Stamps& stamps, bool vacancies) {
  std::vector<std::uint64_t> all;
  all.reserve(stamps.count);
  for (std::uint64_t row = 0; row < stamps.count; ++row) {
    if (!vacancies || stamps[row] != kVacant) all.push_back(std::uint64_t{stamps[row]} << 32 | row);
  }
  std::sort(all.begin(), all.end());
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i > 0 && all[i] >> 32 != all[i - 1] >> 32) ++rank;
    stamps[static_cast<std::uint32_t>(all[i])] = rank;
    barrier();
  }
  return rank;
}

}  // namespace persia
