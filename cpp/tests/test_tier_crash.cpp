// The same of tables with rows on disk: a process dies at every word that it writes while rows move.
#include <span>

#include "crashing.hpp"

using namespace persia;

namespace {

// With so many rows in memory.
void crash_with(std::uint64_t rows, const Step& prepare, const Step& step, std::uint64_t capacity = 10'000) {
  memory_rows = rows;
  crash_everywhere(capacity, prepare, step);
  memory_rows = 0;
}

}  // namespace

TEST(a_lookup_that_spills) {
  crash_with(24, [](Tested& t) { t.look(range(0, 22)); }, [](Tested& t) { t.look(backwards(range(15, 35))); });
}

TEST(a_lookup_of_rows_on_disk) {
  crash_with(
      16,
      [](Tested& t) {
        t.look(range(0, 60));
        t.push(range(0, 60), 9, 1);
      },
      [](Tested& t) { t.look(backwards(range(0, 12))); });
}

TEST(a_push_to_rows_on_disk) {
  crash_with(
      16,
      [](Tested& t) {
        t.look(range(0, 60));
        t.push(range(0, 60), 9, 1);
      },
      [](Tested& t) { t.push(backwards(range(2, 10)) + range(50, 64), 9, 2, 5); });
}

TEST(rows_that_spill_while_the_index_grows) {
  crash_with(
      20,
      [](Tested& t) {
        Keys keys;
        const auto grows = [&](std::uint32_t s) { return t.store.shard(0, s).header().index_old_slots != 0; };
        for (std::uint64_t id = 0; !grows(0) || !grows(1); ++id) {
          if (!grows(shard_of(id, kShards))) t.look({id});
        }
      },
      [](Tested& t) { t.look(backwards(range(1000, 1010)) + range(0, 5)); });
}

TEST(compaction) {
  row_shape.dim = 1200;  // four records in a block, and one block in a segment
  row_shape.optimizer = OptimizerKind::kAdam;
  std::uint64_t compacted = 0;  // in the store without crashes, which comes first
  crash_with(
      6,
      [](Tested& t) {
        t.look(range(0, 40));
        for (std::uint64_t i = 0; i < 40; i += 10) t.look({i, i + 3, i + 5});  // some of each segment
      },
      [&](Tested& t) {
        const std::uint64_t before = t.store.tier_counts(0).compacted;
        for (std::uint64_t i = 0; i < 40; i += 8) t.look({i + 1, i + 7});
        compacted += t.store.tier_counts(0).compacted - before;
      },
      80);
  CHECK(compacted > 10);
  row_shape = {};
}

// Which rows are evicted depends on when they came to disk, so there is no twin in memory.
TEST(a_table_at_its_capacity) {
  constexpr std::uint64_t capacity = 24;
  Tested all("", false, 1000);
  all.look(range(0, 60));
  const auto values = all.rows();
  memory_rows = 6;
  long points = 0;
  for (bool died = true; died; ++points) {
    const Directory directory;
    died = dies(0, [&] {
      Tested t(directory.path, false, capacity);
      t.look(range(0, 30));
      crash_in = points + 1;
      t.look(backwards(range(40, 43)));
    });
    Tested t(directory.path, true, capacity);
    const auto check = [&] {
      const auto rows = t.rows();
      CHECK(rows.size() <= capacity && rows.size() >= capacity - 4);
      for (const auto& [id, row] : rows) CHECK(values.at(id) == row);
    };
    check();
    t.look(backwards(range(40, 43)));
    check();
    CHECK(t.rows().contains(41));
  }
  memory_rows = 0;
  std::printf("  %ld crash points\n", points - 1);
  CHECK(points > 30);
}

TEST(an_import_of_rows_on_disk_and_new_ones) {
  crash_with(
      12, [](Tested& t) { t.look(range(0, 40)); }, [](Tested& t) { t.import(range(5, 12) + range(60, 66), 0.5f); });
}

TEST(clearing_rows_on_disk) {
  crash_with(12, [](Tested& t) { t.look(range(0, 40)); }, [](Tested& t) { t.store.clear(0); });
}

// No process leaves it so: the memory failed. Rows of memory are found by themselves, those on disk by what is left.
TEST(a_damaged_index_is_rebuilt) {
  memory_rows = 1600;
  Tested twin("", false, 10'000);
  twin.look(range(0, 3001));
  const Directory directory;
  {
    Tested t(directory.path, false, 10'000);
    t.look(range(0, 3001));
    for (std::uint32_t s = 0; s < kShards; ++s) {
      Shard& shard = t.store.shard(0, s);
      Header& h = shard.header();
      const auto index = Layout::of(h.capacity, h.row_stride, h.sketch_width).index;
      const std::span slots(reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&h) + index), h.index_slots);
      const auto in_memory = std::find_if(
          slots.begin(), slots.end(), [&](std::uint64_t slot) { return slot != 0 && (slot & kRowMask) < h.capacity; });
      CHECK(in_memory != slots.end());
      *in_memory = 0;
      bool vacant = false;  // A row that is taken twice would be two ids' at once.
      for (std::uint32_t row = 0; row < h.rows_used; ++row) {
        vacant |= reinterpret_cast<const RowHeader*>(shard.row_bytes(row))->stamp == kVacant;
      }
      CHECK(vacant);
    }
  }
  Tested t(directory.path, true, 10'000);
  for (const auto& found : t.store.table(0).recovery) CHECK(found.rebuilt);
  CHECK(t.rows() == twin.rows());
  for (Tested* each : {&t, &twin}) {
    each->look(backwards(range(0, 300)) + range(4000, 4300));
    each->push(range(200, 400), 9, 1);
  }
  CHECK(t.rows() == twin.rows());
  memory_rows = 0;
}

TEST(rows_on_disk_that_have_left) {
  row_shape.ttl = 10;
  crash_with(
      8,
      [](Tested& t) {
        t.store.age(0, 0);
        t.look(range(0, 30));
        t.push(range(0, 30), 9, 1);
        for (int i = 0; i < 4; ++i) {
          t.store.age(0, 3);
          t.look(range(10, 14));
        }
        t.store.age(0, 3);
      },
      [](Tested& t) { t.look(backwards(range(5, 12)) + range(1000, 1005)); });
  row_shape = {};
}

MAIN
