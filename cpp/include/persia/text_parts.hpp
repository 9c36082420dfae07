// Parts of texts that several conversions share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string_view>

#include "persia/texts.hpp"

namespace persia {

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
  while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
  return text;
}

inline bool is_digit(char c) { return c >= '0' && c <= '9'; }

// What other programs write where a number is missing.
inline bool is_missing(std::string_view text) {
  static constexpr std::string_view kMarkers[] = {"NA",   "N/A", "n/a", "#N/A", "<NA>", "NULL", "Null",
                                                  "null", "NaN", "nan", "NAN",  "None", "none", "\\N"};
  return text.empty() || std::ranges::find(kMarkers, text) != std::end(kMarkers);
}

// body(i, text) for each text that is there, until it returns false; for the others present[i] = 0.
// Returns the text at which it stopped, or -1.
template <class Offset, class Body>
std::int64_t for_each_text(const Texts& texts, std::span<const Offset> offsets, std::span<std::uint8_t> present,
                           Body&& body) {
  if (offsets.size() != present.size() + 1) {
    throw std::invalid_argument("texts: there must be one more offset than texts");
  }
  const auto size = static_cast<std::int64_t>(texts.data.size());
  const auto* data = reinterpret_cast<const char*>(texts.data.data());
  for (std::size_t i = 0; i < present.size(); ++i) {
    const std::int64_t begin = offsets[i];
    const std::int64_t end = offsets[i + 1];
    if (begin < 0 || end < begin || end > size) {
      throw std::invalid_argument("texts: offsets must not decrease and must stay inside the data");
    }
    const std::size_t bit = texts.validity_start + i;
    const bool valid = texts.validity == nullptr || ((texts.validity[bit / 8] >> (bit % 8)) & 1) != 0;
    present[i] = valid && end > begin;
    if (present[i] == 0) continue;
    if (!body(i, std::string_view(data + begin, static_cast<std::size_t>(end - begin)))) {
      return static_cast<std::int64_t>(i);
    }
  }
  return -1;
}

}  // namespace persia
