#include "persia/recency.hpp"

#include <algorithm>
#include <array>
#include <functional>
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
constexpr std::uint64_t kAhead = 32;
constexpr std::size_t kAheadInRun = 2;

// The i-th of `kSample` rows. They are not evenly spaced: neither may be the rows of a feature, or of a request.
std::uint64_t sampled(std::uint64_t i, std::uint64_t rows) {
  return rows <= kSample ? i : ((mix64(i) >> 32) * rows) >> 32;
}

}  // namespace

std::uint32_t& Stamps::operator[](std::uint64_t row) const {
  return reinterpret_cast<RowHeader*>(rows + row * stride)->stamp;
}

std::uint32_t VictimQueue::front(const Stamps& stamps, std::uint32_t clock) {
  for (;;) {
    while (current_.live > 0 && !current_.heads.empty()) {
      const std::uint64_t entry = current_.heads.front().entry;
      const auto row = static_cast<std::uint32_t>(entry);
      if (stamps[row] == entry >> 32) return row;
      skip(stamps);
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

void VictimQueue::pop(const Stamps& stamps, std::uint32_t clock) noexcept {
  if (current_.live > 0) {
    --current_.live;
    skip(stamps);
    // The next row is one of these, which came to the heads of their runs long ago.
    for (std::size_t i = 0; i < std::min<std::size_t>(3, current_.heads.size()); ++i) {
      const auto* const row = &stamps[static_cast<std::uint32_t>(current_.heads[i].entry)];
      prefetch(row);
      prefetch(reinterpret_cast<const std::byte*>(row) + kLine);
    }
  }
  advance(stamps, clock, current_.live);
}

void VictimQueue::prepare(const Stamps& stamps, std::uint32_t clock, std::uint64_t space) noexcept {
  advance(stamps, clock, current_.live + space);
}

void VictimQueue::clear() {
  current_ = {};
  next_ = {};
  cursor_ = rows_ = 0;
  unsorted_.clear();
  exhausted_ = 0;
}

void VictimQueue::leave(std::uint32_t row, std::uint32_t stamp) {
  if (stamp < current_.end) {
    --current_.live;
  } else if (row < cursor_) {
    --next_.live;
  }
}

// Replaces the first head by the next row of its run that has not been touched.
void VictimQueue::skip(const Stamps& stamps) {
  auto& heads = current_.heads;
  std::pop_heap(heads.begin(), heads.end(), std::greater<>());
  Run& run = current_.runs[heads.back().run];
  while (++run.at < run.size) {
    if (run.at + kAheadInRun < run.size) __builtin_prefetch(&stamps[run.rows[run.at + kAheadInRun]], 1);
    const std::uint32_t row = run.rows[run.at];
    const std::uint64_t stamp = stamps[row];
    if (stamp >= current_.end) continue;
    heads.back().entry = stamp << 32 | row;
    std::push_heap(heads.begin(), heads.end(), std::greater<>());
    return;
  }
  run.rows.reset();
  heads.pop_back();
}

// With the first queue empty, goes on to the next. Returns whether there is a row older than the clock.
bool VictimQueue::refill(const Stamps& stamps, std::uint32_t clock) {
  if (next_.end > current_.end) {
    collect(stamps, unread());
    proceed();
    if (current_.live > 0) return true;
  }
  clear();
  begin(stamps, clock);
  collect(stamps, unread());
  proceed();
  return current_.live > 0;
}

void VictimQueue::proceed() {
  current_ = std::move(next_);
  next_ = {};
  next_.end = current_.end;
}

// `left` more rows may be evicted or touched before the next queue is needed.
void VictimQueue::advance(const Stamps& stamps, std::uint32_t clock, std::uint64_t left) noexcept {
  try {
    if (next_.end > current_.end) {
      collect(stamps, unread() * 4 / (left * 3 + 1));
    } else if (left <= stamps.count / kReserve) {
      begin(stamps, clock);
    }
  } catch (const std::bad_alloc&) {
    clear();
  }
}

// The threshold comes from a sample; since all rows up to it are taken, the order is exact whatever it is.
void VictimQueue::begin(const Stamps& stamps, std::uint32_t clock) {
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
  next_.runs.reserve(stamps.count / kShare / run_ * 2 + 1);
  next_.heads.reserve(next_.runs.capacity());
  const std::size_t rank = total / kShare;
  next_.end = clock;
  if (rank < found) {
    std::nth_element(sample.begin(), sample.begin() + rank, sample.begin() + found);
    next_.end = std::min(sample[rank], clock - 1) + 1;
  }
  cursor_ = 0;
  rows_ = stamps.count;  // Rows added later are too recent.
}

void VictimQueue::collect(const Stamps& stamps, std::uint64_t count) {
  if (unread() == 0) return;
  const std::uint64_t end = std::min(cursor_ + count, rows_);
  read_ += end - cursor_;
  for (; cursor_ < end; ++cursor_) {
    __builtin_prefetch(&stamps[cursor_ + kAhead]);
    const std::uint64_t stamp = stamps[cursor_];
    if (stamp < current_.end || stamp >= next_.end) continue;
    unsorted_.push_back(stamp << 32 | cursor_);
    ++next_.live;
    if (unsorted_.size() == run_) end_run();
  }
  if (unread() == 0 && !unsorted_.empty()) end_run();
}

void VictimQueue::end_run() {
  std::sort(unsorted_.begin(), unsorted_.end());
  auto rows = std::make_unique_for_overwrite<std::uint32_t[]>(unsorted_.size());
  std::transform(unsorted_.begin(), unsorted_.end(), rows.get(),
                 [](std::uint64_t entry) { return static_cast<std::uint32_t>(entry); });
  next_.heads.push_back({unsorted_[0], next_.runs.size()});
  std::push_heap(next_.heads.begin(), next_.heads.end(), std::greater<>());
  next_.runs.push_back({std::move(rows), 0, unsorted_.size()});
  unsorted_.clear();
}

std::uint32_t renumber(const Stamps& stamps) {
  std::vector<std::uint64_t> all(stamps.count);
  for (std::uint64_t row = 0; row < stamps.count; ++row) all[row] = std::uint64_t{stamps[row]} << 32 | row;
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
