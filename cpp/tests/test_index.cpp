// The index of a shard: against a map, while it grows, and damaged.
#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "one_table.hpp"
#include "persia/isa.hpp"

using namespace persia;

namespace {

// An index next to a map of what should be in it.
struct IndexModel {
  std::uint64_t max_slots;
  std::vector<std::uint64_t> memory;
  Index index;
  std::vector<std::uint32_t> tags;  // by row
  std::vector<bool> present;

  explicit IndexModel(std::uint64_t most, std::uint64_t part = Index::kThird)
      : max_slots(most), memory(most + kIndexTail), index(memory.data(), 64, most, 0, 0, part) {}

  bool finds(std::uint32_t row) const {
    return index.find(tags[row], [&](std::uint32_t r) { return r == row; }) == row;
  }

  void grow() {
    while (index.growing()) CHECK(index.move(Index::kMoves));
    index.grow();
  }

  // The same index, as another process finds it.
  Index attached(std::uint64_t old_slots, std::uint32_t frontier) {
    return {memory.data(), index.slot_count(), max_slots, old_slots, frontier};
  }
};

// An index of the rows 0 ... rows - 1 with random tags, and what any search among them should find.
struct SmallIndex {
  IndexModel model{2048};
  std::map<std::uint32_t, std::vector<std::uint32_t>> rows;  // by tag
  std::uint32_t count = 0;
  std::mt19937_64 random;

  explicit SmallIndex(std::uint64_t seed) : random(seed) {}

  // Few distinct tags, some of them next to one another or at either end.
  std::uint32_t some_tag() {
    const std::uint32_t spread = static_cast<std::uint32_t>(random() % 200) * (kRowMask / 200);
    switch (random() % 8) {
      case 0:
        return kRowMask - static_cast<std::uint32_t>(random() % 3);
      case 1:
        return 1 + static_cast<std::uint32_t>(random() % 3);
      case 2:
        return spread + 1;
      default:
        return std::max(static_cast<std::uint32_t>(random()) & kRowMask, 1u);
    }
  }

  void insert() {
    const std::uint32_t tag = some_tag();
    model.index.insert(tag, count);
    rows[tag].push_back(count++);
  }

  // Removes the last row, so that the rest have all numbers.
  void erase() {
    --count;
    for (auto& [tag, numbers] : rows) {
      if (numbers.empty() || numbers.back() != count) continue;
      CHECK(model.index.erase(tag, count));
      numbers.pop_back();
      return;
    }
  }

  void check() {
    CHECK(model.index.sound(count));
    CHECK(model.attached(model.index.old_slots(), model.index.frontier()).sound(count));
    std::vector<const Index*> same(rows.size(), &model.index);
    Keys tags;
    std::vector<std::uint32_t> asked, candidates(rows.size());
    for (const auto& [tag, numbers] : rows) {
      asked.push_back(tag);
      for (const std::uint32_t row : numbers) CHECK(model.index.find(tag, [&](auto r) { return r == row; }) == row);
      CHECK(model.index.find(tag, [](auto) { return false; }) == Index::kNone);
      CHECK(!model.index.erase(tag, count));
    }
    for (const Isa each : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
      if (each > widest_isa()) break;
      use_isa(each);
      Index::candidates(same.data(), asked.data(), asked.size(), candidates.data());
      std::size_t i = 0;
      for (const auto& [tag, numbers] : rows) {
        const std::uint32_t candidate = candidates[i++];
        CHECK(numbers.empty() ? candidate == Index::kNone : std::ranges::find(numbers, candidate) != numbers.end());
      }
    }
    use_isa(widest_isa());
  }
};

}  // namespace

TEST(index_against_model) {
  IndexModel model(40000);
  std::mt19937_64 random(1);
  std::uint32_t live = 0;
  for (int i = 0; i < 60000; ++i) {
    if (live > 0 && random() % 3 == 0) {
      const auto row = static_cast<std::uint32_t>(random() % model.tags.size());
      if (!model.present[row]) continue;
      model.index.erase(model.tags[row], row);
      model.present[row] = false;
      --live;
      CHECK(!model.finds(row));
    } else if (live < 30000) {
      if (model.index.full(live)) model.grow();
      // Few distinct tags at the end of the range: runs spill into the tail, tags collide.
      const std::uint64_t hash = random() % 8 ? random() : (0xFFFFFF00u + random() % 256) << 32;
      const auto row = static_cast<std::uint32_t>(model.tags.size());
      model.tags.push_back(Index::tag_of(hash));
      model.present.push_back(true);
      model.index.insert(model.tags[row], row);
      ++live;
    }
  }
  for (std::uint32_t row = 0; row < model.tags.size(); ++row) CHECK(model.finds(row) == model.present[row]);
}

TEST(a_growing_index_against_model) {
  std::uint64_t checks = 0;
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SmallIndex small(seed);
    Index& index = small.model.index;
    // In steps of all sizes, so that growth ends soon, late or never, while rows come and go.
    const std::uint64_t step = 1 + small.random() % 20, most = 200 + small.random() % 1200;
    for (int i = 0; i < 1500; ++i) {
      if (small.count > 0 && (small.count == most || small.random() % 4 == 0)) {
        small.erase();
      } else {
        if (index.full(small.count)) small.model.grow();
        if (!index.full(small.count) || !index.growing()) small.insert();
      }
      if (!index.growing()) continue;
      small.check();
      ++checks;
      CHECK(index.move(step));
      small.check();
    }
    while (index.growing()) CHECK(index.move(step));
    small.check();
  }
  CHECK(checks > 1000);
}

TEST(an_index_that_grows_by_eighths_stays_full) {
  IndexModel model(1 << 20, Index::kEighth);
  Index& index = model.index;
  std::mt19937_64 random(1);
  std::uint64_t grown = 0;
  for (std::uint32_t row = 0; row < 200'000; ++row) {
    if (index.full(row)) {
      CHECK(!index.growing());  // A row moves enough slots for growth to end before the next one.
      index.grow();
      if (row > Index::kDoubling) {
        CHECK(row * 100 >= index.slot_count() * 71);
        ++grown;
      }
    }
    model.tags.push_back(Index::tag_of(random()));
    index.insert(model.tags[row], row);
    if (index.growing()) CHECK(index.move(Index::kMoves));
  }
  CHECK(grown > 20);
  CHECK(index.sound(200'000));
  for (std::uint32_t row = 0; row < 200'000; ++row) CHECK(model.finds(row));
}

TEST(a_damaged_frontier_is_noticed) {
  SmallIndex small(1);
  Index& index = small.model.index;
  while (index.slot_count() < 1024 || !index.growing()) {
    if (index.full(small.count)) small.model.grow();
    small.insert();
  }
  while (index.frontier() < kRowMask / 2) index.move(Index::kMoves);
  const std::uint64_t old = index.old_slots();
  CHECK(small.model.attached(old, index.frontier()).sound(small.count));
  for (const std::uint32_t frontier : {0u, kRowMask / 4, kRowMask / 4 * 3, kRowMask}) {
    CHECK(!small.model.attached(old, frontier).sound(small.count));
  }
  for (const std::uint64_t slots : {std::uint64_t{0}, std::uint64_t{8}, old - 64, old + 64, index.slot_count()}) {
    CHECK(!small.model.attached(slots, index.frontier()).sound(small.count));
  }
}

TEST(growth_that_collisions_stop_leaves_the_rest_as_it_is) {
  IndexModel model(1 << 20);
  std::uint32_t row = 0;
  const auto add = [&](std::uint32_t tag) {
    model.tags.push_back(tag);
    model.index.insert(tag, row++);
  };
  while (model.index.slot_count() < 8192 || !model.index.growing()) {
    if (model.index.full(row)) model.grow();
    add(std::max(static_cast<std::uint32_t>(row * 2654435761u) & kRowMask, 2u));
  }
  for (int i = 0; i < 6000; ++i) add(1);  // fits next to the old slots, and would not after growth
  CHECK(!model.index.move(Index::kMoves));
  CHECK(model.index.growing() && model.index.sound(row));
  CHECK_THROWS(model.index.grow(), std::runtime_error);
  for (int i = 0; i < 100; ++i) add(kRowMask / 2 + i);
  CHECK(!model.index.move(Index::kMoves));
  for (std::uint32_t r = 0; r < row; ++r) CHECK(model.finds(r));
  for (std::uint32_t r = 0; r < row; ++r) {
    if (model.tags[r] == 1) CHECK(model.index.erase(1, r));
  }
  while (model.index.growing()) CHECK(model.index.move(Index::kMoves));
}

TEST(index_refuses_crafted_collisions) {
  IndexModel model(1 << 20);
  const auto fill = [&] {
    for (std::uint32_t row = 0; row < 10000; ++row) model.index.insert(1, row);
  };
  CHECK_THROWS(fill(), std::runtime_error);
}

MAIN
