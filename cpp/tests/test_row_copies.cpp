#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "check.hpp"
#include "persia/row_copies.hpp"

using namespace persia;
using check::refuses;

namespace {

// A table, its slots, and what a slow twin holds by slot: the id, and the steps that its row contains.
struct Copies {
  explicit Copies(std::size_t slots) : ids(slots), steps(slots) {}
  CopiedTable with(const std::vector<std::uint64_t>& batch) {
    wanted = std::make_unique<bool[]>(batch.size());
    CopiedTable table;
    table.ids = batch;
    table.slot_ids = ids;
    table.slot_steps = steps;
    table.wanted = wanted.get();
    return table;
  }
  std::size_t slot(std::uint64_t id) const { return (id * 0x9E3779B97F4A7C15 >> 32) % ids.size(); }
  std::vector<std::uint64_t> ids;
  std::vector<std::int64_t> steps;
  std::unique_ptr<bool[]> wanted;
  std::map<std::size_t, std::pair<std::uint64_t, std::int64_t>> twin;
};

}  // namespace

TEST(plans_are_those_of_a_slow_twin) {
  std::mt19937_64 random(5);
  for (const std::size_t threads : {1, 3}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 50; ++round) {
      std::vector<Copies> copies;
      std::uint32_t slots = 0;
      for (int t = 0; t < 3; ++t) copies.emplace_back(1 + random() % 12);
      for (const auto& table : copies) slots += static_cast<std::uint32_t>(table.ids.size());
      const std::int64_t limit = static_cast<std::int64_t>(random() % 5);
      for (std::int64_t step = 0; step < 20; ++step) {
        const CopyTime at{step, std::max<std::int64_t>(0, step - static_cast<std::int64_t>(random() % 4)), limit};
        std::vector<std::vector<std::uint64_t>> batches;
        std::vector<CopiedTable> tables;
        std::size_t ids = 0;
        for (int t = 0; t < 3; ++t) {
          std::vector<std::uint64_t> all(16);
          for (std::size_t i = 0; i < all.size(); ++i) all[i] = i * 0x100000001;
          std::shuffle(all.begin(), all.end(), random);
          all.resize(random() % 10);
          batches.push_back(all);
        }
        std::uint32_t row = 0, slot = 0;
        for (std::size_t t = 0; t < 3; ++t) {
          tables.push_back(copies[t].with(batches[t]));
          tables[t].first_row = row;
          tables[t].first_slot = slot;
          tables[t].spare = slots;
          row += static_cast<std::uint32_t>(batches[t].size());
          slot += static_cast<std::uint32_t>(copies[t].ids.size());
          ids += batches[t].size();
        }
        std::vector<std::int32_t> places(2 * ids), hits, hit_slots, misses, taken;
        std::int64_t oldest = 0;
        for (std::size_t t = 0; t < 3; ++t) {
          auto& mine = copies[t];
          auto after = mine.twin;
          for (std::size_t i = 0; i < batches[t].size(); ++i) {
            const auto found = mine.twin.find(mine.slot(batches[t][i]));
            if (found != mine.twin.end() && found->second.first == batches[t][i] &&
                step - found->second.second <= limit) {
              hits.push_back(static_cast<std::int32_t>(tables[t].first_row + i));
              hit_slots.push_back(static_cast<std::int32_t>(tables[t].first_slot + mine.slot(batches[t][i])));
              oldest = std::max(oldest, step - found->second.second);
            } else {
              misses.push_back(static_cast<std::int32_t>(tables[t].first_row + i));
              after[mine.slot(batches[t][i])] = {batches[t][i], at.applied};
            }
          }
          for (const std::int32_t miss : misses) {
            if (miss < static_cast<std::int32_t>(tables[t].first_row)) continue;
            const std::uint64_t id = batches[t][static_cast<std::size_t>(miss) - tables[t].first_row];
            const std::size_t has = mine.slot(id);
            taken.push_back(static_cast<std::int32_t>(after[has].first == id ? tables[t].first_slot + has : slots));
          }
          mine.twin = after;
        }
        CHECK(plan_copies(tables, at, places, pool) == oldest);
        std::vector<std::int32_t> expected = hits;
        for (const auto* part : {&hit_slots, &misses, &taken}) {
          expected.insert(expected.end(), part->begin(), part->end());
        }
        CHECK(places == expected);
        for (std::size_t t = 0; t < 3; ++t) {
          const auto wanted = std::count(tables[t].wanted, tables[t].wanted + batches[t].size(), true);
          CHECK(tables[t].hits + static_cast<std::size_t>(wanted) == batches[t].size());
        }
      }
    }
  }
}

TEST(sizes_that_do_not_fit_are_refused_and_nothing_changes) {
  ThreadPool pool(1);
  Copies copies(4), none(0);
  const std::vector<std::uint64_t> batch = {1, 2, 3};
  std::vector<std::int32_t> places(6);
  const auto refused = [&](CopiedTable table, std::size_t room) {
    places.resize(room);
    return refuses([&] { plan_copies({&table, 1}, {0, 0, 4}, places, pool); });
  };
  CHECK(refused(copies.with(batch), 5));
  CHECK(refused(copies.with(batch), 7));
  CHECK(refused(none.with(batch), 6));
  auto table = copies.with(batch);
  table.slot_steps = table.slot_steps.first(3);
  CHECK(refused(table, 6));
  for (const auto place : {&CopiedTable::first_row, &CopiedTable::first_slot, &CopiedTable::spare}) {
    table = copies.with(batch);
    table.*place = 0x80000000;
    CHECK(refused(table, 6));
  }
  for (const CopyTime at : {CopyTime{-1, 0, 4}, CopyTime{0, -1, 4}, CopyTime{0, 0, (std::int64_t{1} << 62) + 1}}) {
    table = copies.with(batch);
    places.resize(6);
    CHECK(refuses([&] { plan_copies({&table, 1}, at, places, pool); }));
  }
  CHECK(copies.steps == std::vector<std::int64_t>(4));
  CHECK(!refused(copies.with(batch), 6));
  CHECK(plan_copies({}, {0, 0, 0}, {}, pool) == 0);
}

MAIN
