// Rules of non-ID-type features and buckets of numbers (docs/guide/features.md). Thread-safe; without locks.
// Results have the same bits on every machine: logarithms are computed here, since those of libm and numpy differ by
// version and processor.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

namespace persia {

enum class DenseScale : std::uint8_t {
  none,
  affine,    // (x - centre) / width
  quantile,  // the rank among the quantiles, from 0 to 1
};

// Rules in the order in which they are applied, all in double.
struct DenseRules {
  bool clips = false;
  double low = 0;
  double high = 0;
  bool log = false;  // sign(x) * log(1 + |x|)
  DenseScale scale = DenseScale::none;
  double centre = 0;
  double width = 1;
  std::span<const double> quantiles;  // two or more, never falling, with equally distant ranks
};

enum class NumberType : std::uint8_t { float64, float32, int64, int32 };

// A feature with rules, and its column [rows, size].
struct DenseColumn {
  const void* values = nullptr;
  NumberType type = NumberType::float64;
  const std::uint8_t* missing =
      nullptr;  // [rows], 1 where a row is missing, else 0; may be null. So is a NaN if size is 1.
  std::size_t size = 1;
  bool fills = false;
  double fill = 0;         // the values of a missing row, before the other rules
  bool indicator = false;  // whether one more value follows: 1 for a missing row, else 0
  std::size_t at = 0;      // its first value in a row of the output
  DenseRules rules;
};

// Applies the rules to values in place. A result is never -0. Returns false if a value is not finite; `values` is
// undefined then.
bool transform(const DenseRules& rules, std::span<double> values);

// Writes the features of each row, rounded once, to out[row * stride + at]. Returns the position of a column that has
// a refused value, or -1: a missing one without `fill`, one that is not finite before the rules or as a float, or one
// that neither `log` nor `scale` changes and that a float rounds by 0.5 or more. `out` is undefined then.
std::int64_t dense_columns(std::span<const DenseColumn> columns, std::size_t rows, float* out, std::size_t stride);

// Writes the number of edges that are not above each value. The edges never fall.
void buckets(std::span<const double> values, std::span<const double> edges, std::span<std::uint64_t> out);

}  // namespace persia
