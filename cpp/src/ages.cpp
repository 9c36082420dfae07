// Rows that leave after a time: which ones have, and what becomes of their memory.
#include <algorithm>

#include "persia/memory.hpp"
#include "persia/shard.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kMarksOfTtl = 16;  // marks in a time to live; twice as many are kept
constexpr std::uint64_t kPartsOfTtl = 64;  // how often in a time to live marks are looked at
constexpr std::uint64_t kSweep = 4;        // rows that each new row looks at for those that have left
constexpr std::uint64_t kListed = 8;       // one of so many rows is listed at most

std::uint64_t part(std::uint64_t ttl, std::uint64_t parts) { return std::max<std::uint64_t>(1, ttl / parts); }

std::uint64_t kept(const Ages& ages) { return std::min<std::uint64_t>(ages.marks_made, kAgeMarks); }

}  // namespace

bool Shard::sound(const Ages& ages, std::uint32_t clock) {
  const std::span marks(ages.marks, kept(ages));
  return ages.left_before <= std::uint64_t{clock} + 1 && std::all_of(marks.begin(), marks.end(), [&](const AgeMark& m) {
           return m.age <= ages.age && m.clock <= clock;
         });
}

void Shard::advance_clock(std::uint64_t by) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t ttl = config_->ttl;
  if (ttl == 0) return;
  Ages& ages = header_->ages;
  if (ages.unit != config_->ttl_unit) {  // The marks say nothing of time in another one.
    ages.marks_made = 0;
    barrier();
    ages.age = 0;
    ages.unit = config_->ttl_unit;
  }
  const std::uint64_t before = ages.age, granule = part(ttl, kPartsOfTtl);
  ages.age = before + by;
  barrier();
  if (ages.marks_made > 0 && ages.age / granule == before / granule) return;
  std::uint32_t left_before = ages.left_before;
  for (std::uint64_t i = 0; i < kept(ages); ++i) {
    const AgeMark& mark = ages.marks[i];
    if (ages.age - mark.age >= ttl) left_before = std::max(left_before, mark.clock + 1);
  }
  if (left_before > ages.left_before) {
    ages.left_before = left_before;
    sweep_rows_ = header_->rows_used;
    barrier();
  }
  const std::uint64_t made = ages.marks_made;
  if (made > 0 && ages.age - ages.marks[(made - 1) % kAgeMarks].age < part(ttl, kMarksOfTtl)) return;
  AgeMark& mark = ages.marks[made % kAgeMarks];
  mark.age = ages.age;  // first: a mark of an early age with a late clock would make rows leave
  barrier();
  mark.clock = header_->clock;
  barrier();
  ages.marks_made = made + 1;
}

// The least stamp of an imported row, which counts as met now.
std::uint32_t Shard::least_stamp() const {
  const Ages& ages = header_->ages;
  if (ages.marks_made == 0) return ages.left_before;
  return std::max(ages.left_before, ages.marks[(ages.marks_made - 1) % kAgeMarks].clock + 1);
}

// The row of an id, which has left, to be written once more.
std::uint32_t Shard::renewed(std::uint32_t number) {
  mark_changed(number);
  rows_.save_undo(number);
  renew(number);
  return number;
}

// A row that has left, or none. Looks at a few rows only, so that no request waits for a scan of all, and lists those
// that it does not need yet: rows that have left lie together, and so do those that stay.
std::uint32_t Shard::reusable() {
  for (std::uint64_t i = 0; i < kSweep && sweep_rows_ > 0 && left_.size() <= header_->rows_used / kListed; ++i) {
    --sweep_rows_;
    if (sweep_ >= header_->rows_used) sweep_ = 0;
    __builtin_prefetch(rows_.row_bytes(static_cast<std::uint32_t>(sweep_)) + kSweep * rows_.stride());
    const auto number = static_cast<std::uint32_t>(sweep_++);
    if (has_left(number)) left_.push_back(number);
  }
  for (std::uint64_t i = 0; i < kSweep && !left_.empty(); ++i) {
    const std::uint32_t number = left_.back();
    left_.pop_back();
    if (has_left(number)) return number;  // Its id may have come back.
  }
  return Index::kNone;
}

void Shard::forget_left() {
  sweep_ = sweep_rows_ = 0;
  left_.clear();
}

// Once in 2^32 requests. What has left stays so; a kill in between brings it back for another time to live, as it
// forgets the marks.
void Shard::renumber_rows() {
  const Stamps all = rows_.stamps();
  Ages& ages = header_->ages;
  std::uint64_t oldest = all.count;  // of the rows that have not left
  for (std::uint64_t row = 0; ages.left_before > 0 && row < all.count; ++row) {
    if (!rows_.vacant(static_cast<std::uint32_t>(row)) && all[row] >= ages.left_before &&
        (oldest == all.count || all[row] < all[oldest]))
      oldest = row;
  }
  const bool any_left = ages.left_before > 0;
  ages.left_before = 0;
  ages.marks_made = 0;
  barrier();
  header_->clock = renumber(all, tier_ != nullptr);
  if (any_left) ages.left_before = oldest < all.count ? all[oldest] : header_->clock + 1;
  forget_left();
  eviction_.clear();
}

}  // namespace persia
