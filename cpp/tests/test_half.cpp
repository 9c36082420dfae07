// 16-bit values against the formats themselves: every number of each, and every random number for some.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "check.hpp"
#include "persia/half.hpp"

using persia::Dtype;
using persia::ValueCodec;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Format {
  Dtype dtype;
  int fraction;  // bits
  int smallest;  // exponent of the smallest normal number
  float largest;
};
constexpr Format kFormats[] = {{Dtype::kBfloat16, 7, -126, 0x1.FEp127f}, {Dtype::kFloat16, 10, -14, 65504.0f}};

// The value of the bits of a number, from the definition of the format.
double value_of(const Format& f, std::uint16_t half) {
  const int sign = half >> 15, field = (half & 0x7FFF) >> f.fraction, fraction = half & ((1 << f.fraction) - 1);
  const int most = (1 << (15 - f.fraction)) - 1;
  double value;
  if (field == most) {
    value = fraction != 0 ? std::nan("") : INFINITY;
  } else if (field == 0) {
    value = std::ldexp(fraction, f.smallest - f.fraction);
  } else {
    value = std::ldexp((1 << f.fraction) + fraction, f.smallest - f.fraction + field - 1);
  }
  return sign != 0 ? -value : value;
}

std::vector<std::uint16_t> stored(const ValueCodec& codec, const std::vector<float>& values, bool random,
                                  std::uint64_t key = 0) {
  std::vector<std::uint16_t> halves(2 * codec.words(values.size()), 0xAAAA);
  if (random) {
    codec.store_stochastic(values.data(), halves.data(), values.size(), {key, 0});
  } else {
    codec.store_nearest(values.data(), halves.data(), values.size());
  }
  return halves;
}

std::vector<float> loaded(const ValueCodec& codec, const std::vector<std::uint16_t>& halves, std::size_t count) {
  std::vector<float> values(count);
  codec.load(halves.data(), values.data(), count);
  return values;
}

bool same(float a, float b) { return std::isnan(a) ? std::isnan(b) : std::bit_cast<int>(a) == std::bit_cast<int>(b); }

}  // namespace

TEST(every_number_is_kept) {
  for (const Format& f : kFormats) {
    const ValueCodec codec(f.dtype);
    std::vector<std::uint16_t> all(1 << 16);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const auto values = loaded(codec, all, all.size());
    for (std::size_t i = 0; i < all.size(); ++i) CHECK(same(values[i], static_cast<float>(value_of(f, all[i]))));
    for (const bool random : {false, true}) {
      const auto back = loaded(codec, stored(codec, values, random, 7), all.size());
      for (std::size_t i = 0; i < all.size(); ++i) CHECK(same(back[i], values[i]));
    }
  }
}

#if defined(__SSE2__)
// As torch.set_flush_denormal leaves a thread: subnormal float32 are zeros to it. No number of float16 is one.
TEST(float16_is_kept_where_subnormal_numbers_are_flushed) {
  const Format& f = kFormats[1];
  const ValueCodec codec(f.dtype);
  std::vector<std::uint16_t> all;
  for (std::uint32_t i = 0; i < 0x10000; ++i) {
    if (std::isfinite(value_of(f, static_cast<std::uint16_t>(i)))) all.push_back(static_cast<std::uint16_t>(i));
  }
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // both as results and as operands
  const auto values = loaded(codec, all, all.size());
  const auto near = stored(codec, values, false);
  const auto random = stored(codec, values, true, 7);
  _mm_setcsr(before);
  for (std::size_t i = 0; i < all.size(); ++i) {
    CHECK(same(values[i], static_cast<float>(value_of(f, all[i]))));
    CHECK(near[i] == all[i] && random[i] == all[i]);
  }
}
#endif

TEST(largest_finite) {
  CHECK(persia::largest_finite(nullptr, 0) == 0);
  std::vector<float> values = {1, -70000, kInf, -kInf, std::nanf(""), 65504};
  CHECK(persia::largest_finite(values.data(), values.size()) == 70000);
  CHECK(persia::largest_finite(values.data() + 2, 3) == 0);
  values.assign(100, -1e-45f);
  CHECK(persia::largest_finite(values.data(), 100) == 1e-45f);
}

// Neighbours of a value among the numbers of the format: they bound what it may become.
TEST(rounding_between_neighbours) {
  for (const Format& f : kFormats) {
    const ValueCodec codec(f.dtype);
    std::vector<double> numbers;
    for (std::uint32_t i = 0; i < 0x8000; ++i) {
      if (std::isfinite(value_of(f, static_cast<std::uint16_t>(i)))) {
        numbers.push_back(value_of(f, static_cast<std::uint16_t>(i)));
      }
    }
    std::vector<float> values;
    for (std::uint32_t i = 0; i < 20000; ++i) {
      const auto bits = static_cast<std::uint32_t>(persia::random_bits(3, i));
      const float value = std::bit_cast<float>(i % 2 != 0 ? bits : (bits & 0x8FFFFFFFu) | 0x30000000u);
      values.push_back(std::isfinite(value) ? value : 1.1f);
    }
    const auto near = loaded(codec, stored(codec, values, false), values.size());
    std::size_t ups = 0, downs = 0;
    for (std::uint64_t key = 0; key < 4; ++key) {
      const auto random = loaded(codec, stored(codec, values, true, key), values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double magnitude = std::fabs(values[i]);
        const auto above = std::lower_bound(numbers.begin(), numbers.end(), magnitude);
        const double high = above == numbers.end() ? numbers.back() : *above;
        const double low = above == numbers.end()                            ? high
                           : *above == magnitude || above == numbers.begin() ? *above
                                                                             : above[-1];
        const double got = std::fabs(random[i]);
        CHECK(got == low || got == high);
        CHECK(std::signbit(random[i]) == std::signbit(values[i]));
        ups += got == high && low != high;
        downs += got == low && low != high;
        const double rounded = std::fabs(near[i]);
        CHECK(std::fabs(rounded - magnitude) <= std::min(high - magnitude, magnitude - low) || magnitude > f.largest);
      }
    }
    CHECK(ups > 1000 && downs > 1000);
  }
}

TEST(rounding_is_right_on_average) {
  constexpr std::size_t kSamples = 1 << 16;
  for (const Format& f : kFormats) {
    const ValueCodec codec(f.dtype);
    // Normal and subnormal numbers of float16, at several distances between two numbers.
    for (const float value : {1.0f + 0.3f / 1024, -0.7003f, 3.1e-5f, 4.4e-7f, 2e-8f, 1e-9f, 65000.3f}) {
      const auto values = loaded(codec, stored(codec, std::vector<float>(kSamples, value), true, 11), kSamples);
      double sum = 0, step = 0;
      for (const float v : values) {
        sum += v;
        step = std::max(step, std::fabs(static_cast<double>(v) - value));
      }
      // Five deviations of a mean of numbers that are at most 2 steps apart.
      CHECK(std::fabs(sum / kSamples - value) <= 5 * step / std::sqrt(kSamples));
      CHECK(step > 0);
    }
  }
}

TEST(what_is_finite_stays_finite) {
  for (const Format& f : kFormats) {
    const ValueCodec codec(f.dtype);
    const std::vector<float> values = {std::numeric_limits<float>::max(),
                                       -std::numeric_limits<float>::max(),
                                       f.largest * 1.0019f > f.largest ? f.largest * 1.0019f : f.largest,
                                       kInf,
                                       -kInf,
                                       std::nanf(""),
                                       -0.0f};
    for (const bool random : {false, true}) {
      const auto got = loaded(codec, stored(codec, values, random, 5), values.size());
      CHECK(got[0] == f.largest && got[1] == -f.largest && got[2] == f.largest);
      CHECK(got[3] == kInf && got[4] == -kInf && std::isnan(got[5]) && got[6] == 0 && std::signbit(got[6]));
    }
  }
}

TEST(ties_go_to_even) {
  const ValueCodec bfloat(Dtype::kBfloat16), half(Dtype::kFloat16);
  const auto near = [](const ValueCodec& codec, float value) {
    return loaded(codec, stored(codec, {value}, false), 1)[0];
  };
  CHECK(near(bfloat, 1.0f + 0x1p-8f) == 1.0f && near(bfloat, 1.0f + 3 * 0x1p-8f) == 1.0f + 0x1p-6f);
  CHECK(near(half, 1.0f + 0x1p-11f) == 1.0f && near(half, 1.0f + 3 * 0x1p-11f) == 1.0f + 0x1p-9f);
  CHECK(near(half, 0x1p-25f) == 0.0f && near(half, 3 * 0x1p-25f) == 0x1p-23f);
}

// Rows of any length: the last half of an odd number is zero, and nothing is written behind it.
TEST(lengths) {
  for (const Format& f : kFormats) {
    const ValueCodec codec(f.dtype);
    for (std::size_t count = 1; count < 150; ++count) {
      std::vector<float> values(count);
      for (std::size_t i = 0; i < count; ++i) values[i] = 0.37f * static_cast<float>(i + 1);
      std::vector<float> whole(150);
      std::copy(values.begin(), values.end(), whole.begin());
      for (const bool random : {false, true}) {
        std::vector<std::uint16_t> halves(2 * codec.words(count) + 1, 0xAAAA);
        random ? codec.store_stochastic(values.data(), halves.data(), count, {9, 0})
               : codec.store_nearest(values.data(), halves.data(), count);
        CHECK(halves.back() == 0xAAAA);
        if (count % 2 != 0) CHECK(halves[count] == 0);
        // An element does not depend on those behind it.
        const auto longer = stored(codec, whole, random, 9);
        CHECK(std::equal(halves.begin(), halves.begin() + static_cast<std::ptrdiff_t>(count), longer.begin()));
      }
    }
  }
}

// No two updates of rows share random numbers, nor do the embedding and the state of a row of the largest dim; nor
// updates of the same number at another step, or of a row with other values.
TEST(random_numbers_differ) {
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t id = 0; id < 20; ++id) {
    for (std::uint32_t step = 0; step < 5; ++step) {
      for (std::uint32_t changed = 0; changed <= 7; ++changed) {
        std::uint16_t halves[] = {0x3F80, 0xBF80, 0, 0x3F80, 0xBF80, 0x3F80, 0};
        if (changed > 0) halves[changed - 1] ^= changed != 2 ? 1u : 0x8000u;
        std::uint32_t words[4] = {};
        std::memcpy(words, halves, sizeof(halves));
        const std::uint64_t key = persia::Rounding::key_of(1, 2, id, step, words, 4);
        // What is behind them does not count, nor does their alignment.
        std::byte moved[20] = {};
        std::memcpy(moved + 4, words, 16);
        CHECK(persia::Rounding::key_of(1, 2, id, step, moved + 4, 4) == key);
        for (std::uint32_t update = 0; update < 8; ++update) {
          for (const std::uint32_t part : {0u, 1u}) {
            const auto random = persia::Rounding::of(key, update, part);
            for (const std::uint64_t at : {0u, 1u, 65536u / 4 * (part + 1) - 1}) {
              numbers.push_back(persia::random_bits(random.key, random.first + at));
            }
          }
        }
      }
    }
  }
  std::sort(numbers.begin(), numbers.end());
  CHECK(std::adjacent_find(numbers.begin(), numbers.end()) == numbers.end());
}

TEST(names) {
  CHECK(persia::dtype_of("bfloat16") == Dtype::kBfloat16);
  CHECK_THROWS(persia::dtype_of("bf16"), std::invalid_argument);
}

MAIN
