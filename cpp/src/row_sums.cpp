#include "persia/row_sums.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>

#include "persia/mix.hpp"

namespace persia {

namespace {

constexpr std::size_t kGroup = 16;  // ids that are looked for at once
constexpr std::size_t kAhead = 8;   // rows to prefetch

}  // namespace

RowSums::RowSums(std::size_t dim) : dim_(dim) {
  if (dim == 0) throw std::invalid_argument("dim is 0");
}

void RowSums::grow(std::size_t count) {
  const std::size_t wanted = std::bit_ceil(std::max<std::size_t>(count, 8) * 2);
  if (wanted <= slots_.size()) return;
  slots_.assign(wanted, 0);
  const std::size_t mask = wanted - 1;
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    std::size_t slot = mix64(ids_[i]) & mask;
    while (slots_[slot] != 0) slot = (slot + 1) & mask;
    slots_[slot] = static_cast<std::uint32_t>(i + 1);
  }
}

std::uint32_t RowSums::place(std::uint64_t id, std::uint64_t hash) {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = hash & mask;; slot = (slot + 1) & mask) {
    if (slots_[slot] == 0) {
      ids_.push_back(id);
      slots_[slot] = static_cast<std::uint32_t>(ids_.size());
      return slots_[slot] - 1;
    }
    if (ids_[slots_[slot] - 1] == id) return slots_[slot] - 1;
  }
}

void RowSums::add(std::span<const std::uint64_t> ids, const float* values, const float* counts, float share) {
  if (ids_.size() + ids.size() >= std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("a step has too many distinct ids");
  }
  grow(ids_.size() + ids.size());
  places_.resize(ids.size());
  std::uint64_t hashes[kGroup];
  for (std::size_t i = 0; i < ids.size(); i += kGroup) {
    const std::size_t n = std::min(kGroup, ids.size() - i);
    for (std::size_t k = 0; k < n; ++k) {
      hashes[k] = mix64(ids[i + k]);
      __builtin_prefetch(slots_.data() + (hashes[k] & (slots_.size() - 1)), 1);
    }
    for (std::size_t k = 0; k < n; ++k) places_[i + k] = place(ids[i + k], hashes[k]);
  }
  sums_.resize(ids_.size() * dim_);
  divisors_.resize(ids_.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + kAhead < ids.size()) __builtin_prefetch(sums_.data() + places_[i + kAhead] * dim_, 1);
    Divisor& divisor = divisors_[places_[i]];
    divisor.all += share;
    if (counts[i] == 0) continue;
    divisor.counted += share;
    float* sum = sums_.data() + places_[i] * dim_;
    const float* value = values + i * dim_;
    for (std::size_t d = 0; d < dim_; ++d) sum[d] += share * value[d];
  }
}

std::size_t RowSums::counted() const {
  return static_cast<std::size_t>(
      std::count_if(divisors_.begin(), divisors_.end(), [](const Divisor& d) { return d.counted > 0; }));
}

void RowSums::take(double total, std::uint64_t* ids, float* values) {
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    if (!(divisors_[i].counted > 0)) continue;
    *ids++ = ids_[i];
    const auto factor = static_cast<float>(1.0 / (total != 0 ? total : static_cast<double>(divisors_[i].all)));
    const float* sum = sums_.data() + i * dim_;
    for (std::size_t d = 0; d < dim_; ++d) *values++ = sum[d] * factor;
  }
  ids_.clear();
  sums_.clear();
  divisors_.clear();
  std::fill(slots_.begin(), slots_.end(), 0);
}

std::size_t RowSums::bytes() const {
  return ids_.size() * (sizeof(std::uint64_t) + dim_ * sizeof(float) + sizeof(Divisor)) +
         slots_.size() * sizeof(std::uint32_t);
}

}  // namespace persia
