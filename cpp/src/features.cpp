#include "persia/features.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "persia/isa.hpp"

// Inlined, to be compiled for the instruction set of each caller.
#define PERSIA_LOOP [[gnu::always_inline]] inline

namespace persia {
namespace {

constexpr std::size_t kBlock = 512;    // Values between rounds of the loops, which stay in the L1 cache.
constexpr double kExact = 16777216.0;  // Up to 2^24 a float represents every whole number.
constexpr std::uint64_t kHalfRoot = 0x3fe6a09eULL << 32;  // About sqrt(1/2), as bits.
constexpr std::uint64_t kOne = 0x3ffULL << 52;
constexpr std::uint64_t kFraction = (1ULL << 52) - 1;
constexpr std::uint64_t kTop = 1ULL << 63;

// Has kTop where a value is infinite or NaN. These are ORed, which becomes a vector where a bool would not.
PERSIA_LOOP std::uint64_t not_finite(double x) { return (std::bit_cast<std::uint64_t>(x) & ~kTop) + (1ULL << 52); }

// Has kTop where a value is NaN.
PERSIA_LOOP std::uint64_t not_number(double x) { return (std::bit_cast<std::uint64_t>(x) & ~kTop) + kFraction; }

// Has the top bit where a value is infinite or NaN.
PERSIA_LOOP std::uint32_t not_finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7fffffffU) + (1U << 23); }

// log(1 + x) for a finite x >= 0, with an error below 1 ulp, as in fdlibm (Sun Microsystems, 1993, s_log1p.c): 1 + x is
// 2^k * (1 + f), with 1 + f between sqrt(1/2) and sqrt(2), and log(1 + f) is a polynomial of f / (2 + f).
PERSIA_LOOP double log1p_of(double x) {
  constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  const double sum = 1.0 + x;
  const std::uint64_t shifted = std::bit_cast<std::uint64_t>(sum) + (kOne - kHalfRoot);
  // The exponent as a double without a conversion from integers, for which older processors have no vectors.
  const double k = std::bit_cast<double>((shifted >> 52) | (0x433ULL << 52)) - (4503599627370496.0 + 1023.0);
  const double reduced = std::bit_cast<double>((shifted & kFraction) + kHalfRoot) - 1.0;
  const double lost = (k >= 2.0 ? 1.0 - (sum - x) : x - (sum - 1.0)) / sum;
  const double f = k == 0.0 ? x : reduced;
  const double correction = k == 0.0 ? 0.0 : lost;
  const double half = 0.5 * f * f;
  const double s = f / (2.0 + f);
  const double z = s * s;
  const double w = z * z;
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd =
      z * (6.666666666666735130e-01 +
           w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
  return s * (half + (odd + even)) + (k * kLn2Low + correction) - half + f + k * kLn2High;
}

// Writes the number of edges below each value, or, with `kEqual`, not above it. A step of the search goes over all
// values, so that it has no branch to mispredict.
template <bool kEqual>
PERSIA_LOOP void search(std::span<const double> edges, const double* values, std::size_t count, std::uint64_t* out) {
  std::fill_n(out, count, 0);
  for (std::size_t left = edges.size(); left > 0;) {
    const std::size_t half = left - left / 2;
    left -= half;
    const double* const middle = edges.data() + (half - 1);
    for (std::size_t i = 0; i < count; ++i) {
      const double edge = middle[out[i]];
      out[i] += (kEqual ? edge <= values[i] : edge < values[i]) ? half : 0;
    }
  }
}

PERSIA_LOOP void ranks(std::span<const double> quantiles, double* values, std::size_t count) {
  std::uint64_t found[kBlock];
  search<false>(quantiles, values, count, found);
  const auto last = static_cast<double>(quantiles.size() - 1);
  for (std::size_t i = 0; i < count; ++i) {
    const double x = values[i];
    const std::size_t above = found[i];
    if (x <= quantiles.front() || x >= quantiles.back()) {
      values[i] = x <= quantiles.front() ? 0.0 : 1.0;
    } else if (quantiles[above] == x) {
      std::size_t last_equal = above;
      while (quantiles[last_equal + 1] == x) ++last_equal;  // x is below the last quantile.
      values[i] = static_cast<double>(above + last_equal) / 2.0 / last;
    } else {
      const double low = quantiles[above - 1];
      values[i] = (static_cast<double>(above - 1) + (x - low) / (quantiles[above] - low)) / last;
    }
  }
}

PERSIA_LOOP bool transform_block(const DenseRules& rules, double* values, std::size_t count) {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found |= not_finite(values[i]);
  if ((found & kTop) != 0) return false;
  if (rules.clips) {
    const double low = rules.low, high = rules.high;
    for (std::size_t i = 0; i < count; ++i) {
      const double x = values[i] < low ? low : values[i];
      values[i] = x > high ? high : x;
    }
  }
  if (rules.log) {
    for (std::size_t i = 0; i < count; ++i) values[i] = std::copysign(log1p_of(std::abs(values[i])), values[i]);
  }
  if (rules.scale == DenseScale::affine) {
    const double centre = rules.centre, width = rules.width;
    for (std::size_t i = 0; i < count; ++i) values[i] = (values[i] - centre) / width;
  } else if (rules.scale == DenseScale::quantile) {
    ranks(rules.quantiles, values, count);
  }
  for (std::size_t i = 0; i < count; ++i) values[i] += 0.0;
  return true;
}

template <class T>
PERSIA_LOOP void load_as(const void* from, std::size_t start, std::size_t count, double* to) {
  const T* const values = static_cast<const T*>(from) + start;
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<double>(values[i]);
}

PERSIA_LOOP void load(const DenseColumn& column, std::size_t start, std::size_t count, double* to) {
  switch (column.type) {
    case NumberType::float64:
      return load_as<double>(column.values, start, count, to);
    case NumberType::float32:
      return load_as<float>(column.values, start, count, to);
    case NumberType::int64:
      return load_as<std::int64_t>(column.values, start, count, to);
    case NumberType::int32:
      return load_as<std::int32_t>(column.values, start, count, to);
  }
}

// Values start to start + count of the flat column, into the rows of `out`. Returns false if one is refused.
PERSIA_LOOP bool write_block(const DenseColumn& column, std::size_t start, std::size_t count, float* out,
                             std::size_t stride) {
  double values[kBlock];
  float rounded[kBlock];
  load(column, start, count, values);
  const std::size_t size = column.size;
  std::uint64_t absent = 0;
  for (std::size_t i = 0; i < count; ++i) absent |= not_number(values[i]);
  bool complete = (absent & kTop) == 0;
  if (column.missing != nullptr) {
    const std::uint8_t* const missing = column.missing;
    complete &= std::memchr(missing + start / size, 1, (start + count - 1) / size + 1 - start / size) == nullptr;
  }
  if (column.indicator) {
    for (std::size_t row = start / size; row <= (start + count - 1) / size; ++row)
      out[row * stride + column.at + size] = 0;
  }
  if (!complete) {
    if (!column.fills) return false;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = (start + i) / size;
      const bool none = size == 1 && std::isnan(values[i]);
      if (!none && (column.missing == nullptr || column.missing[row] == 0)) continue;
      values[i] = column.fill;
      if (column.indicator) out[row * stride + column.at + size] = 1;
    }
  }
  if (!transform_block(column.rules, values, count)) return false;
  std::uint32_t refused = 0;
  for (std::size_t i = 0; i < count; ++i) {
    rounded[i] = static_cast<float>(values[i]);
    refused |= not_finite(rounded[i]);
  }
  bool taken = refused >> 31 == 0;
  if (column.rules.scale == DenseScale::none && !column.rules.log) {
    for (std::size_t i = 0; i < count; ++i) {
      taken &= std::abs(values[i]) < kExact || std::abs(static_cast<double>(rounded[i]) - values[i]) < 0.5;
    }
  }
  float* to = out + (start / size) * stride + column.at;
  if (size == 1) {
    for (std::size_t i = 0; i < count; ++i, to += stride) *to = rounded[i];
    return taken;
  }
  std::size_t place = start % size;
  for (std::size_t i = 0; i < count; ++i) {
    to[place] = rounded[i];
    if (++place == size) {
      place = 0;
      to += stride;
    }
  }
  return taken;
}

// Row by row of blocks, so that a block of the output stays in the cache until all columns are written.
PERSIA_LOOP std::int64_t write_columns(std::span<const DenseColumn> columns, std::size_t rows, float* out,
                                       std::size_t stride) {
  for (std::size_t row = 0; row < rows; row += kBlock) {
    const std::size_t end = std::min(rows, row + kBlock);
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::size_t last = end * columns[c].size;
      for (std::size_t start = row * columns[c].size; start < last; start += kBlock) {
        if (!write_block(columns[c], start, std::min(kBlock, last - start), out, stride)) {
          return static_cast<std::int64_t>(c);
        }
      }
    }
  }
  return -1;
}

PERSIA_LOOP bool transform_all(const DenseRules& rules, std::span<double> values) {
  for (std::size_t start = 0; start < values.size(); start += kBlock) {
    if (!transform_block(rules, values.data() + start, std::min(kBlock, values.size() - start))) return false;
  }
  return true;
}

PERSIA_LOOP void bucket_all(std::span<const double> values, std::span<const double> edges, std::uint64_t* out) {
  for (std::size_t start = 0; start < values.size(); start += kBlock) {
    search<true>(edges, values.data() + start, std::min(kBlock, values.size() - start), out + start);
  }
}

struct Kernels {
  decltype(&write_columns) write;
  decltype(&transform_all) transform;
  decltype(&bucket_all) buckets;
};

#define PERSIA_KERNELS(NAME, TARGET)                                                                                \
  struct NAME {                                                                                                     \
    TARGET static std::int64_t write(std::span<const DenseColumn> columns, std::size_t rows, float* out,            \
                                     std::size_t stride) {                                                          \
      return write_columns(columns, rows, out, stride);                                                             \
    }                                                                                                               \
    TARGET static bool transform(const DenseRules& rules, std::span<double> values) {                               \
      return transform_all(rules, values);                                                                          \
    }                                                                                                               \
    TARGET static void buckets(std::span<const double> values, std::span<const double> edges, std::uint64_t* out) { \
      bucket_all(values, edges, out);                                                                               \
    }                                                                                                               \
    static constexpr Kernels kAll{write, transform, buckets};                                                       \
  }
PERSIA_KERNELS(Base, );
#if defined(__x86_64__)
PERSIA_KERNELS(Avx2, [[gnu::target("avx2")]]);
PERSIA_KERNELS(Avx512, PERSIA_AVX512);
#endif
#undef PERSIA_KERNELS

const Kernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return Avx512::kAll;
  if (isa() == Isa::kAvx2) return Avx2::kAll;
#endif
  return Base::kAll;
}

void check(const DenseRules& rules) {
  if (rules.scale == DenseScale::quantile && rules.quantiles.size() < 2) {
    throw std::invalid_argument("quantiles: there must be two or more");
  }
}

}  // namespace

bool transform(const DenseRules& rules, std::span<double> values) {
  check(rules);
  return kernels().transform(rules, values);
}

std::int64_t dense_columns(std::span<const DenseColumn> columns, std::size_t rows, float* out, std::size_t stride) {
  for (const DenseColumn& column : columns) {
    check(column.rules);
    // Without sums, which could wrap.
    const std::size_t space = column.at < stride ? stride - column.at : 0;
    if (column.size == 0 || column.size > space || (column.indicator && column.size == space)) {
      throw std::invalid_argument("columns: each must have values, and be inside a row of the output");
    }
  }
  return kernels().write(columns, rows, out, stride);
}

void buckets(std::span<const double> values, std::span<const double> edges, std::span<std::uint64_t> out) {
  if (values.size() != out.size()) throw std::invalid_argument("values and out must be of one length");
  kernels().buckets(values, edges, out.data());
}

}  // namespace persia
