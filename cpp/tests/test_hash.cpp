#include <string>
#include <vector>

#include "check.hpp"
#include "persia/hash.hpp"

using persia::ThreadPool;

TEST(xxh64_has_the_published_values) {
  CHECK(persia::xxh64("", 0, 0) == 0xEF46DB3751D8E999U);
  CHECK(persia::xxh64("a", 1, 0) == 0xD24EC4F1A98C6E5BU);
  CHECK(persia::xxh64("abc", 3, 0) == 0x44BC2CF5AD770999U);
  const std::string text = "Nobody inspects the spammish repetition";
  CHECK(persia::xxh64(text.data(), text.size(), 0) == 0xFBCEA83C8A378BF1U);
}

TEST(a_cross_hashes_the_bytes_of_its_ids) {
  ThreadPool pool(2);
  std::vector<std::uint64_t> first(40000);
  std::vector<std::uint64_t> second(first.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    first[i] = i * 0x9E3779B97F4A7C15U;
    second[i] = ~i;
  }
  std::vector<std::uint64_t> crossed(first.size());
  const std::uint64_t* columns[] = {first.data(), second.data()};
  persia::hash_cross(columns, 7, crossed, pool);
  for (std::size_t i = 0; i < first.size(); ++i) {
    const std::uint64_t row[] = {first[i], second[i]};
    CHECK(crossed[i] == persia::xxh64(row, 16, 7));
  }
}

MAIN
