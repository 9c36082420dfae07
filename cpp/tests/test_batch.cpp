#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "persia/batch.hpp"
#include "persia/mix.hpp"

using namespace persia;

namespace {

// Ids of one group, one vector per feature, and room for the results.
struct Group {
  explicit Group(std::vector<std::vector<std::uint64_t>> given) : features(std::move(given)) {
    std::size_t n = 0;
    for (const auto& ids : features) n += ids.size();
    ids.resize(n);
    inverse.resize(n);
  }
  UniqueGroup record() {
    UniqueGroup group;
    for (const auto& feature : features) group.features.emplace_back(feature);
    group.ids = ids.data();
    group.inverse = inverse.data();
    return group;
  }
  std::uint32_t at(const UniqueGroup& group, std::size_t i) const {
    if (group.wide) return inverse[i];
    std::uint16_t narrow;
    std::memcpy(&narrow, reinterpret_cast<const std::byte*>(inverse.data()) + i * sizeof(narrow), sizeof(narrow));
    return narrow;
  }
  // Compares with the plainest way to do it.
  void check(const UniqueGroup& group) const {
    std::map<std::uint64_t, std::uint32_t> places;
    std::size_t i = 0;
    for (const auto& feature : features) {
      for (const std::uint64_t id : feature) {
        const auto [place, added] = places.try_emplace(id, static_cast<std::uint32_t>(places.size()));
        CHECK(at(group, i++) == place->second);
        CHECK(ids[place->second] == id);
      }
    }
    CHECK(group.count == places.size());
    CHECK(group.wide == (places.size() > 65536));
  }

  std::vector<std::vector<std::uint64_t>> features;
  std::vector<std::uint64_t> ids;
  std::vector<std::uint32_t> inverse;
};

std::vector<std::uint64_t> skewed(std::size_t n, double range, unsigned seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform;
  std::vector<std::uint64_t> ids(n);
  for (auto& id : ids) {
    const double x = uniform(random);
    id = static_cast<std::uint64_t>(range * x * x * x);
  }
  return ids;
}

std::vector<float> noise(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (auto& value : values) value = normal(random);
  return values;
}

}  // namespace

TEST(unique_in_order_of_first_occurrence) {
  Arena arena;
  for (const std::size_t threads : {1, 3}) {
    ThreadPool pool(threads);
    std::vector<Group> groups;
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{{}, {5}, {}});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{{~0ULL, 0, ~0ULL}, {0, 1ULL << 63}});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{std::vector<std::uint64_t>(70000, 9)});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{skewed(5000, 1e6, 1), skewed(5000, 1e6, 2)});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{skewed(110000, 1e5, 3)});
    groups.emplace_back(std::vector<std::vector<std::uint64_t>>{skewed(110000, 1e9, 4)});
    std::vector<UniqueGroup> records;
    for (auto& group : groups) records.push_back(group.record());
    unique(records, pool, arena);
    for (std::size_t g = 0; g < groups.size(); ++g) groups[g].check(records[g]);
  }
}

TEST(unique_at_the_edge_of_uint16) {
  Arena arena;
  ThreadPool pool(2);
  for (const std::size_t count : {65534, 65535, 65536, 65537}) {
    std::vector<std::uint64_t> ids(count);
    for (std::size_t i = 0; i < count; ++i) ids[i] = i << 40;
    for (const std::size_t repeats : {0, 100}) {
      Group group({ids, std::vector<std::uint64_t>(repeats, ids.back())});
      UniqueGroup record = group.record();
      unique({&record, 1}, pool, arena);
      group.check(record);
    }
  }
}

TEST(unique_from_many_threads_on_one_arena) {
  Arena arena;
  ThreadPool pool(2);
  std::vector<std::thread> callers;
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (unsigned repeat = 0; repeat < 10; ++repeat) {
        Group first({skewed(2000, 1e4, caller)});
        Group second({skewed(100, 1e4, repeat)});
        UniqueGroup records[] = {first.record(), second.record()};
        unique(records, pool, arena);
        first.check(records[0]);
        second.check(records[1]);
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

TEST(pooling_and_its_gradient) {
  // Samples: [row 1, row 0, row 1], [], [row 2].
  const std::vector<std::uint16_t> inverse = {1, 0, 1, 2};
  const std::vector<std::int64_t> offsets = {0, 3, 3, 4};
  const std::vector<float> rows = {1, 10, 2, 20, 4, 40};
  FeaturePlan plan{inverse.data(), false, 4, offsets.data(), 3, Pooling::mean, 2};
  ThreadPool pool(2);
  Arena arena;
  std::vector<float> out(9, -1.0F);
  PoolFeature feature{plan, {rows.data(), 3, 2}, out.data(), 3, 0, nullptr, 0};
  pool_forward({&feature, 1}, pool);
  CHECK((out == std::vector<float>{1.5F, 15.0F, -1.0F, 0.0F, 0.0F, -1.0F, 4.0F, 40.0F, -1.0F}));

  std::vector<float> gradient(6, -1.0F);
  GradientTable table{{{plan, out.data(), 3, 0, 0}}, gradient.data(), 3, 2};
  pool_backward({&table, 1}, pool, arena);
  CHECK((gradient == std::vector<float>{0.75F, 7.5F, 0.75F, 7.5F, 4.0F, 40.0F}));

  plan.pooling = Pooling::sequence;
  std::vector<float> sequence(12, -1.0F);
  std::vector<std::uint8_t> mask(6, 9);
  PoolFeature unpooled{plan, {rows.data(), 3, 2}, sequence.data(), 4, 2, mask.data(), 2};
  pool_forward({&unpooled, 1}, pool);
  CHECK((sequence == std::vector<float>{2, 20, 1, 10, 0, 0, 0, 0, 4, 40, 0, 0}));
  CHECK((mask == std::vector<std::uint8_t>{1, 1, 0, 0, 1, 0}));
}

TEST(weighted_pooling_and_its_gradient) {
  // Samples: 0.5 x row 1 + 1.5 x row 0 (and a third value, truncated), [], 0 x row 2.
  const std::vector<std::uint16_t> inverse = {1, 0, 1, 2};
  const std::vector<std::int64_t> offsets = {0, 3, 3, 4};
  const std::vector<float> weights = {0.5F, 1.5F, 9.0F, 0.0F};
  const std::vector<float> rows = {1, 10, 2, 20, 4, 40};
  FeaturePlan plan{inverse.data(), false, 4, offsets.data(), 3, Pooling::sum, 2, weights.data()};
  ThreadPool pool(2);
  Arena arena;
  const auto check = [&](Pooling pooling, const std::vector<float>& pooled, const std::vector<float>& gradients) {
    plan.pooling = pooling;
    std::vector<float> out(6, -1.0F);
    PoolFeature feature{plan, {rows.data(), 3, 2}, out.data(), 2, 0, nullptr, 0};
    pool_forward({&feature, 1}, pool);
    CHECK(out == pooled);
    const std::vector<float> ones(6, 1.0F);
    std::vector<float> gradient(6, -1.0F);
    GradientTable table{{{plan, ones.data(), 2, 0, 0}}, gradient.data(), 3, 2};
    pool_backward({&table, 1}, pool, arena);
    CHECK(gradient == gradients);
  };
  const float root = std::sqrt(2.5F);
  check(Pooling::sum, {2.5F, 25.0F, 0, 0, 0, 0}, {1.5F, 1.5F, 0.5F, 0.5F, 0, 0});
  check(Pooling::mean, {1.25F, 12.5F, 0, 0, 0, 0}, {0.75F, 0.75F, 0.25F, 0.25F, 0, 0});
  check(Pooling::sqrtn, {2.5F / root, 25.0F / root, 0, 0, 0, 0},
        {1.0F / root * 1.5F, 1.0F / root * 1.5F, 1.0F / root * 0.5F, 1.0F / root * 0.5F, 0, 0});
}

TEST(gradient_does_not_depend_on_threads) {
  constexpr std::size_t kBatch = 5000;
  constexpr std::size_t kRows = 600;
  for (const std::size_t dim : {16, 40, 128}) {
    std::vector<std::uint32_t> inverse;
    for (const auto id : skewed(kBatch * 3, kRows, 5)) inverse.push_back(static_cast<std::uint32_t>(id));
    std::vector<std::int64_t> offsets(kBatch + 1);
    for (std::size_t i = 0; i <= kBatch; ++i) offsets[i] = static_cast<std::int64_t>(3 * i);
    const auto gradient = noise(kBatch * dim, 6);
    std::vector<std::vector<float>> results;
    for (const std::size_t threads : {1, 2, 4}) {
      ThreadPool pool(threads);
      Arena arena;
      std::vector<float> out(kRows * dim, 7.0F);
      GradientTable table;
      for (const auto pooling : {Pooling::sum, Pooling::sqrtn}) {
        const FeaturePlan plan{inverse.data(), true, inverse.size(), offsets.data(), kBatch, pooling, 0};
        table.features.push_back({plan, gradient.data(), static_cast<std::ptrdiff_t>(dim), 0, 0});
      }
      table.out = out.data();
      table.count = kRows;
      table.dim = dim;
      pool_backward({&table, 1}, pool, arena);
      results.push_back(std::move(out));
    }
    for (const auto& result : results) {
      CHECK(std::memcmp(result.data(), results[0].data(), result.size() * sizeof(float)) == 0);
    }
  }
}

TEST(hostile_contents_are_refused) {
  ThreadPool pool(2);
  Arena arena;
  const std::vector<float> rows(3 * 4);
  const std::vector<std::uint32_t> good = {0, 1, 2, 0};
  const std::vector<std::uint32_t> bad = {0, 3, std::numeric_limits<std::uint32_t>::max(), 0};
  const std::vector<std::vector<std::int64_t>> hostile = {
      {1, 2, 4}, {0, 2, 3}, {0, 5, 4}, {0, -1, 4}, {0, std::numeric_limits<std::int64_t>::max(), 4}};
  const auto refused = [&](const FeaturePlan& plan) {
    std::vector<float> out(2 * 2 * 4 + 16);
    std::vector<std::uint8_t> mask(16);
    PoolFeature feature{plan, {rows.data(), 3, 4}, out.data(), 8, 4, mask.data(), 2};
    CHECK_THROWS(pool_forward({&feature, 1}, pool), std::invalid_argument);
    std::vector<float> gradient(3 * 4);
    GradientTable table{{{plan, out.data(), 8, 4, 0}}, gradient.data(), 3, 4};
    CHECK_THROWS(pool_backward({&table, 1}, pool, arena), std::invalid_argument);
  };
  const std::vector<std::int64_t> offsets = {0, 2, 4};
  for (const auto pooling : {Pooling::sum, Pooling::mean, Pooling::sequence}) {
    for (const auto& ends : hostile) refused({good.data(), true, 4, ends.data(), 2, pooling, 2});
    refused({bad.data(), true, 4, offsets.data(), 2, pooling, 2});
    refused({good.data(), true, 4, nullptr, 2, pooling, 2});
  }
  refused({good.data(), true, 4, offsets.data(), 2, Pooling::sequence, 0});
  refused({good.data(), true, 4, offsets.data(), 2, Pooling::sequence, 2, rows.data()});
}

TEST(buckets_are_the_top_bits_of_the_hash) {
  const std::vector<std::uint64_t> ids = {0, 1, 2, 1000, ~std::uint64_t{0}};
  std::vector<std::uint16_t> buckets(ids.size());
  buckets_of(42, ids, buckets);
  for (std::size_t i = 0; i < ids.size(); ++i) CHECK(buckets[i] == mix64(42 ^ ids[i]) >> 52);
  CHECK_THROWS(buckets_of(42, ids, std::span(buckets).first(4)), std::invalid_argument);
}

TEST(ids_are_grouped_by_owner_and_inverses_follow) {
  Arena arena;
  for (const std::size_t threads : {1u, 3u}) {
    ThreadPool pool(threads);
    for (const std::uint32_t servers : {1u, 2u, 3u, 7u}) {
      std::vector<std::uint64_t> ids(1000), before;
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = i * i;
      before = ids;
      std::vector<std::uint16_t> narrow(1000);
      std::vector<std::uint32_t> wide(1000);
      for (std::size_t i = 0; i < ids.size(); ++i) narrow[i] = wide[i] = static_cast<std::uint16_t>(999 - i);
      std::vector<std::int64_t> bounds(servers + 1);
      // Not in ranges: neighbouring buckets have different owners.
      std::vector<std::uint16_t> of_bucket(kBuckets);
      for (std::uint32_t b = 0; b < kBuckets; ++b) of_bucket[b] = static_cast<std::uint16_t>(b % servers);
      const BucketOwners owners{of_bucket, servers};
      std::vector<OwnerGroup> groups(1);
      groups[0].name_hash = 42;
      groups[0].ids = ids;
      groups[0].inverses = {{narrow.data(), narrow.size(), false}, {wide.data(), wide.size(), true}};
      groups[0].bounds = bounds.data();
      group_by_owner(groups, owners, pool, arena);
      CHECK(bounds.front() == 0 && bounds.back() == 1000);
      for (std::uint32_t p = 0; p < servers; ++p) {
        CHECK(bounds[p + 1] - bounds[p] > 1000 / servers / 2);
        for (auto i = bounds[p]; i < bounds[p + 1]; ++i) {
          CHECK(of_bucket[bucket_of(42, ids[i])] == p);
          CHECK(i == bounds[p] || ids[i - 1] < ids[i]);
        }
      }
      for (std::size_t i = 0; i < ids.size(); ++i) {
        CHECK(ids[narrow[i]] == before[999 - i]);
        CHECK(narrow[i] == wide[i]);
      }
      wide[0] = 1000;
      CHECK_THROWS(group_by_owner(groups, owners, pool, arena), std::invalid_argument);
      wide[0] = 0;
      const auto refused = [&](const BucketOwners& wrong) {
        CHECK_THROWS(group_by_owner(groups, wrong, pool, arena), std::invalid_argument);
      };
      refused({std::span(of_bucket).first(kBuckets - 1), servers});
      refused({of_bucket, servers - 1});  // An owner beyond the servers, or no servers.
    }
  }
}

MAIN
