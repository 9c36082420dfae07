#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "one_table.hpp"
#include "persia/hash.hpp"

using namespace persia;

namespace {

struct Fixture {
  ThreadPool pool{1};
  Store store{pool};

  explicit Fixture(std::uint64_t capacity, std::uint32_t shards) {
    store.create_table(config_of(capacity, shards));
    store.keep_last_steps(0);
  }
  void look(const Keys& keys) { persia::look(store, keys); }
  void push(const Keys& keys, std::uint32_t step) { persia::push(store, keys, {step}); }
  std::vector<RowBatch> now() {
    std::vector<RowBatch> shards;
    for (Shard* shard : store.table(0).all) shard->export_rows(0, ~std::uint64_t{0} >> 1, shards.emplace_back());
    return shards;
  }
  void begin(std::uint32_t id, std::uint32_t since = 0, std::size_t buffer = 1 << 20,
             const std::optional<BucketSet>& only = {}) {
    for (Shard* shard : store.table(0).all) shard->begin_snapshot({id, since, "/tmp", buffer, 1 << 20, false, only});
  }
  void end() {
    for (Shard* shard : store.table(0).all) shard->end_snapshot();
  }
};

Keys draw(std::mt19937_64& random, std::size_t count, std::uint64_t below) {
  Keys keys(count);
  for (auto& key : keys) key = random() % below;
  return keys;
}

// What is left of a snapshot, in pieces of `most` rows.
RowBatch rest_of(Shard& shard, std::uint64_t most, std::uint32_t id = 2) {
  RowBatch rows;
  while (shard.export_snapshot(id, most, rows)) {
  }
  return rows;
}

BucketSet some_buckets(std::mt19937_64& random) {
  BucketSet buckets{xxh64("t", 1, 0), {}};
  for (auto& chosen : buckets.chosen) chosen = random() % 3 == 0;
  return buckets;
}

// The rows of some buckets.
RowBatch rows_of(const RowBatch& all, const BucketSet& buckets) {
  RowBatch rows;
  for (std::size_t i = 0; i < all.ids.size(); ++i) {
    if (!buckets.has(all.ids[i])) continue;
    const auto add = [&](auto& to, const auto& from) {
      const auto width = static_cast<std::ptrdiff_t>(from.size() / all.ids.size());
      const auto begin = from.begin() + static_cast<std::ptrdiff_t>(i) * width;
      to.insert(to.end(), begin, begin + width);
    };
    add(rows.ids, all.ids);
    add(rows.embeddings, all.embeddings);
    add(rows.states, all.states);
    add(rows.update_counts, all.update_counts);
    add(rows.last_steps, all.last_steps);
    add(rows.stamps, all.stamps);
  }
  return rows;
}

// One shard, a snapshot of whose rows is begun and keeps old rows in `directory`; then all of them change, in step 9.
struct Overtaken : Fixture {
  Overtaken(const char* directory, bool live) : Fixture(10000, 1), keys(range(0, 5000)), shard(store.shard(0, 0)) {
    look(keys);
    shard.begin_snapshot({2, 0, directory, 1, 0, live});
    push(keys, 9);
    look({7000});
  }
  Keys keys;
  Shard& shard;
};

bool same(const RowBatch& a, const RowBatch& b) {
  return a.ids == b.ids && a.embeddings == b.embeddings && a.states == b.states && a.update_counts == b.update_counts &&
         a.last_steps == b.last_steps && a.stamps == b.stamps;
}

}  // namespace

TEST(spill_gives_each_row_once_and_sorted) {
  constexpr std::size_t kStride = 24;
  for (const std::size_t buffer : {std::size_t{1}, std::size_t{200}, std::size_t{1} << 20}) {
    OldRows old_rows("/tmp", kStride, buffer);
    std::vector<std::uint32_t> numbers(3000);
    std::iota(numbers.begin(), numbers.end(), 0u);
    std::mt19937 random(1);
    std::shuffle(numbers.begin(), numbers.end(), random);
    std::uint64_t end = 0;
    std::vector<std::uint32_t> expected, found;
    const auto take = [&](std::uint64_t to) {
      for (const auto& old : old_rows.take(end = to)) {
        CHECK(old.tag.number < end && old.tag.last_step == old.tag.number + 1);
        std::uint32_t value = 0;
        std::memcpy(&value, old.row + 4, sizeof(value));
        CHECK(value == old.tag.number * 7);
        found.push_back(old.tag.number);
      }
    };
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] < end) continue;
      std::byte row[kStride] = {};
      const std::uint32_t value = numbers[i] * 7;
      std::memcpy(row + 4, &value, sizeof(value));
      old_rows.add({numbers[i], numbers[i] + 1}, row);
      expected.push_back(numbers[i]);
      if (i % 100 == 50) take(end + 37);
    }
    take(3000);
    std::sort(expected.begin(), expected.end());
    CHECK(found == expected);
    CHECK((old_rows.file_bytes() > 0) == (buffer < 1 << 20));
  }
}

TEST(spill_writes_a_buffer_in_pieces) {
  constexpr std::uint32_t kRows = 50;
  for (const std::size_t stride : {std::size_t{5000}, std::size_t{100000}}) {  // some rows to a piece, and one
    OldRows old_rows("/tmp", stride, 20 * (stride + 8));
    for (std::uint32_t i = 0; i < kRows; ++i) {
      const std::uint32_t number = i * 7 % kRows;
      old_rows.add({number, 0}, std::vector<std::byte>(stride, std::byte{static_cast<unsigned char>(number)}).data());
    }
    CHECK(old_rows.file_bytes() == 40 * (stride + 8));
    const auto& old = old_rows.take(kRows);
    CHECK(old.size() == kRows);
    for (std::uint32_t i = 0; i < old.size(); ++i) {
      CHECK(old[i].tag.number == i);
      CHECK(std::all_of(old[i].row, old[i].row + stride,
                        [i](std::byte b) { return static_cast<std::uint32_t>(b) == i; }));
    }
  }
}

TEST(a_snapshot_gives_the_rows_of_its_moment_whatever_happens_meanwhile) {
  for_each_row_shape([] {
    for (const std::size_t buffer : {std::size_t{1}, std::size_t{1} << 16}) {
      std::mt19937_64 random(buffer);
      Fixture f(20000, 2);
      for (std::uint32_t step = 1; step < 20; ++step) {
        const Keys keys = draw(random, 2000, 40000);
        f.look(keys);
        f.push(keys, step);
      }
      const auto expected = f.now();
      f.begin(2, 0, buffer);
      for (std::size_t s = 0; s < 2; ++s) {
        RowBatch rows;
        bool more = true;
        while (more) {
          const Keys keys = draw(random, 500, 60000);  // new ids evict old ones
          f.look(keys);
          f.push(keys, 100);
          set(f.store, draw(random, 100, 60000), 0.5f, 101);
          more = f.store.shard(0, s).export_snapshot(2, 100, rows);
        }
        CHECK(same(rows, expected[s]));
      }
      f.end();
    }
  });
}

TEST(a_snapshot_of_some_buckets_has_their_rows_alone) {
  for_each_row_shape([] {
    std::mt19937_64 random(7);
    const BucketSet buckets = some_buckets(random);
    Fixture f(20000, 2);
    f.look(draw(random, 25000, 40000));
    const auto before = f.now();
    f.begin(2, 0, 500, buckets);
    const auto train = [&](std::uint32_t step) {
      const Keys keys = draw(random, 500, 60000);  // new ids evict old ones
      f.look(keys);
      f.push(keys, step);
    };
    for (std::size_t s = 0; s < 2; ++s) {
      RowBatch rows;
      while (f.store.shard(0, s).export_snapshot(2, 100, rows)) train(8);
      CHECK(same(rows, rows_of(before[s], buckets)));
    }
    f.end();
    for (int more = 0; more < 10; ++more) train(9);
    const auto since = f.now();
    f.begin(3, 2, 500, buckets);
    for (std::size_t s = 0; s < 2; ++s) {
      Shard& shard = f.store.shard(0, s);
      for (const auto id : shard.snapshot_evicted(3)) CHECK(buckets.has(id));
      CHECK(!shard.snapshot_evicted(3).empty());
      RowBatch rows;
      while (shard.export_snapshot(3, 100, rows)) train(9);
      const RowBatch all = rows_of(since[s], buckets);
      for (const auto id : rows.ids) CHECK(std::find(all.ids.begin(), all.ids.end(), id) != all.ids.end());
      CHECK(rows.ids.size() < all.ids.size());
      CHECK(!rows.ids.empty());
    }
    f.end();
  });
}

TEST(old_rows_of_other_buckets_are_not_kept) {
  Fixture f(10000, 1);
  const Keys keys = range(0, 5000);
  f.look(keys);
  Shard& shard = f.store.shard(0, 0);
  shard.begin_snapshot({2, 0, "/nowhere", 1, 0, false, BucketSet{xxh64("t", 1, 0), {}}});
  f.push(keys, 9);
  CHECK(rest_of(shard, 10000).ids.empty());  // Without a file of old rows, which would have ended it.
}

TEST(threads_may_train_while_a_snapshot_is_read) {
  for_each_row_shape([] {
    std::mt19937_64 random(3);
    Fixture f(60000, 4);
    f.look(draw(random, 80000, 90000));
    const auto expected = f.now();
    f.begin(2, 0, 4096);
    std::atomic<bool> done{false};
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        std::mt19937_64 mine(t);
        while (!done) {
          const Keys keys = draw(mine, 300, 120000);
          f.look(keys);
          f.push(keys, 7);
          set(f.store, draw(mine, 30, 120000), 0.5f, 8);
        }
      });
    }
    for (std::size_t s = 0; s < 4; ++s) {
      CHECK(same(rest_of(f.store.shard(0, s), 1000), expected[s]));
    }
    done = true;
    for (auto& thread : threads) thread.join();
    f.end();
  });
}

TEST(changes_and_evictions_since_a_snapshot_add_up_to_the_new_rows) {
  for_each_row_shape([] {
    std::mt19937_64 random(5);
    Fixture f(3000, 2);
    f.look(draw(random, 4000, 8000));
    f.begin(2);
    f.end();
    std::map<std::uint64_t, std::uint32_t> known;
    for (const auto& rows : f.now()) {
      for (std::size_t i = 0; i < rows.ids.size(); ++i) known[rows.ids[i]] = rows.stamps[i];
    }
    std::uint32_t last = 2;
    for (int round = 0; round < 5; ++round) {
      f.look(draw(random, 700, 8000));
      for (Shard* shard : f.store.table(0).all) CHECK(shard->changes_since() == last);
      f.begin(last + 1, last);
      f.look(draw(random, 300, 8000));  // belongs to the next round
      set(f.store, draw(random, 50, 8000), 0.5f, 3);
      std::size_t changed = 0;
      for (std::size_t s = 0; s < 2; ++s) {
        for (const auto id : f.store.shard(0, s).snapshot_evicted(last + 1)) known.erase(id);
        const RowBatch rows = rest_of(f.store.shard(0, s), 100, last + 1);
        changed += rows.ids.size();
        set(f.store, draw(random, 20, 8000), 0.25f, 4);
        for (std::size_t i = 0; i < rows.ids.size(); ++i) known[rows.ids[i]] = rows.stamps[i];
      }
      CHECK(changed < 1100);
      CHECK(known.size() == 3000);
      f.end();
      ++last;
    }
  });
}

TEST(rows_that_are_set_are_in_the_next_increment_alone) {
  for_each_row_shape([] {
    Fixture f(1000, 1);
    f.look(range(0, 100));
    const auto expected = f.now();
    f.begin(2);
    set(f.store, {7, 200, 8}, 0.5f, 9);
    CHECK(same(rest_of(f.store.shard(0, 0), 10), expected[0]));
    f.end();
    CHECK(f.store.shard(0, 0).changes_since() == 2);
    f.begin(3, 2);
    set(f.store, {7}, 0.25f, 10);
    const RowBatch rows = rest_of(f.store.shard(0, 0), 10, 3);
    CHECK(rows.ids == (Keys{7, 8, 200}));
    CHECK(rows.embeddings == std::vector<float>(3 * row_shape.dim, 0.5f));
    CHECK(rows.last_steps == (std::vector<std::uint32_t>{9, 9, 9}));
    f.end();
  });
}

TEST(what_cannot_be_is_refused) {
  Fixture f(10, 1);
  Shard& shard = f.store.shard(0, 0);
  f.look({1, 2, 3});
  CHECK_THROWS(shard.begin_snapshot({1, 0, "/tmp", 1, 0, false}), std::invalid_argument);  // not a new id
  CHECK_THROWS(shard.begin_snapshot({2, 1, "/tmp", 1, 0, false}), std::invalid_argument);  // nobody has remembered
  RowBatch rows;
  CHECK_THROWS(shard.export_snapshot(2, 1, rows), std::runtime_error);
  f.begin(2);
  CHECK_THROWS(f.begin(3), std::runtime_error);
  CHECK_THROWS(shard.clear(), std::runtime_error);
  CHECK_THROWS(shard.export_snapshot(1, 10, rows), std::runtime_error);  // a reader of the one before
  CHECK_THROWS(shard.snapshot_evicted(1), std::runtime_error);
  CHECK(!shard.export_snapshot(2, 10, rows));
  CHECK(rows.ids.size() == 3);
  f.end();
  shard.clear();
  CHECK(shard.changes_since() == 0);
}

TEST(a_spill_that_cannot_be_written_ends_the_snapshot_and_not_training) {
  Overtaken f("/nowhere", false);
  CHECK_THROWS(rest_of(f.shard, 10), std::runtime_error);
  f.shard.end_snapshot();
  f.shard.begin_snapshot({3, 0, "/tmp", 1, 0, false});
  f.push(f.keys, 10);
  const RowBatch rows = rest_of(f.shard, 10000, 3);
  CHECK(rows.ids.size() == 5001);
  CHECK(rows.last_steps[0] == 9);
}

TEST(a_live_snapshot_gives_rows_as_they_are_and_spills_nothing) {
  Overtaken f("/nowhere", true);
  const RowBatch rows = rest_of(f.shard, 10000);
  CHECK(rows.ids.size() == 5000);
  CHECK(std::all_of(rows.last_steps.begin(), rows.last_steps.end(), [](std::uint32_t step) { return step == 9; }));
}

TEST(evictions_beyond_the_limit_are_forgotten_and_said_so) {
  Fixture f(10, 1);
  Shard& shard = f.store.shard(0, 0);
  shard.begin_snapshot({2, 0, "/tmp", 1, 3, false});
  shard.end_snapshot();
  f.look(range(0, 13));
  CHECK(shard.changes_since() == 2);
  f.look({99});
  CHECK(shard.changes_since() == 0);
}

MAIN
