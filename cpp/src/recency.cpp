#include "persia/recency.hpp"

#include <algorithm>

#include "persia/layout.hpp"
#include "persia/memory.hpp"

namespace persia {
namespace {
constexpr std::uint64_t kSample = 65536;
constexpr std::size_t kAhead = 8;
}  // namespace

std::uint32_t& Stamps::operator[](std::uint64_t row) const {
  return reinterpret_cast<RowHeader*>(rows + row * stride)->stamp;
}

std::uint32_t VictimQueue::pop(const Stamps& stamps, std::uint32_t clock) {
  const std::uint32_t row = front(stamps, clock);
  if (next_ < queue_.size()) ++next_;
  return row;
}

std::uint32_t VictimQueue::front(const Stamps& stamps, std::uint32_t clock) {
  for (;;) {
    for (; next_ < queue_.size(); ++next_) {
      if (next_ + kAhead < queue_.size()) {
        __builtin_prefetch(stamps.rows + static_cast<std::uint32_t>(queue_[next_ + kAhead]) * stamps.stride);
      }
      const std::uint64_t entry = queue_[next_];
      const auto row = static_cast<std::uint32_t>(entry);
      if (stamps[row] == entry >> 32) return row;
    }
    if (exhausted_ == clock) return 0;
    scan(stamps, clock);
    if (queue_.empty()) exhausted_ = clock;
  }
}

void VictimQueue::clear() {
  queue_.clear();
  next_ = 0;
  exhausted_ = 0;
}

// The threshold comes from a sample; since all rows up to it are taken, the order is exact whatever it is.
void VictimQueue::scan(const Stamps& stamps, std::uint32_t clock) {
  const std::uint64_t step = std::max<std::uint64_t>(1, stamps.count / kSample);
  std::vector<std::uint32_t> sample;
  for (std::uint64_t row = 0; row < stamps.count; row += step) sample.push_back(stamps[row]);
  const auto eighth = sample.begin() + static_cast<std::ptrdiff_t>(sample.size() / 8);
  std::nth_element(sample.begin(), eighth, sample.end());
  collect(stamps, std::min(*eighth, clock - 1));
  if (queue_.empty()) collect(stamps, clock - 1);
}

void VictimQueue::collect(const Stamps& stamps, std::uint32_t newest) {
  queue_.clear();
  next_ = 0;
  for (std::uint64_t row = 0; row < stamps.count; ++row) {
    const std::uint64_t stamp = stamps[row];
    if (stamp <= newest) queue_.push_back(stamp << 32 | row);
  }
  std::sort(queue_.begin(), queue_.end());
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
