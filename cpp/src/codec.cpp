#include "persia/codec.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "persia/isa.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {
namespace {

// After Fabian Giesen, "Half-precision float <-> float conversion": the additions round as the target does.
std::uint16_t to_half(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits & 0x80000000u;
  bits ^= sign;
  std::uint32_t half;
  if (bits >= 0x47800000u) {  // 2^16 and above, infinity, NaN
    half = bits > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (bits < 0x38800000u) {  // below 2^-14: the addition of 0.5 moves the bits to where they belong
    half = std::bit_cast<std::uint32_t>(std::bit_cast<float>(bits) + 0.5f) - 0x3F000000u;
  } else {
    const std::uint32_t odd = bits >> 13 & 1u;
    half = (bits - 0x38000000u + 0xFFFu + odd) >> 13;
  }
  return static_cast<std::uint16_t>(sign >> 16 | half);
}

float to_float(std::uint16_t half) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7FFFu) << 13;
  // As a float32 of the same exponent bits, then moved to the right exponent by an exact multiplication.
  float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  if ((half & 0x7C00u) == 0x7C00u) value = std::bit_cast<float>(magnitude | 0x7F800000u);
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) | static_cast<std::uint32_t>(half & 0x8000u) << 16);
}

float scale_for(float largest) { return largest == 0.0f ? 1.0f : std::max(largest * 0x1p-15f, 0x1p-126f); }

float largest_from(const float* row, std::size_t begin, std::size_t dim, float largest) {
  for (std::size_t i = begin; i < dim; ++i) {
    const float magnitude = std::fabs(row[i]);
    largest = magnitude > largest ? magnitude : largest;  // a NaN is not
  }
  return largest;
}

void encode_base(const float* rows, std::size_t count, std::size_t dim, std::uint16_t* halves, float* scales) {
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    const float scale = scales[r] = scale_for(largest_from(rows, 0, dim, 0.0f));
    for (std::size_t i = 0; i < dim; ++i) halves[i] = to_half(rows[i] / scale);
  }
}

void decode_base(const std::uint16_t* halves, const float* scales, std::size_t count, std::size_t dim, float* rows) {
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    for (std::size_t i = 0; i < dim; ++i) rows[i] = to_float(halves[i]) * scales[r];
  }
}

#if defined(__x86_64__)
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// Rows are wider than a vector, or end within one; what is left of a row goes through a separate vector.
[[gnu::target("avx,f16c")]] void encode_f16c(const float* rows, std::size_t count, std::size_t dim,
                                             std::uint16_t* halves, float* scales) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const std::size_t whole = dim / 8 * 8;
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    __m256 most = _mm256_setzero_ps();
    // Where the first operand is NaN the result is the second.
    for (std::size_t i = 0; i < whole; i += 8) {
      most = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(rows + i), magnitude), most);
    }
    float lanes[8];
    _mm256_storeu_ps(lanes, most);
    const float scale = scales[r] = scale_for(largest_from(rows, whole, dim, largest_from(lanes, 0, 8, 0.0f)));
    const __m256 divisor = _mm256_set1_ps(scale);
    for (std::size_t i = 0; i < whole; i += 8) {
      const __m128i packed = _mm256_cvtps_ph(_mm256_div_ps(_mm256_loadu_ps(rows + i), divisor), kNearest);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + i), packed);
    }
    for (std::size_t i = whole; i < dim; ++i) halves[i] = to_half(rows[i] / scale);
  }
}

[[gnu::target("avx,f16c")]] void decode_f16c(const std::uint16_t* halves, const float* scales, std::size_t count,
                                             std::size_t dim, float* rows) {
  const std::size_t whole = dim / 8 * 8;
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    const __m256 scale = _mm256_set1_ps(scales[r]);
    for (std::size_t i = 0; i < whole; i += 8) {
      const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
      _mm256_storeu_ps(rows + i, _mm256_mul_ps(_mm256_cvtph_ps(packed), scale));
    }
    for (std::size_t i = whole; i < dim; ++i) rows[i] = to_float(halves[i]) * scales[r];
  }
}

[[gnu::target("avx512f")]] void encode_avx512(const float* rows, std::size_t count, std::size_t dim,
                                              std::uint16_t* halves, float* scales) {
  const std::size_t whole = dim / 16 * 16;
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    __m512 most = _mm512_setzero_ps();
    for (std::size_t i = 0; i < whole; i += 16) most = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(rows + i)), most);
    const float largest = largest_from(rows, whole, dim, _mm512_reduce_max_ps(most));
    const float scale = scales[r] = scale_for(largest);
    const __m512 divisor = _mm512_set1_ps(scale);
    for (std::size_t i = 0; i < whole; i += 16) {
      const __m256i packed = _mm512_cvtps_ph(_mm512_div_ps(_mm512_loadu_ps(rows + i), divisor), kNearest);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves + i), packed);
    }
    for (std::size_t i = whole; i < dim; ++i) halves[i] = to_half(rows[i] / scale);
  }
}

[[gnu::target("avx512f")]] void decode_avx512(const std::uint16_t* halves, const float* scales, std::size_t count,
                                              std::size_t dim, float* rows) {
  const std::size_t whole = dim / 16 * 16;
  for (std::size_t r = 0; r < count; ++r, rows += dim, halves += dim) {
    const __m512 scale = _mm512_set1_ps(scales[r]);
    for (std::size_t i = 0; i < whole; i += 16) {
      const __m256i packed = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + i));
      _mm512_storeu_ps(rows + i, _mm512_mul_ps(_mm512_cvtph_ps(packed), scale));
    }
    for (std::size_t i = whole; i < dim; ++i) rows[i] = to_float(halves[i]) * scales[r];
  }
}

// Short rows are best with the widest vectors that they fill.
Isa isa_for(std::size_t dim) { return std::min(isa(), dim >= 16 && dim % 16 < 8 ? Isa::kAvx512 : Isa::kAvx2); }
#endif

}  // namespace

void encode_fp16(const float* rows, std::size_t count, std::size_t dim, std::uint16_t* halves, float* scales) {
#if defined(__x86_64__)
  const Isa use = isa_for(dim);
  if (use == Isa::kAvx512) return encode_avx512(rows, count, dim, halves, scales);
  if (use == Isa::kAvx2) return encode_f16c(rows, count, dim, halves, scales);
#endif
  encode_base(rows, count, dim, halves, scales);
}

void decode_fp16(const std::uint16_t* halves, const float* scales, std::size_t count, std::size_t dim, float* rows) {
#if defined(__x86_64__)
  const Isa use = isa_for(dim);
  if (use == Isa::kAvx512) return decode_avx512(halves, scales, count, dim, rows);
  if (use == Isa::kAvx2) return decode_f16c(halves, scales, count, dim, rows);
#endif
  decode_base(halves, scales, count, dim, rows);
}

}  // namespace persia
