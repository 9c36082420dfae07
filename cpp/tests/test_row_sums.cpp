#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "persia/row_sums.hpp"

using namespace persia;

TEST(sums_are_those_of_a_map) {
  std::mt19937_64 random(1);
  RowSums sums(3);
  for (int step = 0; step < 3; ++step) {
    std::map<std::uint64_t, std::vector<double>> expected;  // sum, divisor, counted
    for (int part = 0; part < 20; ++part) {
      std::vector<std::uint64_t> ids;
      for (std::uint64_t id = 0; id < 200; ++id) {
        if (random() % 3 == 0) ids.push_back(id << (id % 2 ? 40 : 0));
      }
      std::vector<float> values(ids.size() * 3), counts(ids.size());
      for (auto& v : values) v = static_cast<float>(random() % 1000) / 100;
      for (auto& c : counts) c = random() % 4 ? 1.0f : 0.0f;
      const float share = part % 2 ? 1.0f : 0.5f;
      sums.add(ids, values.data(), counts.data(), share);
      for (std::size_t i = 0; i < ids.size(); ++i) {
        auto& row = expected.try_emplace(ids[i], 5, 0.0).first->second;
        row[3] += share;
        if (counts[i] == 0) continue;
        row[4] += share;
        for (int d = 0; d < 3; ++d)
          row[static_cast<std::size_t>(d)] += share * values[i * 3 + static_cast<std::size_t>(d)];
      }
    }
    const double total = step == 2 ? 15.0 : 0.0;
    const std::size_t count = sums.counted();
    std::vector<std::uint64_t> ids(count);
    std::vector<float> values(count * 3);
    sums.take(total, ids.data(), values.data());
    std::size_t counted = 0;
    for (const auto& [id, row] : expected) counted += row[4] > 0;
    CHECK(counted == count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto& row = expected.at(ids[i]);
      for (std::size_t d = 0; d < 3; ++d) {
        CHECK(std::abs(values[i * 3 + d] - row[d] / (total != 0 ? total : row[3])) < 1e-3);
      }
    }
    CHECK(sums.counted() == 0);
  }
}

TEST(what_does_not_count_is_not_read) {
  RowSums sums(2);
  const std::vector<std::uint64_t> ids{7, 9};
  const std::vector<float> good(4, 1.0f), bad(4, std::numeric_limits<float>::quiet_NaN()), all{1, 1}, none{0, 0};
  sums.add(ids, good.data(), all.data(), 1);
  sums.add(ids, bad.data(), none.data(), 1);
  std::vector<std::uint64_t> out(2);
  std::vector<float> values(4);
  sums.take(0, out.data(), values.data());
  for (const float v : values) CHECK(v == 0.5f);
}

TEST(nothing_is_nothing) {
  RowSums sums(2);
  sums.add({}, nullptr, nullptr, 1);
  CHECK(sums.counted() == 0);
  sums.take(0, nullptr, nullptr);
  CHECK_THROWS(RowSums(0), std::invalid_argument);
}

MAIN
