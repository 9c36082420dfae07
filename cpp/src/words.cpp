#include "persia/words.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "persia/hash.hpp"
#include "persia/text_parts.hpp"

namespace persia {

namespace {

struct Range {
  std::uint32_t first;
  std::uint32_t last;
};

// Characters from U+0080 on that are outside words: spaces, punctuation, symbols, and emoji. Ascending.
constexpr Range kOutside[] = {
    {0x0080, 0x00A9}, {0x00AB, 0x00B4}, {0x00B6, 0x00B9},   {0x00BB, 0x00BF},     // Latin-1 but ª, µ and º
    {0x00D7, 0x00D7}, {0x00F7, 0x00F7}, {0x037E, 0x037E},   {0x0387, 0x0387},     // × ÷, Greek
    {0x055A, 0x055F}, {0x0589, 0x058A}, {0x05BE, 0x05BE},   {0x05C0, 0x05C0},     // Armenian, Hebrew
    {0x05C3, 0x05C3}, {0x05F3, 0x05F4}, {0x060C, 0x060D},   {0x061B, 0x061F},     // Arabic
    {0x066A, 0x066D}, {0x06D4, 0x06D4}, {0x0964, 0x0965},   {0x1361, 0x1368},     // Devanagari, Ethiopic
    {0x1680, 0x1680}, {0x2000, 0x200B}, {0x200E, 0x206F},   {0x20A0, 0x20CF},     // general punctuation, currencies
    {0x2190, 0x2BFF}, {0x2E00, 0x2E7F}, {0x3000, 0x3004},   {0x3008, 0x3020},     // symbols, CJK punctuation
    {0x3030, 0x3030}, {0xFE00, 0xFE1F}, {0xFE30, 0xFE6F},   {0xFEFF, 0xFEFF},     // variation selectors, forms
    {0xFF00, 0xFF0F}, {0xFF1A, 0xFF20}, {0xFF3B, 0xFF3E},   {0xFF40, 0xFF40},     // full-width forms
    {0xFF5B, 0xFF65}, {0xFFE0, 0xFFFF}, {0x1F000, 0x1FAFF}, {0xE0000, 0xE0FFF}};  // emoji, tags

bool is_outside(std::uint32_t character) {
  const Range* found = std::ranges::lower_bound(kOutside, character, {}, &Range::last);
  return found != std::end(kOutside) && found->first <= character;
}

bool is_joiner(std::uint32_t character) { return character == 0x200C || character == 0x200D; }

constexpr std::array<char, 128> ascii_words(bool lower) {
  std::array<char, 128> words{};  // 0 outside words.
  for (char c = '0'; c <= '9'; ++c) words[static_cast<std::size_t>(c)] = c;
  for (char c = 'a'; c <= 'z'; ++c) words[static_cast<std::size_t>(c)] = c;
  for (char c = 'A'; c <= 'Z'; ++c) words[static_cast<std::size_t>(c)] = static_cast<char>(lower ? c + 32 : c);
  words['_'] = '_';
  return words;
}

bool is_ascii(std::string_view text) {
  std::size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, text.data() + at, sizeof(eight));
    if ((eight & 0x8080808080808080U) != 0) return false;
  }
  for (; at < text.size(); ++at) {
    if (static_cast<unsigned char>(text[at]) >= 0x80) return false;
  }
  return true;
}

// Returns the number of bytes of the character at the front, which is not ASCII; 0 if it is not UTF-8.
std::size_t decode(std::string_view text, std::uint32_t& character) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const std::uint32_t lead = byte(0);
  const std::size_t size = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  if (lead < 0xC2 || lead > 0xF4 || size > text.size()) return 0;
  character = lead & (0xFFU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0U) != 0x80U) return 0;
    character = character << 6 | (byte(i) & 0x3FU);
  }
  const bool longer = (size == 3 && character < 0x800) || (size == 4 && character < 0x10000);
  const bool surrogate = character >= 0xD800 && character <= 0xDFFF;
  return longer || surrogate || character > 0x10FFFF ? 0 : size;
}

// The words of one text, with single spaces between them.
class Line {
 public:
  void read(std::string_view text, const std::array<char, 128>& ascii) {
    text_.clear();
    bounds_.clear();
    bool inside = false;
    for (std::size_t at = 0; at < text.size();) {
      const auto byte = static_cast<unsigned char>(text[at]);
      std::size_t size = 1;
      bool belongs = false;
      char single = 0;
      if (byte < 0x80) {
        single = ascii[byte];
        belongs = single != 0;
      } else {
        std::uint32_t character = 0;
        const std::size_t found = decode(text.substr(at), character);
        if (found != 0) {
          size = found;
          belongs = !is_outside(character) && (inside || !is_joiner(character));
        }
      }
      if (belongs) {
        if (!inside) begin();
        if (byte < 0x80) {
          text_.push_back(single);
        } else {
          text_.append(text.substr(at, size));
        }
      } else if (inside) {
        bounds_.back().second = text_.size();
      }
      inside = belongs;
      at += size;
    }
    if (inside) bounds_.back().second = text_.size();
  }

  void append_ids(std::span<const std::uint8_t> lengths, std::vector<std::uint64_t>& ids) const {
    for (std::size_t first = 0; first < bounds_.size(); ++first) {
      for (const std::size_t length : lengths) {
        if (length > bounds_.size() - first) continue;
        const std::size_t start = bounds_[first].first;
        ids.push_back(xxh64(text_.data() + start, bounds_[first + length - 1].second - start, 0));
      }
    }
  }

 private:
  void begin() {
    if (!bounds_.empty()) text_.push_back(' ');
    bounds_.emplace_back(text_.size(), text_.size());
  }

  std::string text_;
  std::vector<std::pair<std::size_t, std::size_t>> bounds_;
};

template <class Offset>
std::string non_ascii(const Texts& texts, std::span<const Offset> offsets) {
  std::string joined;
  std::vector<std::uint8_t> present(offsets.empty() ? 0 : offsets.size() - 1);
  for_each_text(texts, offsets, present, [&](std::size_t, std::string_view text) {
    if (is_ascii(text)) return true;
    const std::size_t begin = joined.size();
    joined.append(text);
    std::replace(joined.begin() + static_cast<std::ptrdiff_t>(begin), joined.end(), '\0', ' ');
    joined.push_back('\0');
    return true;
  });
  return joined;
}

template <class Offset>
Words words(const Texts& texts, std::span<const Offset> offsets, std::span<const std::uint8_t> lengths, bool lower,
            std::string_view lowered) {
  static constexpr std::array<char, 128> kAsIs = ascii_words(false);
  static constexpr std::array<char, 128> kLower = ascii_words(true);
  if (std::ranges::find(lengths, 0) != lengths.end()) throw std::invalid_argument("lengths: must be at least 1");
  Words found;
  std::vector<std::uint8_t> present(offsets.empty() ? 0 : offsets.size() - 1);
  found.offsets.assign(present.size() + 1, 0);
  Line line;
  for_each_text(texts, offsets, present, [&](std::size_t i, std::string_view text) {
    if (lower && !is_ascii(text)) {
      const std::size_t end = lowered.find('\0');
      if (end == std::string_view::npos) throw std::invalid_argument("lowered: has too few texts");
      text = lowered.substr(0, end);
      lowered.remove_prefix(end + 1);
    }
    line.read(text, lower ? kLower : kAsIs);
    const std::size_t before = found.ids.size();
    line.append_ids(lengths, found.ids);
    found.offsets[i + 1] = static_cast<std::int64_t>(found.ids.size() - before);
    return true;
  });
  for (std::size_t i = 1; i < found.offsets.size(); ++i) found.offsets[i] += found.offsets[i - 1];
  return found;
}

}  // namespace

std::string non_ascii_texts(const Texts& texts, std::span<const std::int32_t> offsets) {
  return non_ascii(texts, offsets);
}

std::string non_ascii_texts(const Texts& texts, std::span<const std::int64_t> offsets) {
  return non_ascii(texts, offsets);
}

Words text_words(const Texts& texts, std::span<const std::int32_t> offsets, std::span<const std::uint8_t> lengths,
                 bool lower, std::string_view lowered) {
  return words(texts, offsets, lengths, lower, lowered);
}

Words text_words(const Texts& texts, std::span<const std::int64_t> offsets, std::span<const std::uint8_t> lengths,
                 bool lower, std::string_view lowered) {
  return words(texts, offsets, lengths, lower, lowered);
}

}  // namespace persia
