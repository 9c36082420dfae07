#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "persia/features.hpp"
#include "persia/isa.hpp"

using namespace persia;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<double> transformed(const DenseRules& rules, std::vector<double> values) {
  CHECK(transform(rules, values));
  return values;
}

// Numbers of every magnitude, and those next to the bounds of the logarithm's cases.
std::vector<double> magnitudes() {
  std::mt19937_64 random(0);
  std::uniform_real_distribution<double> exponent(-320, 308);
  std::vector<double> values = {0.0, 5e-324, 1.0, std::numeric_limits<double>::max(), 1e17, 9007199254740992.0};
  for (double x : {std::sqrt(2.0) - 1, 2 * std::sqrt(2.0) - 1, 4 * std::sqrt(2.0) - 1}) {
    values.insert(values.end(), {std::nextafter(x, 0.0), x, std::nextafter(x, 9.0)});
  }
  for (int i = 0; i < 5000; ++i) values.push_back(std::pow(10.0, exponent(random)));
  for (int i = 0; i < 5000; ++i) values.push_back(std::uniform_real_distribution<double>(0, 3)(random));
  return values;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

}  // namespace

TEST(logarithms_are_close_to_those_of_libm) {
  DenseRules rules;
  rules.log = true;
  const std::vector<double> values = magnitudes();
  const std::vector<double> found = transformed(rules, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double expected = std::log1p(values[i]);
    CHECK(found[i] == expected || found[i] == std::nextafter(expected, kInfinity) ||
          found[i] == std::nextafter(expected, 0.0));
  }
  CHECK(transformed(rules, {-1.0})[0] == -transformed(rules, {1.0})[0]);
  CHECK(!std::signbit(transformed(rules, {-0.0})[0]));
}

TEST(results_have_the_same_bits_with_each_instruction_set) {
  std::vector<double> quantiles = {-2, -1, -1, 0, 0.5, 0.5, 0.5, 3, 9, 9};
  DenseRules log, rank, affine;
  log.log = affine.clips = true;
  affine.low = 1e-3;
  affine.high = 1e5;
  log.scale = affine.scale = DenseScale::affine;
  log.centre = affine.centre = 1.7;
  log.width = affine.width = 0.3;
  rank.scale = DenseScale::quantile;
  rank.quantiles = quantiles;
  for (const DenseRules& rules : {log, rank, affine}) {
    use_isa(Isa::kBaseline);
    const std::vector<double> expected = transformed(rules, magnitudes());
    for (const Isa each : {Isa::kAvx2, Isa::kAvx512}) {
      if (each > widest_isa()) continue;
      use_isa(each);
      CHECK(same_bits(transformed(rules, magnitudes()), expected));
    }
  }
  use_isa(widest_isa());
}

TEST(ranks_of_equal_quantiles) {
  const std::vector<double> quantiles = {0, 1, 1, 1, 4};
  DenseRules rules;
  rules.scale = DenseScale::quantile;
  rules.quantiles = quantiles;
  const std::vector<double> expected = {0, 0, 0.125, 0.5, 0.75 + 0.25 / 3, 1, 1};
  const std::vector<double> found = transformed(rules, {-7, 0, 0.5, 1, 2, 4, 5});
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(found[i] - expected[i]) < 1e-15);
  rules.quantiles = {quantiles.data(), 1};
  std::vector<double> values = {1};
  CHECK_THROWS(transform(rules, values), std::invalid_argument);
}

TEST(columns_are_written_next_to_each_other) {
  const std::size_t rows = 1300;  // Several blocks, the last one not full.
  std::vector<double> doubles(rows);
  std::vector<float> pairs(2 * rows);
  std::vector<std::int64_t> whole(rows);
  std::vector<std::uint8_t> missing(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    doubles[i] = i % 7 == 3 ? kNan : static_cast<double>(i);
    pairs[2 * i] = static_cast<float>(i);
    pairs[2 * i + 1] = -1;
    whole[i] = -static_cast<std::int64_t>(i);
    missing[i] = i % 5 == 1;
  }
  std::vector<DenseColumn> columns(3);
  columns[0] = {doubles.data(), NumberType::float64, missing.data(), 1, true, 2.5, true, 0, {}};
  columns[1] = {pairs.data(), NumberType::float32, missing.data(), 2, true, 7, true, 2, {}};
  columns[2] = {whole.data(), NumberType::int64, nullptr, 1, false, 0, false, 5, {}};
  std::vector<float> out(7 * rows, 99);
  CHECK(dense_columns(columns, rows, out.data(), 7) == -1);
  for (std::size_t i = 0; i < rows; ++i) {
    const float* const row = out.data() + 7 * i;
    const bool none = i % 7 == 3 || i % 5 == 1, no_pair = i % 5 == 1;
    CHECK(row[0] == (none ? 2.5F : static_cast<float>(i)) && row[1] == (none ? 1 : 0));
    CHECK(row[2] == (no_pair ? 7 : static_cast<float>(i)) && row[3] == (no_pair ? 7 : -1));
    CHECK(row[4] == (no_pair ? 1 : 0) && row[5] == -static_cast<float>(i) && row[6] == 99);
  }
  columns[2].at = 7;
  CHECK_THROWS(dense_columns(columns, rows, out.data(), 7), std::invalid_argument);
}

TEST(refused_values) {
  const auto refused = [](double value, const DenseRules& rules, bool fills = true) {
    std::vector<double> values(600, 1.0);
    values[599] = value;
    const DenseColumn column{values.data(), NumberType::float64, nullptr, 1, fills, 0, false, 0, rules};
    std::vector<float> out(600);
    return dense_columns({&column, 1}, 600, out.data(), 1) == 0;
  };
  const DenseRules none;
  DenseRules log;
  log.log = true;
  CHECK(refused(kNan, none, false) && !refused(kNan, none));
  for (const double value : {kInfinity, -kInfinity, 1e39, 16777217.0, 16777217.5}) CHECK(refused(value, none));
  for (const double value : {16777216.0, 16777218.0, -1e-3, 1e30}) CHECK(refused(value, none) == (value == 1e30));
  CHECK(refused(kInfinity, log) && !refused(1e300, log) && !refused(16777217.0, log));
}

TEST(bounds_of_buckets) {
  for (std::size_t count : {0, 1, 2, 3, 63, 64, 100}) {
    std::vector<double> edges(count), values = {-kInfinity, kInfinity};
    for (std::size_t i = 0; i < count; ++i) {
      edges[i] = static_cast<double>(i / 2);
      values.insert(values.end(), {edges[i], std::nextafter(edges[i], -1.0), edges[i] + 0.5});
    }
    std::vector<std::uint64_t> out(values.size());
    buckets(values, edges, out);
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint64_t expected = 0;
      for (const double edge : edges) expected += edge <= values[i] ? 1 : 0;
      CHECK(out[i] == expected);
    }
  }
}

MAIN
