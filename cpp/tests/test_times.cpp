#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "persia/times.hpp"

namespace {

// Seconds of one text; kMissing or kBad in place of a time.
constexpr std::int64_t kMissing = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kBad = kMissing + 1;

std::int64_t seconds(const std::string& text, std::int64_t per_second = 1) {
  const std::vector<std::uint8_t> data(text.begin(), text.end());
  const std::vector<std::int64_t> offsets = {0, static_cast<std::int64_t>(data.size())};
  std::vector<std::int64_t> out(1);
  std::vector<std::uint8_t> present(1);
  const std::int64_t bad = persia::text_times({data}, std::span<const std::int64_t>(offsets), per_second, out, present);
  return bad == 0 ? kBad : present[0] == 0 ? kMissing : out[0];
}

}  // namespace

TEST(iso_texts) {
  CHECK(seconds("1970-01-01") == 0);
  CHECK(seconds(" 2024-05-01T12:30:15.999Z\t") == 1714566615);
  CHECK(seconds("2024-05-01 12:30") == 1714566600);
  CHECK(seconds("2024-05-01T12") == 1714564800);
  CHECK(seconds("2024-05-01T12:30:00+02:30") == 1714557600);
  CHECK(seconds("2024-05-01T12:30:00-0230") == 1714575600);
  CHECK(seconds("1969-12-31T23:59:59.5") == -1);
  CHECK(seconds("2024-02-29") == 1709164800);
}

TEST(texts_with_the_day_first) {
  CHECK(seconds("1.5.2024") == seconds("2024-05-01"));
  CHECK(seconds("01.05.2024, 7:05:09.25") == seconds("2024-05-01T07:05:09"));
}

TEST(numbers_are_rounded_down) {
  CHECK(seconds("1714566615") == 1714566615);
  CHECK(seconds("-1", 1000) == -1);
  CHECK(seconds("1999", 1000) == 1);
  CHECK(seconds("-0.5") == -1);
  CHECK(seconds("+1.7145666159e9") == 1714566615);
  CHECK(seconds("9223372036854775807", 1000000000) == 9223372036);
}

TEST(what_is_no_time) {
  for (const char* text : {"2024-02-30",
                           "2024-13-01",
                           "2024-05-01T24:00",
                           "2024-05-01T12:60",
                           "2024-05-01T12:30:15.",
                           "2024-05-01T",
                           "2024-05-01Z",
                           "2024-05-01T12:30+2",
                           "2024-05-01T12:30+25:00",
                           "5/1/2024",
                           "31.4.2024",
                           "1.5.24",
                           "noon",
                           "+",
                           "-",
                           "+-1",
                           ".",
                           "1e400",
                           "inf",
                           "nan(1)",
                           "9223372036854775808",
                           "2024-05-01T12:30 x"}) {
    CHECK(seconds(text) == kBad);
  }
  for (const char* text : {"", " \t", "NA", "null", "\\N"}) CHECK(seconds(text) == kMissing);
}

TEST(hostile_arguments_are_refused) {
  const std::vector<std::uint8_t> data = {'1'};
  const std::vector<std::int32_t> offsets = {0, 2};
  std::vector<std::int64_t> out(1);
  std::vector<std::uint8_t> present(1);
  const std::span<const std::int32_t> bounds(offsets);
  CHECK_THROWS(persia::text_times({data}, bounds, 1, out, present), std::invalid_argument);
  CHECK_THROWS(persia::text_times({data}, bounds, 0, out, present), std::invalid_argument);
}

MAIN
