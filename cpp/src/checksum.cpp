#include "persia/checksum.hpp"

#include <array>

#include "persia/isa.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320u;

constexpr std::array<std::uint32_t, 256> kTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    table[i] = value;
  }
  return table;
}();

// `state`: the register, which is the checksum inverted.
std::uint32_t byte_by_byte(std::uint32_t state, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) {
    state = (state >> 8) ^ kTable[(state ^ std::to_integer<std::uint32_t>(data[i])) & 0xFF];
  }
  return state;
}

#if defined(__x86_64__)
constexpr std::size_t kBlock = 64;

[[gnu::target("pclmul,sse4.1")]] inline __m128i load(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// What lies in `from`, as it would be that number of bits further on, added to `to`.
[[gnu::target("pclmul,sse4.1")]] inline __m128i fold(__m128i from, __m128i powers, __m128i to) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(from, powers, 0x00), to),
                       _mm_clmulepi64_si128(from, powers, 0x11));
}

// Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ (Intel, 2009), with the constants of the
// reflected polynomial that are printed there. Whole blocks only, at least one.
[[gnu::target("pclmul,sse4.1")]] std::uint32_t by_blocks(std::uint32_t state, const std::byte* data,
                                                         std::size_t blocks) {
  __m128i lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = load(data + 16 * i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  const __m128i by_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  for (std::size_t block = 1; block < blocks; ++block) {
    data += kBlock;
    for (int i = 0; i < 4; ++i) lanes[i] = fold(lanes[i], by_512, load(data + 16 * i));
  }
  const __m128i by_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i sum = lanes[0];
  for (int i = 1; i < 4; ++i) sum = fold(sum, by_128, lanes[i]);
  // 128 bits to 64, these to 32 (Barrett).
  const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_128, 0x10));
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4),
                      _mm_clmulepi64_si128(_mm_and_si128(sum, low), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_and_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), barrett, 0x10), low);
  quotient = _mm_clmulepi64_si128(quotient, barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
}
#endif

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t bytes) {
  std::uint32_t state = ~crc;
#if defined(__x86_64__)
  if (const std::size_t blocks = bytes / kBlock; blocks > 0 && isa() != Isa::kBaseline) {
    state = by_blocks(state, data, blocks);
    data += blocks * kBlock;
    bytes %= kBlock;
  }
#endif
  return ~byte_by_byte(state, data, bytes);
}

}  // namespace persia
