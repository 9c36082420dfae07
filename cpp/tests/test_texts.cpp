#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "persia/hash.hpp"
#include "persia/texts.hpp"

using persia::IdKind;

namespace {

struct Column {
  explicit Column(const std::vector<std::string>& texts) : ids(texts.size()), numbers(ids.size()), present(ids.size()) {
    for (const std::string& text : texts) {
      data.insert(data.end(), text.begin(), text.end());
      offsets.push_back(static_cast<std::int32_t>(data.size()));
    }
  }

  std::int64_t as_ids(IdKind kind) {
    return persia::text_ids({data}, std::span<const std::int32_t>(offsets), kind, ids, present);
  }
  std::int64_t as_numbers() {
    return persia::text_numbers({data}, std::span<const std::int32_t>(offsets), numbers, present);
  }

  std::vector<std::uint8_t> data;
  std::vector<std::int32_t> offsets = {0};
  std::vector<std::uint64_t> ids;
  std::vector<double> numbers;
  std::vector<std::uint8_t> present;
};

std::uint64_t hash(const std::string& text) { return persia::xxh64(text.data(), text.size(), 0); }

}  // namespace

TEST(canonical_whole_numbers_are_ids_and_the_rest_is_hashed) {
  Column column({"5",
                 "5.0",
                 " 5\t",
                 "0",
                 "-0",
                 "-0.00",
                 "18446744073709551615",
                 "18446744073709551616",
                 "-5",
                 "-5.0",
                 "05",
                 "5.",
                 "5.5",
                 "+5",
                 "5e0",
                 "x",
                 "true",
                 "False",
                 "1_000",
                 "\xff"});
  CHECK(column.as_ids(IdKind::automatic) == -1);
  const std::vector<std::uint64_t> expected = {5,
                                               5,
                                               5,
                                               0,
                                               0,
                                               0,
                                               ~0ULL,
                                               hash("18446744073709551616"),
                                               hash("-5"),
                                               hash("-5"),
                                               hash("05"),
                                               hash("5."),
                                               hash("5.5"),
                                               hash("+5"),
                                               hash("5e0"),
                                               hash("x"),
                                               1,
                                               0,
                                               hash("1_000"),
                                               hash("\xff")};
  CHECK(column.ids == expected);
}

TEST(kinds_refuse_or_hash) {
  Column numbers({"7", "", "NA", "8.0", "-1", "9"});
  CHECK(numbers.as_ids(IdKind::number) == 4);
  CHECK(numbers.ids[0] == 7 && numbers.ids[3] == 8);
  CHECK(numbers.present[1] == 0 && numbers.present[2] == 0);
  for (const char* bad : {"a", "1.5", "18446744073709551616", "05", "-3", "1e3"}) {
    CHECK(Column({bad}).as_ids(IdKind::number) == 0);
  }
  Column texts({"7", "", "true"});
  CHECK(texts.as_ids(IdKind::text) == -1);
  CHECK(texts.ids[0] == hash("7") && texts.ids[2] == hash("true"));
  CHECK(texts.present[0] == 1 && texts.present[1] == 0);
}

TEST(numbers_in_texts) {
  Column column({"1.5", "", " -2e3 ", "+4", "True", "false", ".5", "7."});
  CHECK(column.as_numbers() == -1);
  CHECK(column.numbers[0] == 1.5 && column.numbers[2] == -2000 && column.numbers[3] == 4);
  CHECK(column.numbers[4] == 1 && column.numbers[5] == 0 && column.numbers[6] == 0.5 && column.numbers[7] == 7);
  CHECK(column.present[1] == 0 && std::isnan(column.numbers[1]));
  for (const char* missing : {"NA", "NULL", "nan", " None ", "\\N", "<NA>"}) {
    Column marked({"1", missing});
    CHECK(marked.as_numbers() == -1 && marked.present[1] == 0 && std::isnan(marked.numbers[1]));
  }
  for (const char* bad : {"oops", "inf", "-inf", "+-1", "1,5", "1 5", "x", "-", "+", "1e999", "0x10", "1.5.2", "++1"}) {
    CHECK(Column({"1", bad}).as_numbers() == 1);
  }
}

TEST(floats_are_their_decimal_texts) {
  const std::vector<float> floats = {0.1F, 0.7F, -0.3F, 5.0F, 16777216.0F, 1e30F, 1e-45F, -0.0F};
  std::vector<double> doubles(floats.size());
  persia::decimal_doubles(floats, doubles);
  CHECK((doubles == std::vector<double>{0.1, 0.7, -0.3, 5.0, 16777216.0, 1e30, 1e-45, 0.0}));
  const std::vector<float> odd = {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()};
  doubles.resize(2);
  persia::decimal_doubles(odd, doubles);
  CHECK(std::isnan(doubles[0]) && doubles[1] == -std::numeric_limits<double>::infinity());
  CHECK_THROWS(persia::decimal_doubles(floats, doubles), std::invalid_argument);
}

TEST(nulls_and_slices) {
  const std::vector<std::uint8_t> data = {'a', '1', '2'};
  const std::uint8_t validity = 0b1010;
  const std::array<std::int64_t, 4> offsets = {1, 2, 3, 3};
  std::vector<std::uint64_t> ids(3);
  std::vector<std::uint8_t> present(3);
  const persia::Texts texts{data, &validity, 1};
  CHECK(persia::text_ids(texts, std::span<const std::int64_t>(offsets), IdKind::automatic, ids, present) == -1);
  CHECK(ids[0] == 1 && present[0] == 1);
  CHECK(present[1] == 0 && ids[1] == 0);
  CHECK(present[2] == 0);
}

TEST(hostile_offsets_are_refused) {
  const std::vector<std::uint8_t> data = {'a', 'b', 'c', 'a'};
  std::vector<std::uint64_t> ids(2);
  std::vector<std::uint8_t> present(2);
  const std::vector<std::vector<std::int64_t>> hostile = {
      {0, 3, 2}, {-1, 3, 4}, {0, 3, 5}, {0, std::numeric_limits<std::int64_t>::max(), 4}, {0, 4}};
  for (const auto& offsets : hostile) {
    CHECK_THROWS(persia::text_ids({data}, std::span<const std::int64_t>(offsets), IdKind::text, ids, present),
                 std::invalid_argument);
  }
}

TEST(parts_of_texts) {
  const auto parts = [](const std::vector<std::string>& texts, IdKind kind, std::string_view separator) {
    const Column column(texts);
    return persia::split_ids({column.data}, std::span<const std::int32_t>(column.offsets), kind, separator);
  };
  const auto found = parts({"1|22|a", "", "||7|", "0|00|1234567890123456789|5.0"}, IdKind::automatic, "|");
  CHECK((found.offsets == std::vector<std::int64_t>{0, 3, 3, 4, 8}) && found.bad == -1);
  CHECK((found.ids == std::vector<std::uint64_t>{1, 22, hash("a"), 7, 0, hash("00"), 1234567890123456789, 5}));
  CHECK((parts({"1, 2,3"}, IdKind::automatic, ", ").ids == std::vector<std::uint64_t>{1, hash("2,3")}));
  CHECK((parts({"1020"}, IdKind::automatic, "0").ids == std::vector<std::uint64_t>{1, 2}));
  CHECK((parts({"1|2"}, IdKind::text, "|").ids == std::vector<std::uint64_t>{hash("1"), hash("2")}));
  CHECK(parts({"1|NA", "3|x", "y"}, IdKind::number, "|").bad == 1);
  CHECK_THROWS(parts({"1"}, IdKind::text, ""), std::invalid_argument);
}

MAIN
