#include "persia/index.hpp"

#include <bit>
#include <limits>
#include <vector>

#include "persia/isa.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {

void Index::candidates(const Index* const* indices, const std::uint32_t* tags, std::size_t count, std::uint32_t* rows) {
#if defined(__x86_64__)
  const Isa use = isa();
  if (use == Isa::kAvx512) return candidates_avx512(indices, tags, count, rows);
  if (use == Isa::kAvx2) return candidates_avx2(indices, tags, count, rows);
#endif
  for (std::size_t i = 0; i < count; ++i) {
    const Index& index = *indices[i];
    rows[i] = index.row_at(index.lower_bound(index.home(tags[i]), tags[i]), tags[i]);
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512f,popcnt")]] void Index::candidates_avx512(const Index* const* indices, const std::uint32_t* tags,
                                                                std::size_t count, std::uint32_t* rows) {
  for (std::size_t i = 0; i < count; ++i) {
    const Index& index = *indices[i];
    const __m512i bound = _mm512_set1_epi64(static_cast<long long>(bound_of(tags[i])));
    std::uint64_t at = index.home(tags[i]);
    std::uint32_t above = 0xFF;
    for (; above == 0xFF; at += kLineSlots) {
      above = _mm512_cmpgt_epu64_mask(_mm512_loadu_si512(index.slots_ + at), bound);
    }
    rows[i] = index.row_at(at - kLineSlots + static_cast<unsigned>(std::popcount(above)), tags[i]);
  }
}

[[gnu::target("avx2,popcnt")]] void Index::candidates_avx2(const Index* const* indices, const std::uint32_t* tags,
                                                           std::size_t count, std::uint32_t* rows) {
  const __m256i sign = _mm256_set1_epi64x(std::numeric_limits<long long>::min());  // there is no unsigned comparison
  for (std::size_t i = 0; i < count; ++i) {
    const Index& index = *indices[i];
    const __m256i bound = _mm256_xor_si256(_mm256_set1_epi64x(static_cast<long long>(bound_of(tags[i]))), sign);
    std::uint64_t at = index.home(tags[i]);
    std::uint32_t above = 0xFF;
    for (; above == 0xFF; at += kLineSlots) {
      const auto* line = reinterpret_cast<const __m256i*>(index.slots_ + at);
      const __m256i low = _mm256_cmpgt_epi64(_mm256_xor_si256(_mm256_loadu_si256(line), sign), bound);
      const __m256i high = _mm256_cmpgt_epi64(_mm256_xor_si256(_mm256_loadu_si256(line + 1), sign), bound);
      above = static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(low)) |
                                         _mm256_movemask_pd(_mm256_castsi256_pd(high)) << 4);
    }
    rows[i] = index.row_at(at - kLineSlots + static_cast<unsigned>(std::popcount(above)), tags[i]);
  }
}
#endif

namespace {
constexpr std::uint64_t kAheadLines = 4;  // that a step moves to, about
}

bool Index::move(std::uint64_t count) {
  // Behind the last slot of a tag above the frontier.
  std::uint64_t at = lower_bound(home(frontier_, old_lines_), frontier_), to = 0;
  for (std::uint64_t moved = 0; moved < count;) {
    while (at > 0 && slots_[at - 1] == 0) --at;
    if (at == 0) {
      frontier_ = kRowMask;
      return true;
    }
    // All slots with the same new home, from `begin` on. They may have holes between them.
    to = home(tag_in(slots_[at - 1]), lines_);
    std::uint64_t begin = at - 1, slots = 1;
    for (std::uint64_t before = begin; before > 0; --before) {
      const std::uint64_t slot = slots_[before - 1];
      if (slot == 0) continue;
      if (home(tag_in(slot), lines_) != to) break;
      begin = before - 1;
      ++slots;
    }
    if (!empty(limit() - slots, slots)) return false;  // Each slot fills the next hole: one hole each is enough.
    moved += slots;
    frontier_ = tag_in(slots_[begin]);
    // All but a few times the new line is empty.
    std::uint64_t next = at <= to && slots <= kLineSlots && empty(to, kLineSlots) ? to + slots : 0;
    for (; at > begin; --at) {
      const std::uint64_t slot = slots_[at - 1];
      // A slot that lies behind its new home stays there: no slot between them is empty. One that lies before it leaves
      // a hole that no search meets, as all slots behind it have the same home or a later one.
      if (slot == 0 || at > to) continue;
      if (next > to) {
        slots_[--next] = slot;
      } else {
        std::uint64_t hole = to;
        while (slots_[hole] != 0) ++hole;
        shift_into(to, hole, slot);
      }
      word_barrier();
      slots_[at - 1] = 0;
    }
  }
  // The lines of the next step are needed after other rows of the request, which the hardware does not see through.
  for (std::uint64_t ahead = 1; ahead <= kAheadLines * kLineSlots; ahead += kLineSlots) {
    if (ahead <= at) __builtin_prefetch(slots_ + at - ahead, 1);
    if (ahead <= to) __builtin_prefetch(slots_ + to - ahead, 1);
  }
  return true;
}

bool Index::sound(std::uint64_t rows) const {
  std::vector<bool> seen(rows);
  std::uint64_t found = 0;
  const bool slots = sound_if([&](std::uint32_t row) {
    if (row >= rows || seen[row]) return false;
    ++found;
    seen[row] = true;
    return true;
  });
  return slots && found == rows;
}

void Index::build(std::vector<std::uint64_t>& slots) {
  frontier_ = kRowMask;
  const std::uint64_t end = slot_count() + kIndexTail;
  std::sort(slots.begin(), slots.end(), std::greater<>());
  std::uint64_t next = 0;
  for (const std::uint64_t slot : slots) {
    const std::uint64_t at = std::max(home(tag_in(slot)), next);
    if (at >= limit()) throw std::runtime_error("thousands of rows share one hash, which cannot be: they are damaged");
    for (; next < at; ++next) slots_[next] = 0;
    slots_[next++] = slot;
  }
  std::memset(slots_ + next, 0, (end - next) * sizeof(std::uint64_t));
}

}  // namespace persia
