// Converts texts to times (docs/guide/features.md). Thread-safe; without locks.
#pragma once
#include <cstdint>
#include <span>

#include "persia/texts.hpp"

namespace persia {

// Converts texts to whole seconds since 1970 (UTC), rounded down. A text is, with spaces around it ignored:
// - a decimal number of units since 1970, `per_second` of which are a second,
// - an ISO date, perhaps with a time and an offset from UTC: 2024-05-01, 2024-05-01T12:30:00.5+02:00, 2024-05-01
// 12:30Z,
// - a date with the day first and points, perhaps with a time: 1.5.2024, 01.05.2024 12:30.
// Without an offset it is in UTC. A null, an empty text or a marker of a missing value (see text_numbers) is missing:
// present[i] is 0 and out[i] is 0; otherwise present[i] is 1. Returns the first text that is none of these, or -1;
// `out` is undefined from there on. Throws as text_ids.
std::int64_t text_times(const Texts& texts, std::span<const std::int32_t> offsets, std::int64_t per_second,
                        std::span<std::int64_t> out, std::span<std::uint8_t> present);
std::int64_t text_times(const Texts& texts, std::span<const std::int64_t> offsets, std::int64_t per_second,
                        std::span<std::int64_t> out, std::span<std::uint8_t> present);

}  // namespace persia
