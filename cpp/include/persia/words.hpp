// Finds the words of texts (docs/guide/features.md). Ids are stored in checkpoints, so these rules never change.
// Thread-safe; without locks.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "persia/texts.hpp"

namespace persia {

// Ids of the words of text i: ids[offsets[i], offsets[i + 1]).
struct Words {
  std::vector<std::uint64_t> ids;
  std::vector<std::int64_t> offsets;
};

// Returns the texts that are not ASCII, each with a NUL byte after it; their own NUL bytes become spaces. For callers
// that convert them to lower case, which needs tables of Unicode. Throws std::invalid_argument as text_ids.
std::string non_ascii_texts(const Texts& texts, std::span<const std::int32_t> offsets);
std::string non_ascii_texts(const Texts& texts, std::span<const std::int64_t> offsets);

// Returns the words of texts, and sequences of them. A word is a sequence of ASCII letters, digits, `_` and all
// characters from U+0080 on but spaces, punctuation and symbols (kOutside in words.cpp). The joiners U+200C and U+200D
// are inside words, but begin none. Bytes that are not UTF-8 are outside. The id of a sequence is the XXH64 of its
// words with single spaces between them. The ids of a text are in the order of their first word, then of `lengths`.
//
// lengths: numbers of words of the sequences, each at least 1.
// lower: whether to convert to lower case: ASCII texts here; for the others, `lowered` has the result of
// non_ascii_texts in lower case. Throws std::invalid_argument as text_ids, and if `lowered` has too few texts.
Words text_words(const Texts& texts, std::span<const std::int32_t> offsets, std::span<const std::uint8_t> lengths,
                 bool lower, std::string_view lowered);
Words text_words(const Texts& texts, std::span<const std::int64_t> offsets, std::span<const std::uint8_t> lengths,
                 bool lower, std::string_view lowered);

}  // namespace persia
