// Rows as they travel between embedding worker and NN worker: float16 with a float32 scale per row (Persia paper,
// section 4.2.3, non-uniform fp16 compression).
//
// The scale of a row makes its largest magnitude 2^15, so that float16 has a full precision of 11 bits for it, and for
// all that is up to 2^29 times smaller. Every result is the same to the bit on every machine, NaN payloads excepted.
#pragma once
#include <cstddef>
#include <cstdint>

namespace persia {

// halves[i] = float16(rows[i] / scale), rounded to nearest, ties to even; scale = max|row| / 2^15, at least 2^-126, and
// 1 for a row of zeros. A row with an infinity becomes NaN as a whole; a NaN stays one.
void encode_fp16(const float* rows, std::size_t count, std::size_t dim, std::uint16_t* halves, float* scales);

// rows[i] = float32(halves[i]) * scale of its row.
void decode_fp16(const std::uint16_t* halves, const float* scales, std::size_t count, std::size_t dim, float* rows);

}  // namespace persia
