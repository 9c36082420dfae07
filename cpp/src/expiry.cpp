#include "persia/expiry.hpp"

#include <algorithm>
#include <span>

#include "persia/memory.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kMarksOfTtl = 16;  // marks in a time to live; twice as many are kept
constexpr std::uint64_t kPartsOfTtl = 64;  // how often in a time to live marks are looked at
constexpr std::uint64_t kSweep = 4;        // rows that each new row looks at for expired ones
constexpr std::uint64_t kListed = 8;       // at most one in this number of rows is listed

std::uint64_t part(std::uint64_t ttl, std::uint64_t parts) { return std::max<std::uint64_t>(1, ttl / parts); }

std::uint64_t kept(const TtlState& state) { return std::min<std::uint64_t>(state.marks_made, kTtlMarks); }

}  // namespace

bool Expiry::sound(const TtlState& state, std::uint32_t clock) {
  const std::span marks(state.marks, kept(state));
  return state.expired_before <= std::uint64_t{clock} + 1 &&
         std::all_of(marks.begin(), marks.end(),
                     [&](const TtlMark& m) { return m.time <= state.time && m.clock <= clock; });
}

void Expiry::set(const TtlState& state) {
  *state_ = state;
  expired_before_ = state.expired_before;
  forget();
}

void Expiry::mend() {
  if (!sound(*state_, rows_->header().clock)) *state_ = {};
  expired_before_ = state_->expired_before;
}

void Expiry::advance_clock(std::uint64_t by) {
  const std::uint64_t ttl = config_->ttl;
  if (ttl == 0) return;
  TtlState& state = *state_;
  if (state.unit != config_->ttl_unit) {  // The marks say nothing of time in another one.
    state.marks_made = 0;
    barrier();
    state.time = 0;
    state.unit = config_->ttl_unit;
  }
  const std::uint64_t before = state.time, granule = part(ttl, kPartsOfTtl);
  state.time = before + by;
  barrier();
  if (state.marks_made > 0 && state.time / granule == before / granule) return;
  std::uint32_t expired_before = state.expired_before;
  for (std::uint64_t i = 0; i < kept(state); ++i) {
    const TtlMark& mark = state.marks[i];
    if (state.time - mark.time >= ttl) expired_before = std::max(expired_before, mark.clock + 1);
  }
  if (expired_before > state.expired_before) {
    set_expired_before(expired_before);
    sweep_rows_ = rows_->header().rows_used;
    barrier();
  }
  const std::uint64_t made = state.marks_made;
  if (made > 0 && state.time - state.marks[(made - 1) % kTtlMarks].time < part(ttl, kMarksOfTtl)) return;
  TtlMark& mark = state.marks[made % kTtlMarks];
  mark.time = state.time;  // first: a mark of an early time with a late clock would make rows expire
  barrier();
  mark.clock = rows_->header().clock;
  barrier();
  state.marks_made = made + 1;
}

std::uint32_t Expiry::least_stamp() const {
  const TtlState& state = *state_;
  if (state.marks_made == 0) return state.expired_before;
  return std::max(state.expired_before, state.marks[(state.marks_made - 1) % kTtlMarks].clock + 1);
}

std::uint32_t Expiry::reusable() {
  const std::uint64_t used = rows_->header().rows_used;
  for (std::uint64_t i = 0; i < kSweep && sweep_rows_ > 0 && listed_.size() <= used / kListed; ++i) {
    --sweep_rows_;
    if (sweep_ >= used) sweep_ = 0;
    __builtin_prefetch(rows_->row_bytes(static_cast<std::uint32_t>(sweep_)) + kSweep * rows_->stride());
    const auto number = static_cast<std::uint32_t>(sweep_++);
    if (expired(rows_->row(number)->stamp)) listed_.push_back(number);
  }
  for (std::uint64_t i = 0; i < kSweep && !listed_.empty(); ++i) {
    const std::uint32_t number = listed_.back();
    listed_.pop_back();
    if (expired(rows_->row(number)->stamp)) return number;  // Its id may have come back.
  }
  return Index::kNone;
}

void Expiry::forget() {
  sweep_ = sweep_rows_ = 0;
  listed_.clear();
}

void Expiry::look_again() {
  forget();
  if (expired_before_ > 0) sweep_rows_ = rows_->header().rows_used;
}

void Expiry::renumber() {
  const Stamps all = rows_->stamps();
  TtlState& state = *state_;
  std::uint64_t oldest = all.count;  // of the rows that have not expired
  for (std::uint64_t row = 0; state.expired_before > 0 && row < all.count; ++row) {
    if (!rows_->vacant(static_cast<std::uint32_t>(row)) && all[row] >= state.expired_before &&
        (oldest == all.count || all[row] < all[oldest]))
      oldest = row;
  }
  const bool any_expired = state.expired_before > 0;
  set_expired_before(0);
  state.marks_made = 0;
  barrier();
  std::uint32_t& clock = rows_->header().clock;
  clock = persia::renumber(all, config_->tiered());
  if (any_expired) set_expired_before(oldest < all.count ? all[oldest] : clock + 1);
  forget();
}

}  // namespace persia
