#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.hpp"
#include "persia/codec.hpp"

namespace {

struct Encoded {
  std::vector<std::uint16_t> halves;
  std::vector<float> scales, decoded;
};

Encoded encode(const std::vector<float>& rows, std::size_t dim) {
  const std::size_t count = rows.size() / dim;
  Encoded e{std::vector<std::uint16_t>(rows.size()), std::vector<float>(count), std::vector<float>(rows.size())};
  persia::encode_fp16(rows.data(), count, dim, e.halves.data(), e.scales.data());
  persia::decode_fp16(e.halves.data(), e.scales.data(), count, dim, e.decoded.data());
  return e;
}

}  // namespace

// A row of dim 1 goes through the plain code, one of 8 or 16 through vectors: each value, in rows of one scale.
TEST(every_width_rounds_alike) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 0x47000000u; bits += 9973) values.push_back(std::bit_cast<float>(bits));
  for (std::uint32_t half = 0; half < 0x7800; ++half) {  // Exactly between two neighbours.
    const std::uint32_t bits = (half << 13) + 0x38000000u;
    if (bits < 0x47000000u) values.push_back(std::bit_cast<float>(bits | 0x1000u));
  }
  for (std::size_t i = 1; i <= 2048; ++i) values.push_back(std::ldexp(static_cast<float>(2 * i - 1), -25));
  const float full = 32768.0f;  // so that the scale is 1
  for (const float value : values) {
    const auto plain = encode({value, full, -value}, 3);
    for (const std::size_t dim : {8, 16}) {
      std::vector<float> row(dim, value);
      row[dim - 1] = -value;
      row[1] = full;
      const auto wide = encode(row, dim);
      CHECK(wide.scales[0] == 1.0f && plain.scales[0] == 1.0f);
      CHECK(wide.halves[0] == plain.halves[0]);
      CHECK(wide.halves[dim - 1] == plain.halves[2]);
      CHECK(std::bit_cast<std::uint32_t>(wide.decoded[0]) == std::bit_cast<std::uint32_t>(plain.decoded[0]));
    }
    CHECK(std::fabs(plain.decoded[0] - value) <= std::max(std::fabs(value) * 0x1p-11f, 0x1p-25f));
  }
}

TEST(scales_follow_the_largest_value) {
  const auto e = encode({0.0f, 0.0f, 3.0f, -12.0f, 1e-45f, 0.0f}, 2);
  CHECK(e.scales[0] == 1.0f);
  CHECK(e.scales[1] == 12.0f / 32768.0f);
  CHECK(e.scales[2] == 0x1p-126f);
  CHECK(e.decoded[0] == 0.0f && e.decoded[3] == -12.0f && e.decoded[2] == 3.0f);
}

TEST(what_is_not_finite_stays_so) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  for (const std::size_t dim : {1, 5, 8, 16, 19}) {
    for (const float bad : {nan, -nan, infinity, -infinity}) {
      std::vector<float> row(dim, 2.0f);
      row[dim - 1] = bad;
      const auto e = encode(row, dim);
      CHECK(!std::isfinite(e.decoded[dim - 1]));
      if (dim > 1 && std::isnan(bad)) CHECK(e.decoded[0] == 2.0f);
    }
  }
  CHECK(encode({std::numeric_limits<float>::max(), 0.0f}, 2).decoded[0] == std::numeric_limits<float>::max());
}

MAIN
