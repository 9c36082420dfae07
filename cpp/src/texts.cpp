#include "persia/texts.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "persia/hash.hpp"
#include "persia/text_parts.hpp"

namespace persia {

namespace {

// 1 or 0 for `true` and `false` as Python, JSON and SQL write them, else -1.
int truth(std::string_view text) {
  if (text == "true" || text == "True" || text == "TRUE") return 1;
  if (text == "false" || text == "False" || text == "FALSE") return 0;
  return -1;
}

struct Whole {
  bool canonical = false;
  bool fits = false;        // 0 <= value < 2^64
  std::uint64_t value = 0;  // where it fits
  std::string_view digits;  // with the sign, without zeros after the point
};

Whole whole(std::string_view text) {
  Whole found;
  const bool negative = !text.empty() && text.front() == '-';
  std::size_t at = negative ? 1 : 0;
  const std::size_t first = at;
  std::uint64_t value = 0;
  bool overflow = false;
  const std::size_t safe = std::min(text.size(), at + 19);  // 19 digits always fit.
  for (; at < safe && is_digit(text[at]); ++at) value = value * 10 + static_cast<std::uint64_t>(text[at] - '0');
  for (; at < text.size() && is_digit(text[at]); ++at) {
    const auto digit = static_cast<std::uint64_t>(text[at] - '0');
    constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
    overflow = overflow || value > (kMax - digit) / 10;
    value = value * 10 + digit;
  }
  const std::size_t count = at - first;
  if (count == 0 || (count > 1 && text[first] == '0')) return found;
  found.digits = text.substr(0, at);
  if (at < text.size()) {
    if (text[at] != '.' || at + 1 == text.size()) return found;
    for (++at; at < text.size(); ++at) {
      if (text[at] != '0') return found;
    }
  }
  found.canonical = true;
  found.fits = !overflow && (!negative || value == 0);
  found.value = value;
  return found;
}

// What a byte may be part of, to tell most texts from numbers and truths without a branch per byte.
enum : std::uint8_t { kDigit = 1, kAround = 2, kTruth = 4, kOther = 8 };

constexpr std::array<std::uint8_t, 256> byte_kinds() {
  std::array<std::uint8_t, 256> kinds{};
  kinds.fill(kOther);
  for (const char c : std::string_view("truefalsTRUEFALS")) kinds[static_cast<unsigned char>(c)] = kTruth;
  for (const char c : std::string_view("-. \t")) kinds[static_cast<unsigned char>(c)] = kAround;
  for (char c = '0'; c <= '9'; ++c) kinds[static_cast<unsigned char>(c)] = kDigit;
  return kinds;
}

// Whether its bytes are those of a number or of a truth.
bool may_be_number(std::string_view text) {
  if (text.size() >= 8 && text.front() > ' ' && text.back() > ' ') {
    // Longer than a truth: a letter, or a byte that is not ASCII, among the first eight settles it.
    std::uint64_t word;
    std::memcpy(&word, text.data(), sizeof(word));
    if ((word & 0xC0C0C0C0C0C0C0C0U) != 0) return false;
  }
  static constexpr std::array<std::uint8_t, 256> kKinds = byte_kinds();
  unsigned found = 0;
  for (const char c : text) found |= kKinds[static_cast<unsigned char>(c)];
  return (found & kOther) == 0 && (found & (kDigit | kTruth)) != (kDigit | kTruth);
}

enum class Found : std::uint8_t { id, missing, bad };

// The id of a text that is not empty. Inlined in the loop over whole texts, which a call would slow down by a third.
[[gnu::always_inline]] inline Found id_of(std::string_view text, IdKind kind, std::uint64_t& out) {
  if (kind == IdKind::number || (kind == IdKind::automatic && may_be_number(text))) {
    const std::string_view core = trimmed(text);
    const Whole number = whole(core);
    const int truth_value = number.canonical ? -1 : truth(core);
    if (number.canonical && number.fits) {
      out = number.value;
      return Found::id;
    }
    if (truth_value >= 0) {
      out = static_cast<std::uint64_t>(truth_value);
      return Found::id;
    }
    if (kind == IdKind::number) return is_missing(core) ? Found::missing : Found::bad;
    if (number.canonical) text = number.digits;
  }
  out = xxh64(text.data(), text.size(), 0);
  return Found::id;
}

template <class Offset>
std::int64_t ids(const Texts& texts, std::span<const Offset> offsets, IdKind kind, std::span<std::uint64_t> out,
                 std::span<std::uint8_t> present) {
  if (out.size() != present.size()) throw std::invalid_argument("texts: out and present must be of one length");
  std::ranges::fill(out, 0);
  return for_each_text(texts, offsets, present, [&](std::size_t i, std::string_view text) {
    const Found found = id_of(text, kind, out[i]);
    if (found != Found::id) present[i] = 0;
    return found != Found::bad;
  });
}

// The id of a part, which is rarely needed: most parts are short numbers.
[[gnu::noinline]] Found id_of_part(std::string_view part, IdKind kind, std::uint64_t& out) {
  return id_of(part, kind, out);
}

// The whole number that the first part is, if it is canonical and short; `end` is where it ends.
bool short_number(std::string_view text, char separator, std::size_t& end, std::uint64_t& out) {
  constexpr std::size_t kSafe = 18;  // This number of digits always fits.
  const std::size_t most = std::min(text.size(), kSafe);
  std::uint64_t value = 0;
  std::size_t at = 0;
  for (; at < most && is_digit(text[at]); ++at) value = value * 10 + static_cast<std::uint64_t>(text[at] - '0');
  if (at == 0 || (at > 1 && text[0] == '0') || (at < text.size() && text[at] != separator)) return false;
  end = at;
  out = value;
  return true;
}

template <class Offset>
SplitIds split(const Texts& texts, std::span<const Offset> offsets, IdKind kind, std::string_view separator) {
  if (separator.empty()) throw std::invalid_argument("separator: must not be empty");
  if (offsets.empty()) throw std::invalid_argument("texts: there must be one more offset than texts");
  SplitIds result;
  result.offsets.resize(offsets.size());
  result.ids.reserve(4 * offsets.size());
  std::vector<std::uint8_t> present(offsets.size() - 1);
  const bool direct = kind != IdKind::text && separator.size() == 1 && !is_digit(separator.front());
  const auto body = [&](std::size_t i, std::string_view text) {
    const std::size_t before = result.ids.size();
    for (std::string_view rest = text; !rest.empty();) {
      std::size_t end = 0;
      std::uint64_t id = 0;
      if (direct && short_number(rest, separator.front(), end, id)) {
        result.ids.push_back(id);
      } else {
        end = std::min(rest.find(separator), rest.size());
        const Found found = end == 0 ? Found::missing : id_of_part(rest.substr(0, end), kind, id);
        if (found == Found::bad) return false;
        if (found == Found::id) result.ids.push_back(id);
      }
      rest.remove_prefix(std::min(end + separator.size(), rest.size()));
    }
    result.offsets[i + 1] = static_cast<std::int64_t>(result.ids.size() - before);
    return true;
  };
  result.bad = for_each_text(texts, offsets, std::span<std::uint8_t>(present), body);
  std::partial_sum(result.offsets.begin(), result.offsets.end(), result.offsets.begin());
  return result;
}

template <class Offset>
std::int64_t numbers(const Texts& texts, std::span<const Offset> offsets, std::span<double> out,
                     std::span<std::uint8_t> present) {
  if (out.size() != present.size()) throw std::invalid_argument("texts: out and present must be of one length");
  std::ranges::fill(out, std::numeric_limits<double>::quiet_NaN());
  return for_each_text(texts, offsets, present, [&](std::size_t i, std::string_view text) {
    text = trimmed(text);
    const std::string_view number = !text.empty() && text.front() == '+' ? text.substr(1) : text;
    const std::size_t first = !number.empty() && number.front() == '-' ? 1 : 0;
    // std::from_chars also takes `inf` and `nan`, which no feature can be.
    if (first < number.size() && (is_digit(number[first]) || number[first] == '.')) {
      const auto result = std::from_chars(number.data(), number.data() + number.size(), out[i]);
      return result.ec == std::errc() && result.ptr == number.data() + number.size() &&
             (first == 0 || number.data() == text.data());
    }
    if (const int value = truth(text); value >= 0) {
      out[i] = value;
      return true;
    }
    present[i] = 0;
    return is_missing(text);
  });
}

}  // namespace

std::int64_t text_ids(const Texts& texts, std::span<const std::int32_t> offsets, IdKind kind,
                      std::span<std::uint64_t> out, std::span<std::uint8_t> present) {
  return ids(texts, offsets, kind, out, present);
}

std::int64_t text_ids(const Texts& texts, std::span<const std::int64_t> offsets, IdKind kind,
                      std::span<std::uint64_t> out, std::span<std::uint8_t> present) {
  return ids(texts, offsets, kind, out, present);
}

SplitIds split_ids(const Texts& texts, std::span<const std::int32_t> offsets, IdKind kind, std::string_view separator) {
  return split(texts, offsets, kind, separator);
}

SplitIds split_ids(const Texts& texts, std::span<const std::int64_t> offsets, IdKind kind, std::string_view separator) {
  return split(texts, offsets, kind, separator);
}

std::int64_t text_numbers(const Texts& texts, std::span<const std::int32_t> offsets, std::span<double> out,
                          std::span<std::uint8_t> present) {
  return numbers(texts, offsets, out, present);
}

std::int64_t text_numbers(const Texts& texts, std::span<const std::int64_t> offsets, std::span<double> out,
                          std::span<std::uint8_t> present) {
  return numbers(texts, offsets, out, present);
}

void decimal_doubles(std::span<const float> floats, std::span<double> out) {
  if (floats.size() != out.size()) throw std::invalid_argument("floats and out must be of one length");
  for (std::size_t i = 0; i < floats.size(); ++i) {
    const float value = floats[i];
    out[i] = static_cast<double>(value);
    // Whole numbers below 2^24 are their own shortest texts.
    if (!std::isfinite(value) || (std::abs(value) < 16777216.0F && value == std::trunc(value))) continue;
    std::array<char, 32> text;
    const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
    std::from_chars(text.data(), end.ptr, out[i]);
  }
}

}  // namespace persia
