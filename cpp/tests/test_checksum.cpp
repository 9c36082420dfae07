#include <cstring>
#include <vector>

#include "check.hpp"
#include "persia/checksum.hpp"
#include "persia/mix.hpp"

using persia::crc32;

namespace {

std::uint32_t of(const char* text) { return crc32(0, reinterpret_cast<const std::byte*>(text), std::strlen(text)); }

// Bit by bit, from the definition.
std::uint32_t slow(const std::byte* data, std::size_t bytes) {
  std::uint32_t state = ~0u;
  for (std::size_t i = 0; i < bytes; ++i) {
    state ^= std::to_integer<std::uint32_t>(data[i]);
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0xEDB88320u : 0u);
  }
  return ~state;
}

}  // namespace

TEST(known_values) {
  CHECK(of("") == 0);
  CHECK(of("123456789") == 0xCBF43926u);
  CHECK(of("The quick brown fox jumps over the lazy dog") == 0x414FA339u);
}

TEST(every_length_and_division_is_as_by_definition) {
  std::vector<std::byte> data(1000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(persia::mix64(i));
  for (std::size_t length = 0; length < 400; ++length) {
    const std::byte* const begin = data.data() + length % 17;
    const std::uint32_t expected = slow(begin, length);
    CHECK(crc32(0, begin, length) == expected);
    const std::size_t first = length * 5 / 7;
    CHECK(crc32(crc32(0, begin, first), begin + first, length - first) == expected);
  }
}

MAIN
