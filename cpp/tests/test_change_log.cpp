// What a publisher takes of a table, applied to a map, gives the rows of the table.
#include <array>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"
#include "persia/hash.hpp"

using namespace persia;

namespace {

using Values = std::map<std::uint64_t, std::vector<float>>;

struct Shape {
  std::uint64_t capacity;
  std::uint32_t shards;
  std::uint64_t memory_rows;  // 0: all
  std::uint64_t ttl;
};

struct Published {
  explicit Published(const Shape& shape, std::size_t limit = 1 << 16, std::size_t threads = 1)
      : pool(threads), store(pool), removed_limit(limit) {
    TableConfig c = config_of(shape.capacity, shape.shards);
    c.ttl = shape.ttl;
    if (shape.memory_rows > 0) c.tier = {directory.path + "/t", shape.memory_rows};
    store.create_table(c);
  }

  bool begin(bool all) {
    bool begun = true;
    for (Shard* shard : store.table(0).all) begun = shard->begin_changes(all, removed_limit) && begun;
    if (begun && all) follower.clear();
    taken.clear();
    return begun;
  }
  // Takes the next piece of a shard, and applies it. Returns whether there may be more.
  bool take(std::uint32_t s, std::uint64_t most) {
    RowChanges changes;
    const bool more = store.shard(0, s).take_changes(most, changes);
    for (const std::uint64_t id : changes.removed) follower.erase(id);
    CHECK(changes.embeddings.size() == changes.ids.size() * kDim);
    for (std::size_t i = 0; i < changes.ids.size(); ++i) {
      CHECK(taken.insert(changes.ids[i]).second);  // once in a pass
      const auto* row = changes.embeddings.data() + i * kDim;
      follower[changes.ids[i]].assign(row, row + kDim);
    }
    return more;
  }
  void take_all() {
    for (std::uint32_t s = 0; s < store.table(0).all.size(); ++s) {
      while (take(s, 1 << 20)) {
      }
    }
  }
  void pass() {
    if (!begin(false)) CHECK(begin(true));
    take_all();
  }
  Values rows() {
    Values all;
    for (Shard* shard : store.table(0).all) {
      for (std::uint64_t next = 0; next != Shard::kNoRow;) {
        RowBatch batch;
        next = shard->export_rows(next, 1 << 20, batch);
        for (std::size_t i = 0; i < batch.ids.size(); ++i) {
          all[batch.ids[i]].assign(batch.embeddings.begin() + i * kDim, batch.embeddings.begin() + (i + 1) * kDim);
        }
      }
    }
    return all;
  }

  Directory directory{temporary()};
  ThreadPool pool;
  Store store;
  std::size_t removed_limit;
  Values follower;
  std::set<std::uint64_t> taken;  // in this pass
};

constexpr Shape kShapes[] = {{5000, 1, 0, 0},  {5000, 4, 0, 7}, {40, 2, 0, 0},   {300, 1, 0, 6},
                             {5000, 1, 64, 0}, {400, 2, 32, 0}, {900, 2, 16, 9}, {120, 1, 9, 4}};

}  // namespace

TEST_OF_ONE_THREAD(a_follower_has_the_rows_of_the_table) {
  for_each_row_shape([] {
    const int histories = kSanitized ? 3 : 6;
    for (const Shape& shape : kShapes) {
      for (int seed = 0; seed < histories; ++seed) {
        std::mt19937_64 random(static_cast<unsigned>(seed));
        Published table(shape, seed % 3 == 0 ? 30 : 1 << 16);
        const std::uint64_t universe = 2 + random() % (shape.capacity + shape.capacity / 2);
        std::uint32_t last = 1;
        bool snapshot = false;
        const auto remove_some = [&] {
          std::array<bool, kBuckets> leaving{};
          for (auto& bucket : leaving) bucket = random() % 4 == 0;
          for (Shard* shard : table.store.table(0).all) shard->remove_buckets({xxh64("t", 1, 0), leaving});
        };
        const auto train = [&] {
          Keys keys(random() % 60);
          for (auto& key : keys) key = random() % universe;
          look(table.store, keys);
          if (random() % 4 != 0) push(table.store, keys);
          if (random() % 3 == 0) table.store.advance_clock(0, random() % 3);
          if (!snapshot && random() % 40 == 0) table.store.clear(0);
          if (!snapshot && random() % 20 == 0) remove_some();
        };
        // A checkpoint reads the same rows now and then, and takes nothing from the publisher.
        const auto checkpoint = [&] {
          for (Shard* shard : table.store.table(0).all) {
            if (snapshot) {
              shard->end_snapshot();
            } else {
              shard->begin_snapshot({last + 1, 0, table.directory.path, 1 << 12, 1 << 16, false});
            }
          }
          last += !snapshot;
          snapshot = !snapshot;
        };
        for (int round = 0; round < 12; ++round) {
          for (auto n = random() % 6; n > 0; --n) {
            train();
            if (random() % 3 == 0) checkpoint();
          }
          const Values before = table.rows();
          const std::uint64_t evicted = table.store.counters(0).evicted;
          if (!table.begin(random() % 8 == 0)) CHECK(table.begin(true));
          // Training goes on between any two pieces.
          std::vector<std::uint32_t> open(shape.shards);
          for (std::uint32_t s = 0; s < shape.shards; ++s) open[s] = s;
          while (!open.empty()) {
            Keys keys(random() % 30);
            for (auto& key : keys) key = random() % universe;
            if (random() % 2 == 0) look(table.store, keys);
            push(table.store, keys);
            if (shape.ttl != 0 && !snapshot && random() % 8 == 0) remove_some();
            const std::size_t which = random() % open.size();
            if (!table.take(open[which], 1)) open.erase(open.begin() + static_cast<std::ptrdiff_t>(which));
          }
          // Weights only fall: whatever had changed before the pass is in it, wherever rows have moved.
          if (shape.ttl == 0 && table.store.counters(0).evicted == evicted) {
            for (const auto& [id, values] : before) {
              const auto found = table.follower.find(id);
              CHECK(found != table.follower.end() && found->second[0] <= values[0]);
            }
          }
          table.pass();
          CHECK(table.follower == table.rows());
        }
      }
    }
  });
}

TEST_OF_ONE_THREAD(without_a_publisher_nothing_is_marked) {
  Published table({5000, 1, 0, 0});
  look(table.store, range(0, 1000));
  const std::uint64_t before = table.store.memory_bytes(0);
  CHECK(!table.begin(false));
  push(table.store, range(0, 1000));
  CHECK(table.store.memory_bytes(0) == before);
  table.pass();
  CHECK(table.taken.size() == 1000);
  CHECK(table.store.memory_bytes(0) > before);
  table.store.shard(0, 0).end_changes();
  CHECK(table.store.memory_bytes(0) == before);
  CHECK(!table.begin(false));
}

TEST_OF_ONE_THREAD(a_pass_takes_what_has_changed_and_nothing_else) {
  Published table({5000, 1, 0, 0});
  look(table.store, range(0, 1000));
  table.pass();
  look(table.store, range(0, 1000));  // changes recency only
  push(table.store, {3, 5});
  look(table.store, {2000});
  table.pass();
  CHECK(table.taken == std::set<std::uint64_t>({3, 5, 2000}));
  table.pass();
  CHECK(table.taken.empty());
}

TEST_OF_ONE_THREAD(rows_that_move_to_disk_are_not_removed_nor_taken_again) {
  Published table({5000, 1, 16, 0});
  look(table.store, range(0, 100));
  table.pass();
  CHECK(table.store.tier_counts(0).rows > 0);
  look(table.store, range(0, 100));
  CHECK(table.begin(false));
  RowChanges changes;
  while (table.store.shard(0, 0).take_changes(1, changes)) {
  }
  CHECK(changes.ids.empty() && changes.removed.empty());
}

TEST_OF_ONE_THREAD(too_many_removed_rows_end_what_is_known_but_not_the_pass) {
  Published table({40, 1, 0, 0}, 10);
  look(table.store, range(0, 40));
  table.pass();
  look(table.store, range(100, 110));
  CHECK(table.begin(false));
  look(table.store, range(200, 211));
  table.take_all();
  CHECK(!table.begin(false));
  table.pass();
  CHECK(table.follower == table.rows());
}

TEST_OF_ONE_THREAD(a_pass_that_was_not_read_to_its_end_is_followed_by_one_of_all_rows) {
  Published table({20000, 1, 0, 0});
  look(table.store, range(0, 10000));
  CHECK(table.begin(true));
  CHECK(table.take(0, 1));
  CHECK(!table.begin(false));
  CHECK_THROWS(Published({10, 1, 0, 0}).take(0, 1), std::runtime_error);
}

TEST_OF_ONE_THREAD(state_that_goes_back_loses_the_pass) {
  Published table({5000, 1, 0, 0});
  look(table.store, range(0, 100));
  Shard& shard = table.store.shard(0, 0);
  const ShardState state = shard.export_state();
  CHECK(table.begin(true));
  shard.import_state(state);
  CHECK_THROWS(table.take(0, 1), std::runtime_error);
  CHECK(!table.begin(false));
  table.pass();
  shard.clear();
  CHECK(!table.begin(false));
  table.pass();
  shard.memory().header.clock = kLastClock;  // all rows get new stamps
  look(table.store, {1});
  CHECK(!table.begin(false));
  table.pass();
  CHECK(table.follower == table.rows());
}

TEST_OF_ONE_THREAD(imported_rows_are_taken) {
  for_each_row_shape([] {
    Published table({5000, 1, 0, 0}), other({5000, 1, 0, 0});
    look(table.store, range(0, 100));
    table.pass();
    look(other.store, range(50, 150));
    push(other.store, range(50, 150));
    RowBatch rows;
    other.store.shard(0, 0).export_rows(0, 1000, rows);
    table.store.import_rows(0, rows.ids.size(),
                            {rows.ids.data(), rows.embeddings.data(), rows.states.data(), rows.update_counts.data(),
                             rows.last_steps.data(), rows.stamps.data()});
    CHECK(table.begin(false));
    table.take_all();
    CHECK(table.taken.size() == 100);
    CHECK(table.follower == table.rows());
  });
}

TEST_OF_ONE_THREAD(rows_that_leave_after_their_time_to_live_are_removed_once) {
  for (const std::uint64_t memory_rows : {0, 16}) {
    Published table({5000, 1, memory_rows, 16});
    look(table.store, range(0, 100));
    table.pass();
    for (int step = 0; step < 20; ++step) {
      look(table.store, {7, 8});
      table.store.advance_clock(0, 1);
    }
    CHECK(table.rows().size() == 2);
    CHECK(table.begin(false));
    RowChanges changes;
    while (table.store.shard(0, 0).take_changes(1, changes)) {
    }
    CHECK(std::set<std::uint64_t>(changes.removed.begin(), changes.removed.end()).size() == 98);
    CHECK(table.begin(false));
    changes = {};
    while (table.store.shard(0, 0).take_changes(1, changes)) {
    }
    CHECK(changes.removed.empty() && changes.ids.empty());
  }
}

TEST_OF_ONE_THREAD(expired_rows_are_listed_although_others_are_removed_meanwhile) {
  Published table({20'000, 1, 0, 10});
  table.store.advance_clock(0, 0);
  look(table.store, range(0, 10'000));
  CHECK(table.begin(true));
  table.take_all();
  for (int step = 0; step < 20; ++step) table.store.advance_clock(0, 1);
  CHECK(table.rows().empty());
  CHECK(table.begin(false));
  CHECK(table.take(0, 1));  // A part of the rows has been looked at, and the last rows are not among them.
  CHECK(!table.follower.empty());
  std::array<bool, kBuckets> some{};
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) some[bucket] = bucket % 50 == 0;
  table.store.shard(0, 0).remove_buckets({xxh64("t", 1, 0), some});
  while (table.take(0, 1)) {
  }
  table.pass();
  CHECK(table.follower.empty());
}

TEST_OF_ONE_THREAD(rows_that_have_left_and_whose_memory_is_used_again_are_removed) {
  for (const std::uint64_t memory_rows : {0, 64}) {
    Published table({5000, 1, memory_rows, 4});
    look(table.store, range(0, 60));
    table.pass();
    for (int step = 0; step < 20; ++step) table.store.advance_clock(0, 1);
    for (std::uint64_t id = 100; id < 150; ++id) look(table.store, {id});
    CHECK(table.begin(false));
    table.take_all();
    CHECK(table.follower == table.rows());
    CHECK(table.follower.size() == 50);
  }
}

TEST(training_goes_on_beside_a_publisher) {
  for_each_row_shape([] {
    for (const std::uint64_t memory_rows : {0, 128}) {
      Published table({2000, 2, memory_rows, 50}, 1 << 20, 2);
      std::atomic<bool> stop = false;
      std::thread trainer([&] {
        std::mt19937_64 random(5);
        for (int step = 0; step < (kSanitized ? 200 : 1000); ++step) {
          Keys keys(50);
          for (auto& key : keys) key = random() % 3000;
          look(table.store, keys);
          push(table.store, keys);
          table.store.advance_clock(0, 1);
        }
        stop = true;
      });
      while (!stop) table.pass();
      trainer.join();
      table.pass();
      CHECK(table.follower == table.rows());
    }
  });
}

MAIN
