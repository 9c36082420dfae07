#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "persia/hash.hpp"
#include "persia/texts.hpp"
#include "persia/words.hpp"

namespace {

std::uint64_t hash(const std::string& text) { return persia::xxh64(text.data(), text.size(), 0); }

persia::Words words(const std::vector<std::string>& texts, const std::vector<std::uint8_t>& lengths, bool lower = false,
                    const std::string& lowered = "") {
  std::vector<std::uint8_t> data;
  std::vector<std::int64_t> offsets = {0};
  for (const std::string& text : texts) {
    data.insert(data.end(), text.begin(), text.end());
    offsets.push_back(static_cast<std::int64_t>(data.size()));
  }
  return persia::text_words({data}, std::span<const std::int64_t>(offsets), lengths, lower, lowered);
}

using Ids = std::vector<std::uint64_t>;

}  // namespace

TEST(words_and_sequences_of_words) {
  const persia::Words found = words({"The  big-cat_1", "", "cat"}, {1, 2}, true);
  CHECK((found.ids == Ids{hash("the"), hash("the big"), hash("big"), hash("big cat_1"), hash("cat_1"), hash("cat")}));
  CHECK((found.offsets == std::vector<std::int64_t>{0, 5, 5, 6}));
}

TEST(characters_beyond_ascii) {
  CHECK((words({"größer\u2019s \u201Eja\u201C\u3000日本"}, {1}).ids ==
         Ids{hash("größer"), hash("s"), hash("ja"), hash("日本")}));
  CHECK((words({"\u200Cmi\u200Cxa"}, {1}).ids == Ids{hash("mi\u200Cxa")}));  // A joiner begins no word.
}

TEST(bytes_that_are_not_utf8_are_outside_words) {
  // A lone continuation, a cut character, an overlong one, a surrogate, and one above U+10FFFF.
  for (const char* bytes :
       {"\x80", "\xE6\x97", "\xC0\xAF", "\xE0\x80\xAF", "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xFF"}) {
    CHECK((words({std::string("a") + bytes + "b"}, {1}).ids == Ids{hash("a"), hash("b")}));
    CHECK((words({std::string("a") + bytes}, {1}).ids == Ids{hash("a")}));
  }
}

TEST(lower_case_texts_take_the_place_of_those_beyond_ascii) {
  const std::vector<std::string> texts = {"A", "ÄX", "B", std::string("Ö\0Y", 4)};
  std::vector<std::uint8_t> data;
  std::vector<std::int32_t> offsets = {0};
  for (const std::string& text : texts) {
    data.insert(data.end(), text.begin(), text.end());
    offsets.push_back(static_cast<std::int32_t>(data.size()));
  }
  const std::string others = persia::non_ascii_texts({data}, std::span<const std::int32_t>(offsets));
  CHECK((others == std::string("ÄX\0Ö Y\0", 9)));
  const persia::Words found = words(texts, {1}, true, std::string("äx\0ö y\0", 9));
  CHECK((found.ids == Ids{hash("a"), hash("äx"), hash("b"), hash("ö"), hash("y")}));
  CHECK_THROWS(words(texts, {1}, true, std::string("äx\0", 4)), std::invalid_argument);
}

TEST(hostile_arguments_are_refused) {
  const std::vector<std::uint8_t> data = {'a'};
  const std::vector<std::int64_t> offsets = {0, 2};
  const std::vector<std::uint8_t> one = {1}, zero = {0};
  const std::span<const std::int64_t> bounds(offsets);
  CHECK_THROWS(persia::text_words({data}, bounds, one, false, ""), std::invalid_argument);
  CHECK_THROWS(persia::text_words({data}, std::span<const std::int64_t>(), one, false, ""), std::invalid_argument);
  CHECK_THROWS(persia::non_ascii_texts({data}, bounds), std::invalid_argument);
  CHECK_THROWS(words({"a"}, zero), std::invalid_argument);
}

MAIN
