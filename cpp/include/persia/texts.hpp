// Converts texts to ids and to numbers (docs/guide/your-data.md, "From values to ids").
// Ids are stored in checkpoints, so these rules never change. Thread-safe; without locks.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace persia {

// Texts in the layout of Arrow: text i is data[offsets[i], offsets[i + 1]). Where the validity bitmap (may be null) has
// no bit, starting at bit `validity_start`, the text is null. One offset more than texts.
struct Texts {
  std::span<const std::uint8_t> data;
  const std::uint8_t* validity = nullptr;
  std::size_t validity_start = 0;
};

// Conversion of the texts of an ID-type feature to ids.
enum class IdKind : std::uint8_t {
  automatic,  // a canonical whole number below 2^64 is the id, any other text is hashed
  number,     // only such numbers; markers of missing values (see text_numbers) have no id
  text,       // every text is hashed
};

// Converts out.size() texts to ids. A null or an empty text has none: present[i] is 0 and out[i] is 0; otherwise
// present[i] is 1. A canonical whole number is `0` or a number without leading zeros, perhaps with a sign and with
// zeros after a decimal point, spaces around it being ignored; `true` and `false` count as 1 and 0. One that is
// negative or too large is hashed as its digits, without the zeros after the point. Returns the first text that is no
// id (only with IdKind::number), or -1. Throws std::invalid_argument for offsets that decrease or leave the data.
std::int64_t text_ids(const Texts& texts, std::span<const std::int32_t> offsets, IdKind kind,
                      std::span<std::uint64_t> out, std::span<std::uint8_t> present);
std::int64_t text_ids(const Texts& texts, std::span<const std::int64_t> offsets, IdKind kind,
                      std::span<std::uint64_t> out, std::span<std::uint8_t> present);

// The ids of the parts of texts.
struct SplitIds {
  std::vector<std::uint64_t> ids;
  std::vector<std::int64_t> offsets;  // one more than texts: text i has ids[offsets[i], offsets[i + 1])
  std::int64_t bad = -1;  // the first text with a part that is no id, or -1; ids are undefined from there on
};

// Splits texts at each separator, from left to right, and converts the parts as text_ids does: an empty part has no
// id, neither has a null. Throws as text_ids, and for an empty separator.
SplitIds split_ids(const Texts& texts, std::span<const std::int32_t> offsets, IdKind kind, std::string_view separator);
SplitIds split_ids(const Texts& texts, std::span<const std::int64_t> offsets, IdKind kind, std::string_view separator);

// Converts texts to numbers: decimal, perhaps with an exponent, spaces around being ignored; `true` and `false` are 1
// and 0. A null, an empty text, spaces only, or a marker of a missing value (NA, N/A, n/a, #N/A, <NA>, NULL, Null,
// null, NaN, nan, NAN, None, none, \N) is missing: present[i] is 0 and out[i] is NaN. Returns the first text that is no
// finite number, or -1; `out` is undefined from there on. Throws as text_ids.
std::int64_t text_numbers(const Texts& texts, std::span<const std::int32_t> offsets, std::span<double> out,
                          std::span<std::uint8_t> present);
std::int64_t text_numbers(const Texts& texts, std::span<const std::int64_t> offsets, std::span<double> out,
                          std::span<std::uint8_t> present);

// Converts floats to the doubles nearest to their shortest decimal texts: 0.1f becomes 0.1, as from a file of texts.
void decimal_doubles(std::span<const float> floats, std::span<double> out);

}  // namespace persia
