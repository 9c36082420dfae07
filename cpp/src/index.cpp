#include "persia/index.hpp"

#include <bit>
#include <limits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {

void Index::candidates(const Index* const* indices, const std::uint32_t* tags, std::size_t count, std::uint32_t* rows) {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
  if (avx512) return candidates_avx512(indices, tags, count, rows);
  if (avx2) return candidates_avx2(indices, tags, count, rows);
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

bool Index::sound(std::uint64_t rows) const {
  std::vector<bool> seen(rows);
  std::uint64_t found = 0, last = std::numeric_limits<std::uint64_t>::max(), run = 0, used_end = 0;
  const std::uint64_t end = count_ + kIndexTail;
  for (std::uint64_t at = 0; at < end; ++at) {
    const std::uint64_t slot = slots_[at];
    if (slot == 0) {
      run = at + 1;  // Slots that are taken begin here at the earliest: a search does not pass an empty one.
      continue;
    }
    const std::uint32_t tag = tag_in(slot), row = row_in(slot);
    if (tag == 0 || tag > last || row >= rows || seen[row]) return false;
    if (home(tag) > at || home(tag) < run) return false;
    seen[row] = true;
    last = tag;
    used_end = at + 1;
    ++found;
  }
  return found == rows && used_end + kLineSlots <= end;
}

}  // namespace persia
