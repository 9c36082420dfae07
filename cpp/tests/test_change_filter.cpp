#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "persia/change_filter.hpp"
#include "persia/mix.hpp"

using namespace persia;
using check::refuses;

namespace {

using Sizes = std::vector<std::size_t>;
using Ids = std::vector<std::uint64_t>;

constexpr std::uint64_t kNewest = 0xFFFF;

// The places of changed ids by table.
std::vector<std::vector<std::uint32_t>> changed(const ChangeFilter& filter, const PackedTables& tables, const Ids& ids,
                                                std::uint64_t since) {
  std::vector<std::uint32_t> places(ids.size());
  Ids found(ids.size());
  std::vector<std::vector<std::uint32_t>> result;
  auto at = places.begin();
  const auto counts = filter.changed(tables, ids, since, places, found);
  std::size_t first = 0, total = 0;
  for (std::size_t t = 0; t < counts.size(); first += tables.counts[t++]) {
    const std::size_t count = counts[t];
    for (std::size_t i = total; i < total + count; ++i) CHECK(found[i] == ids[first + places[i]]);
    total += count;
    result.emplace_back(at, at + static_cast<std::ptrdiff_t>(count));
    at += static_cast<std::ptrdiff_t>(count);
  }
  return result;
}

}  // namespace

TEST(changed_ids_are_those_of_a_slow_twin) {
  std::mt19937_64 random(1);
  for (const std::size_t bits : {1, 7, 32}) {
    ChangeFilter filter(bits);
    std::map<std::uint64_t, std::uint64_t> twin;  // the newest version by slot
    const auto slot = [&](std::size_t table, std::uint64_t id) {
      return (id + (table + 1) * kGolden) * kGolden >> (64 - bits);
    };
    for (int round = 0; round < 40; ++round) {
      Sizes tables, counts;
      Ids ids;
      for (std::size_t table = random() % 3; table < 5; table += 1 + random() % 3) {
        tables.push_back(table);
        counts.push_back(random() % 3 == 0 ? random() % 300 : random() % 5);
        for (std::size_t i = 0; i < counts.back(); ++i) ids.push_back(random() % 2 ? random() : random() % 200);
      }
      const std::uint64_t since = random() % 8;
      std::vector<std::vector<std::uint32_t>> expected(tables.size());
      for (std::size_t t = 0, at = 0; t < tables.size(); at += counts[t++]) {
        for (std::uint32_t i = 0; i < counts[t]; ++i) {
          const auto found = twin.find(slot(tables[t], ids[at + i]));
          if (found != twin.end() && found->second > since) expected[t].push_back(i);
        }
      }
      CHECK(changed(filter, {tables, counts}, ids, since) == expected);
      const std::uint64_t version = 1 + random() % 8;  // also older ones
      filter.mark({tables, counts}, ids, version);
      for (std::size_t t = 0, at = 0; t < tables.size(); at += counts[t++]) {
        for (std::size_t i = 0; i < counts[t]; ++i) {
          auto& newest = twin[slot(tables[t], ids[at + i])];
          newest = std::max(newest, version);
        }
      }
    }
  }
}

TEST(sizes_and_versions_that_do_not_fit_are_refused_and_nothing_changes) {
  for (const std::size_t bits : {0, 33, 64}) CHECK(refuses([&] { ChangeFilter filter(bits); }));
  ChangeFilter filter(10);
  const Sizes tables = {0, 3}, counts = {2, 1};
  const Ids ids = {1, 2, 3};
  std::vector<std::uint32_t> places(3);
  Ids found(3);
  const auto refused = [&](const Sizes& of, const Sizes& sizes, std::size_t given, std::uint64_t version) {
    const std::span<const std::uint64_t> some(ids.data(), given);
    const std::span<std::uint32_t> room(places.data(), given);
    const std::span<std::uint64_t> found_room(found.data(), given);
    const bool mark = refuses([&] { filter.mark({of, sizes}, some, version); });
    // `since` may be 0.
    CHECK(mark ==
          refuses([&] { filter.changed({of, sizes}, some, version == 0 ? kNewest + 1 : version, room, found_room); }));
    return mark;
  };
  CHECK(refused({0}, counts, 3, 1));
  CHECK(refused(tables, {3}, 3, 1));
  CHECK(refused(tables, counts, 2, 1));
  CHECK(refused(tables, {1, 1}, 3, 1));
  CHECK(refused(tables, {2, SIZE_MAX}, 1, 1));  // the sum wraps
  CHECK(refused({}, {}, 1, 1));
  CHECK(refused(tables, counts, 3, 0));
  CHECK(refused(tables, counts, 3, kNewest + 1));
  CHECK(refuses([&] { filter.changed({tables, counts}, ids, 0, std::span(places).first(2), found); }));
  CHECK(refuses([&] { filter.changed({tables, counts}, ids, 0, places, std::span(found).first(2)); }));
  CHECK(changed(filter, {tables, counts}, ids, 0) == std::vector<std::vector<std::uint32_t>>(2));
  CHECK(!refused({}, {}, 0, 1));
  CHECK(!refused(tables, counts, 3, kNewest));
  CHECK(changed(filter, {tables, counts}, ids, kNewest - 1) == (std::vector<std::vector<std::uint32_t>>{{0, 1}, {0}}));
  CHECK(changed(filter, {tables, counts}, ids, kNewest) == std::vector<std::vector<std::uint32_t>>(2));
}

// Without a lock, a thread that has read the slot before another marked it would write an older version over it.
TEST(no_mark_of_several_threads_is_lost) {
  constexpr int kRounds = kSanitized ? 1 : 60;
  const Sizes tables = {2}, counts = {1};
  const Ids ids = {7};
  for (int round = 0; round < kRounds; ++round) {
    ChangeFilter filter(1);
    std::atomic<std::uint64_t> next = 1;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        std::vector<std::uint32_t> places(1);
        Ids found(1);
        for (std::uint64_t version = next++; version <= kNewest; version = next++) {
          filter.mark({tables, counts}, ids, version);
          CHECK(filter.changed({tables, counts}, ids, version - 1, places, found)[0] == 1);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

MAIN
