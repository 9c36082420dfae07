// Rows of buckets leave a table: all of them, no others, and nothing else changes.
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "crashing.hpp"
#include "persia/hash.hpp"

using namespace persia;

namespace {

using Flags = std::array<bool, kBuckets>;

const std::uint64_t kName = xxh64("t", 1, 0);

// About this share of the buckets, the same ones in each run.
const Flags& chosen(int percent) {
  static std::map<int, std::unique_ptr<Flags>> made;
  auto& flags = made[percent];
  if (!flags) {
    flags = std::make_unique<Flags>();
    std::mt19937 random(static_cast<unsigned>(percent));
    for (auto& flag : *flags) flag = random() % 100 < static_cast<unsigned>(percent);
  }
  return *flags;
}

std::uint64_t remove(Store& store, const Flags& flags) {
  std::uint64_t removed = 0;
  for (Shard* shard : store.table(0).all) removed += shard->remove_buckets({kName, flags});
  return removed;
}

const Step half = [](Tested& t) { remove(t.store, chosen(50)); };

// Rows that stay.
std::map<std::uint64_t, std::vector<float>> without(std::map<std::uint64_t, std::vector<float>> rows,
                                                    const Flags& flags) {
  std::erase_if(rows, [&](const auto& row) { return flags[bucket_of(kName, row.first)]; });
  return rows;
}

// Tables in memory, and with this number of rows there and the others on disk.
template <class Test>
void for_each_place(Test&& test) {
  for (const std::uint64_t rows : {0, 40}) {
    memory_rows = rows;
    const Directory directory;
    test(directory.path);
    memory_rows = 0;
  }
}

}  // namespace

TEST(rows_of_buckets_are_removed_and_no_others) {
  for_each_row_shape([] {
    for_each_place([](const std::string& path) {
      for (const int percent : {0, 5, 50, 95, 100}) {
        Tested t(path, false, 5000);
        t.look(range(0, 300));
        t.push(range(0, 200), 9, 1);
        t.look(range(20, 60));
        const auto before = t.rows(), kept = without(before, chosen(percent));
        CHECK(remove(t.store, chosen(percent)) == before.size() - kept.size());
        CHECK(t.rows() == kept && t.store.size(0) == kept.size());
        CHECK(remove(t.store, chosen(percent)) == 0);
        CHECK(t.store.counters(0).evicted == 0);
        // And the table goes on: those that have left are new, with their first values.
        t.look(range(0, 400));
        CHECK(t.rows().size() == 400);
        CHECK(t.push(range(0, 400), 9, 2).applied == 400);
      }
    });
  });
}

// The queue of rows to evict has been made before, or is being made, and knows them by their places.
TEST(the_others_are_evicted_in_the_same_order) {
  for (std::uint64_t before = 1700; before < 2000; before += 10) {
    const int percent = before % 20 == 0 ? 5 : 50;
    ThreadPool pool(1);
    Store store(pool);
    store.create_table(config_of(1000, 1));
    for (std::uint64_t id = 0; id < before; ++id) look(store, {id});
    remove(store, chosen(percent));
    Keys alive;  // the least recent first
    for (std::uint64_t id = before - 1000; id < before; ++id) {
      if (!chosen(percent)[bucket_of(kName, id)]) alive.push_back(id);
    }
    for (std::uint64_t id = 5000; id < 6300; ++id) {
      look(store, {id});
      alive.push_back(id);
      if (alive.size() > 1000) alive.erase(alive.begin());
      std::vector<std::uint8_t> found(alive.size());
      store.peek(0, alive, found.data());
      CHECK(std::all_of(found.begin(), found.end(), [](auto f) { return f == 1; }));
    }
  }
}

TEST(memory_is_freed) {
  const Directory directory("/dev/shm");
  Tested t(directory.path, false, 1 << 20);
  for (std::uint64_t id = 0; id < 400'000; id += 4000) t.look(range(id, id + 4000));
  const auto backed = [&] {
    std::uint64_t rows = 0;
    for (Shard* shard : t.store.table(0).all) rows += shard->memory().header.rows_backed;
    return rows;
  };
  const std::uint64_t before = t.store.memory_bytes(0);
  CHECK(backed() >= 400'000);
  remove(t.store, chosen(95));
  CHECK(backed() < 60'000 && t.store.memory_bytes(0) < before / 2);
  for (std::uint64_t id = 0; id < 400'000; id += 4000) t.look(range(id, id + 4000));
  CHECK(t.rows().size() == 400'000);
}

TEST(while_a_snapshot_is_read_nothing_is_removed) {
  for_each_place([](const std::string& path) {
    Tested t(path, false, 5000);
    t.look(range(0, 200));
    const auto before = t.rows();
    for (Shard* shard : t.store.table(0).all) shard->begin_snapshot({2, 0, temporary(), 1 << 12, 1 << 16, false});
    CHECK_THROWS(remove(t.store, chosen(50)), std::runtime_error);
    CHECK(t.rows() == before);
    for (Shard* shard : t.store.table(0).all) shard->end_snapshot();
    remove(t.store, chosen(50));
    CHECK(t.rows() == without(before, chosen(50)));
    for (Shard* shard : t.store.table(0).all) CHECK(shard->changes_since() == 0);
  });
}

TEST(rows_with_a_ttl) {
  row_shape.ttl = 10;
  for_each_place([](const std::string& path) {
    Tested t(path, false, 5000);
    t.store.advance_clock(0, 0);
    t.look(range(0, 200));
    t.store.advance_clock(0, 5);
    t.look(range(0, 80));
    t.store.advance_clock(0, 5);
    t.store.advance_clock(0, 5);
    const auto before = t.rows();
    CHECK(before.size() == 80);
    remove(t.store, chosen(50));
    CHECK(t.rows() == without(before, chosen(50)));
    t.look(range(0, 300));
    CHECK(t.rows().size() == 300);
    t.store.advance_clock(0, 5);
    t.store.advance_clock(0, 5);
    t.store.advance_clock(0, 5);
    CHECK(t.rows().empty());
  });
  row_shape = {};
}

TEST(a_kill_while_rows_are_removed) {
  crash_everywhere(100, [](Tested& t) { t.look(range(0, 40)); }, half);
  crash_everywhere(100, [](Tested& t) { t.look(range(0, 12)); }, [](Tested& t) { remove(t.store, chosen(100)); });
}

TEST(a_kill_while_rows_are_removed_and_the_index_grows) {
  crash_everywhere(
      5000,
      [](Tested& t) {
        const auto grows = [&](std::uint32_t s) { return t.store.shard(0, s).memory().header.index_old_slots != 0; };
        for (std::uint64_t id = 0; !grows(0) || !grows(1); ++id) {
          if (!grows(shard_of(id, kShards))) t.look({id});
        }
      },
      [](Tested& t) { remove(t.store, chosen(5)); });
}

TEST(a_kill_while_rows_on_disk_are_removed) {
  memory_rows = 16;
  crash_everywhere(10'000, [](Tested& t) { t.look(range(0, 50)); }, half);
  memory_rows = 0;
}

MAIN
