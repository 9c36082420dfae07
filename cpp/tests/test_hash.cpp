#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "persia/hash.hpp"

using persia::ThreadPool;

namespace {

std::vector<std::uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

TEST(xxh64_has_the_published_values) {
  CHECK(persia::xxh64("", 0, 0) == 0xEF46DB3751D8E999U);
  CHECK(persia::xxh64("a", 1, 0) == 0xD24EC4F1A98C6E5BU);
  CHECK(persia::xxh64("abc", 3, 0) == 0x44BC2CF5AD770999U);
  const std::string text = "Nobody inspects the spammish repetition";
  CHECK(persia::xxh64(text.data(), text.size(), 0) == 0xFBCEA83C8A378BF1U);
}

TEST(values_of_eight_bytes_hash_like_their_bytes) {
  ThreadPool pool(2);
  std::vector<std::uint64_t> values(40000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = i * 0x9E3779B97F4A7C15U;
  std::vector<std::uint64_t> hashes(values.size());
  std::vector<std::uint64_t> crossed(values.size());
  persia::hash_values(values.data(), 8, persia::ValueKind::integer, 7, hashes, pool);
  const std::uint64_t* columns[] = {values.data()};
  persia::hash_cross(columns, 7, crossed, pool);
  for (std::size_t i = 0; i < values.size(); ++i) {
    CHECK(hashes[i] == persia::xxh64(&values[i], 8, 7));
    CHECK(hashes[i] == crossed[i]);
  }
}

TEST(equal_floats_hash_alike) {
  ThreadPool pool(1);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double values[] = {0.0, -0.0, nan, -nan, std::bit_cast<double>(0x7FF0000000000001U)};
  std::vector<std::uint64_t> hashes(5);
  persia::hash_values(values, 8, persia::ValueKind::floating, 0, hashes, pool);
  CHECK(hashes[0] == hashes[1]);
  CHECK(hashes[2] == hashes[3] && hashes[2] == hashes[4]);
  CHECK(hashes[0] != hashes[2]);
  CHECK_THROWS(persia::hash_values(values, 3, persia::ValueKind::integer, 0, hashes, pool), std::invalid_argument);
}

TEST(strings_with_nulls) {
  ThreadPool pool(2);
  const auto data = bytes("abca");
  const std::uint8_t validity = 0b1010;
  const std::vector<std::int32_t> offsets = {0, 3, 3, 4};
  std::vector<std::uint64_t> hashes(3);
  persia::hash_strings({data, &validity, 1}, offsets, 0, 42, hashes, pool);
  CHECK(hashes[0] == persia::xxh64("abc", 3, 0));
  CHECK(hashes[1] == 42);
  CHECK(hashes[2] == persia::xxh64("a", 1, 0));
}

TEST(hostile_string_offsets_are_refused) {
  ThreadPool pool(2);
  const auto data = bytes("abca");
  std::vector<std::uint64_t> hashes(2);
  const std::vector<std::vector<std::int64_t>> hostile = {
      {0, 3, 2}, {-1, 3, 4}, {0, 3, 5}, {0, std::numeric_limits<std::int64_t>::max(), 4}, {0, 4}};
  for (const auto& offsets : hostile) {
    CHECK_THROWS(persia::hash_strings({data}, std::span<const std::int64_t>(offsets), 0, 0, hashes, pool),
                 std::invalid_argument);
  }
}

MAIN
