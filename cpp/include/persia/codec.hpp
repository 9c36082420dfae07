// Encodes rows between embedding worker and NN worker: float16 with a float32 scale per row (Persia paper,
// section 4.2.3, non-uniform fp16 compression).
//
// The scale maps the largest magnitude of a row to 2^15, so float16 keeps its full precision of 11 bits for values down
// to 2^-29 of it. Results are bit-identical on every machine, except NaN payloads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace persia {

// Encodes rows: halves[i] = float16(rows[i] / scale), rounded to nearest, ties to even. The scale is max|row| / 2^15,
// at least 2^-126, and 1 for a row of zeros. A row with an infinity becomes NaN as a whole; NaN stays NaN.
void encode_fp16(const float* rows, std::size_t count, std::size_t dim, std::uint16_t* halves, float* scales);

// Decodes rows: rows[i] = float32(halves[i]) * scale of its row.
void decode_fp16(const std::uint16_t* halves, const float* scales, std::size_t count, std::size_t dim, float* rows);

}  // namespace persia
