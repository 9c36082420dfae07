#include "persia/index.hpp"

#include <bit>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {

void Index::candidates(const std::uint32_t* tags, std::size_t count, std::uint32_t* rows) const {
#if defined(__x86_64__)
  static const bool avx512 = __builtin_cpu_supports("avx512f"), avx2 = __builtin_cpu_supports("avx2");
  if (avx512) return candidates_avx512(tags, count, rows);
  if (avx2) return candidates_avx2(tags, count, rows);
#endif
  candidates_base(tags, count, rows);
}

void Index::candidates_base(const std::uint32_t* tags, std::size_t count, std::uint32_t* rows) const {
  for (std::size_t i = 0; i < count; ++i) rows[i] = row_at(lower_bound(home(tags[i]), tags[i]), tags[i]);
}

#if defined(__x86_64__)
[[gnu::target("avx512f,popcnt")]] void Index::candidates_avx512(const std::uint32_t* tags, std::size_t count,
                                                                std::uint32_t* rows) const {
  for (std::size_t i = 0; i < count; ++i) {
    const __m512i bound = _mm512_set1_epi64(static_cast<long long>(bound_of(tags[i])));
    std::uint64_t at = home(tags[i]);
    std::uint32_t above = 0xFF;
    for (; above == 0xFF; at += kLineSlots) above = _mm512_cmpgt_epu64_mask(_mm512_loadu_si512(slots_ + at), bound);
    rows[i] = row_at(at - kLineSlots + static_cast<unsigned>(std::popcount(above)), tags[i]);
  }
}

[[gnu::target("avx2,popcnt")]] void Index::candidates_avx2(const std::uint32_t* tags, std::size_t count,
                                                           std::uint32_t* rows) const {
  const __m256i sign = _mm256_set1_epi64x(std::numeric_limits<long long>::min());  // there is no unsigned comparison
  for (std::size_t i = 0; i < count; ++i) {
    const __m256i bound = _mm256_xor_si256(_mm256_set1_epi64x(static_cast<long long>(bound_of(tags[i]))), sign);
    std::uint64_t at = home(tags[i]);
    std::uint32_t above = 0xFF;
    for (; above == 0xFF; at += kLineSlots) {
      const auto* line = reinterpret_cast<const __m256i*>(slots_ + at);
      const __m256i low = _mm256_cmpgt_epi64(_mm256_xor_si256(_mm256_loadu_si256(line), sign), bound);
      const __m256i high = _mm256_cmpgt_epi64(_mm256_xor_si256(_mm256_loadu_si256(line + 1), sign), bound);
      above = static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(low)) |
                                         _mm256_movemask_pd(_mm256_castsi256_pd(high)) << 4);
    }
    rows[i] = row_at(at - kLineSlots + static_cast<unsigned>(std::popcount(above)), tags[i]);
  }
}
#endif

}  // namespace persia
