// The store: rows that grow, are evicted and expire, threads, and pushes that a crash has cut off.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"
#include "persia/hash.hpp"
#include "persia/push_log.hpp"

using namespace persia;

namespace {

// Rounds of each thread. A race shows in the first few, and TSan is slow.
constexpr std::uint64_t kRounds = kThreadSanitized ? 8 : 20;

TableConfig durable(TableConfig config) {
  config.durable = true;
  return config;
}

}  // namespace

TEST(rows_survive_growth_and_keep_their_values) {
  ThreadPool pool(2);
  Store store(pool);
  store.create_table(config_of(1u << 20, 4));
  const Keys keys = range(0, 200000);
  const auto first = look(store, keys);
  CHECK(store.size(0) == keys.size());
  CHECK(look(store, keys, false) == first);
  CHECK(store.counters(0).hits == 0);
  CHECK(push(store, keys).applied == keys.size());
  CHECK(look(store, keys, false) != first);
}

TEST_OF_ONE_THREAD(evicts_the_least_recent) {
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(config_of(1000, 1));
  look(store, range(0, 1000));
  look(store, range(0, 500));
  look(store, range(5000, 5500));
  std::vector<std::uint8_t> found(1000);
  store.peek(0, range(0, 1000), found.data());
  CHECK(std::all_of(found.begin(), found.begin() + 500, [](auto f) { return f == 1; }));
  CHECK(std::none_of(found.begin() + 500, found.end(), [](auto f) { return f == 1; }));
  look(store, range(10000, 13000));
  CHECK(store.size(0) == 1000);
}

TEST(rows_are_removed_while_others_train) {
  ThreadPool pool(2);
  Store store(pool);
  store.create_table(config_of(1u << 20, 4));
  const std::uint64_t name = xxh64("t", 1, 0);
  std::array<bool, kBuckets> chosen{};
  for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) chosen[bucket] = bucket % 2 == 0;
  Keys kept, leaving;
  for (std::uint64_t id = 0; id < 40'000; ++id) (chosen[bucket_of(name, id)] ? leaving : kept).push_back(id);
  look(store, kept);
  look(store, leaving);
  std::thread trainer([&] {
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      look(store, kept);
      CHECK(push(store, kept, {1, 9, round}).applied == kept.size());
    }
  });
  std::uint64_t removed = 0;
  for (Shard* shard : store.table(0).all) removed += shard->remove_buckets({name, chosen});
  trainer.join();
  CHECK(removed == leaving.size());
  std::vector<std::uint8_t> found(kept.size());
  const RowBatch rows = store.peek(0, kept, found.data());
  for (std::size_t i = 0; i < kept.size(); ++i) CHECK(found[i] == 1 && rows.update_counts[i] == kRounds);
  found.resize(leaving.size());
  store.peek(0, leaving, found.data());
  CHECK(std::none_of(found.begin(), found.end(), [](auto f) { return f == 1; }));
}

// Stamps do not only rise then.
TEST_OF_ONE_THREAD(evicts_the_least_recent_after_clearing_imports_and_renumbering) {
  constexpr std::uint64_t kRows = 300;
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(config_of(kRows, 1));
  Shard& shard = store.shard(0, 0);
  std::mt19937_64 random(6);
  const auto rows_now = [&] {
    RowBatch rows;
    shard.export_rows(0, kRows, rows);
    return rows;
  };
  for (std::uint64_t id = 0; id < 20000; ++id) {
    const RowBatch before = rows_now();
    look(store, {id});
    if (before.ids.size() == kRows) {
      const auto oldest = std::min_element(before.stamps.begin(), before.stamps.end()) - before.stamps.begin();
      CHECK(rows_now().ids[oldest] == id);
    }
    if (random() % 2 == 0) look(store, {before.ids.empty() ? id : before.ids[random() % before.ids.size()]});
    switch (random() % 1000) {
      case 0:
        store.clear(0);
        break;
      case 1:
      case 2: {
        RowBatch rows = rows_now();
        for (std::size_t i = 0; i < rows.ids.size(); i += 3) rows.ids[i] += 1u << 20;  // takes the place of another
        for (auto& stamp : rows.stamps) stamp = 1 + static_cast<std::uint32_t>(random() % shard.memory().header.clock);
        store.import_rows(0, rows.ids.size(),
                          {rows.ids.data(), rows.embeddings.data(), rows.states.data(), rows.update_counts.data(),
                           rows.last_steps.data(), rows.stamps.data()});
        break;
      }
      case 3:
        shard.memory().header.clock = ~0u;
        break;
      case 4: {
        ShardState state = shard.export_state();
        state.clock = 0;
        shard.import_state(state);
        break;
      }
    }
  }
}

TEST_OF_ONE_THREAD(no_request_of_a_full_table_scans_it) {
  constexpr std::uint64_t kRows = 20000, kRequest = 100;
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(config_of(kRows, 1));
  const EvictionQueue& eviction = store.shard(0, 0).memory().eviction;
  std::uint64_t next = 0, oldest = 0, most = 0;
  for (int request = 0; request < 3000; ++request) {
    const std::uint64_t read = eviction.read();
    const bool full = store.size(0) == kRows;
    if (!full || request % 20 == 0) {
      look(store, range(next, next + kRequest));  // evicts as many, if it is full
      next += kRequest;
      oldest += full ? kRequest : 0;
    } else if (request % 2 == 0) {
      look(store, range(oldest, oldest + kRequest));
      oldest = (oldest + kRequest) % next;
    } else {
      push(store, range(oldest, oldest + kRequest));
      oldest = (oldest + kRequest) % next;
    }
    most = std::max(most, eviction.read() - read);
  }
  CHECK(store.counters(0).evicted > 10 * kRequest);
  CHECK(most > 0 && most <= 40 * kRequest);
}

TEST(no_request_scans_a_full_table_that_was_attached_or_loaded) {
  constexpr std::uint64_t kRows = 40000, kRequest = 200;
  constexpr std::uint32_t kShards = 2;
  const Directory directory;
  ThreadPool pool(2);
  const auto opened = [&](Store& store, bool attach) {
    TableConfig config = config_of(kRows, kShards);
    config.files = {directory.path + "/t", attach, 5.0};
    store.create_table(config);
  };
  Store loaded(pool), smaller(pool);
  loaded.create_table(config_of(kRows, kShards));
  smaller.create_table(config_of(kRows / 2, kShards));
  std::uint64_t last = 0;
  {
    Store store(pool);
    opened(store, false);
    for (; last < kRows + 10 * kRequest; last += kRequest) look(store, range(last, last + kRequest));
    RowBatch rows;
    for (std::uint32_t s = 0; s < kShards; ++s) store.shard(0, s).export_rows(0, kRows, rows);
    for (Store* into : {&loaded, &smaller}) {
      into->import_rows(0, rows.ids.size(),
                        {rows.ids.data(), rows.embeddings.data(), rows.states.data(), rows.update_counts.data(),
                         rows.last_steps.data(), rows.stamps.data()});
    }
    for (std::uint32_t s = 0; s < kShards; ++s) loaded.shard(0, s).import_state(store.shard(0, s).export_state());
    for (Store* into : {&loaded, &smaller}) into->end_import(0);
  }
  Store attached(pool);
  opened(attached, true);
  for (Store* store : {&loaded, &smaller, &attached}) {
    const std::uint64_t rows = store->size(0), added = rows / 2;
    CHECK(rows == (store == &smaller ? kRows / 2 : kRows));
    for (std::uint64_t id = 10 * kRows; id < 10 * kRows + added; id += kRequest) {
      std::uint64_t before[kShards];
      for (std::uint32_t s = 0; s < kShards; ++s) before[s] = store->shard(0, s).memory().eviction.read();
      look(*store, range(id, id + kRequest));
      for (std::uint32_t s = 0; s < kShards; ++s) {
        CHECK(store->shard(0, s).memory().eviction.read() - before[s] <= 40 * kRequest);
      }
    }
    // Of each shard, the ids that were looked up last are still there: those after the first one that is.
    std::vector<std::uint8_t> found(last);
    store->peek(0, range(0, last), found.data());
    CHECK(std::accumulate(found.begin(), found.end(), std::uint64_t{0}) == rows - added);
    for (std::uint32_t s = 0; s < kShards; ++s) {
      bool there = false;
      for (std::uint64_t id = 0; id < last; ++id) {
        if (shard_of(id, kShards) != s) continue;
        CHECK(there <= (found[id] != 0));
        there = found[id] != 0;
      }
    }
  }
}

TEST(threads_share_a_store) {
  for_each_row_shape([] {
    ThreadPool pool(2);
    Store store(pool);
    store.create_table(config_of(3000, 4));
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&store, t] {
        for (std::uint64_t i = 0; i < kRounds; ++i) {
          look(store, range(i * 100 * t, i * 100 * t + 2000));
          push(store, range(i * 100 * t, i * 100 * t + 2000), {1, t + 1, i + 1});
          look(store, range(0, 1000), false);
          store.counters(0);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(store.size(0) == 3000);
  });
}

// No row is evicted and all gradients are equal, so a row depends on the number of its updates only, not on their
// order.
TEST(rows_of_several_threads_are_those_of_one) {
  for_each_row_shape([] {
    constexpr std::uint64_t kThreads = 4;
    ThreadPool one(1), two(2);
    Store store(two), twin(one);
    for (Store* s : {&store, &twin}) s->create_table(config_of(10'000, 4));
    const auto train = [](Store& s, std::uint64_t t) {
      for (std::uint64_t i = 0; i < kRounds; ++i) {
        const Keys keys = range(i * 20 * t, i * 20 * t + 2000);
        look(s, keys);
        CHECK(push(s, keys, {1, t + 1, i + 1}).applied == keys.size());
      }
    };
    std::vector<std::thread> threads;
    for (std::uint64_t t = 0; t < kThreads; ++t) threads.emplace_back(train, std::ref(store), t);
    for (auto& thread : threads) thread.join();
    for (std::uint64_t t = 0; t < kThreads; ++t) train(twin, t);
    // Compared as bytes: a word of two 16-bit values may be NaN as a float, which equals nothing.
    const auto mine = look(store, range(0, 4000), false), same = look(twin, range(0, 4000), false);
    CHECK(std::memcmp(mine.data(), same.data(), mine.size() * sizeof(float)) == 0);
  });
}

TEST_OF_ONE_THREAD(a_push_counts_once_even_after_a_crash_in_its_middle) {
  ThreadPool pool(1);
  Store store(pool), twin(pool);
  for (Store* s : {&store, &twin}) {
    s->create_table(durable(config_of(1000, 1)));
    look(*s, range(0, 100));
  }
  Shard& shard = store.shard(0, 0);
  const Keys keys = range(0, 100);
  // As a kill after 40 rows leaves it: progress counted, row 40 half written, its old bytes in the undo slot.
  push(store, range(0, 40));
  Header& h = shard.memory().header;
  const auto layout = Layout::of(h.capacity, h.row_stride, h.sketch_width);
  std::memcpy(reinterpret_cast<std::byte*>(&h) + layout.undo, shard.memory().store.row_bytes(40), h.row_stride);
  h.push = {9, 1, 40};
  h.undo_mark = 40;
  h.undo_row = 41;
  h.busy = 1;
  std::memset(shard.memory().store.row_bytes(40) + 30, 0x55, 8);
  std::memset(reinterpret_cast<std::byte*>(&h) + layout.index, 0xAA, 512);

  shard.recover();
  CHECK(h.busy == 0 && h.undo_row == 0 && h.push.client == 0);
  CHECK(push(store, range(0, 1), {1, 8, 1}).applied == 1);  // somebody else first
  CHECK(push(store, keys, {1, 9, 1}).applied == 60);
  CHECK(push(store, keys, {1, 9, 1}).duplicates == 100);
  push(twin, keys);
  push(twin, range(0, 1));
  CHECK(look(store, keys, false) == look(twin, keys, false));
}

TEST(an_interrupted_push_goes_on_in_each_shard_where_it_stopped) {
  ThreadPool one(1), two(2);
  Store store(one), twin(two);  // the twin works shard by shard, the store in the order of the push
  for (Store* s : {&store, &twin}) {
    s->create_table(durable(config_of(5000, 4)));
    look(*s, range(0, 4000));
  }
  const Keys keys = range(0, 4000);
  for (std::size_t s = 0; s < 4; ++s) {
    Keys mine;
    for (const auto id : keys) {
      if (shard_of(id, 4) == s) mine.push_back(id);
    }
    mine.resize(100 * s);
    push(store, mine);
    Shard& shard = store.shard(0, s);
    shard.memory().header.push = {9, 1, mine.size()};
    shard.memory().header.busy = 1;
    shard.recover();
  }
  CHECK(push(store, keys, {1, 9, 1}).applied == 4000 - 600);
  CHECK(push(store, keys, {1, 9, 1}).duplicates == 4000);
  CHECK(push(twin, keys, {1, 9, 1}).applied == 4000);
  CHECK(look(store, keys, false) == look(twin, keys, false));
}

TEST(a_completed_row_is_not_undone) {
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(durable(config_of(10, 1)));
  look(store, range(0, 5));
  Shard& shard = store.shard(0, 0);
  Header& h = shard.memory().header;
  h.push = {9, 1, 3};
  h.undo_mark = 2;
  h.undo_row = 3;  // the undo slot is void: the count has moved on
  const auto before = look(store, range(0, 5), false);
  shard.recover();
  CHECK(look(store, range(0, 5), false) == before);
}

TEST(an_interrupted_commit_is_completed) {
  auto memory = std::make_unique<Header>();
  Header& h = *memory;
  PushLog log(h);
  log.begin(4, 1);
  log.commit(4, 1);
  const ClientEntry done = h.clients[0];
  h.clients[0] = {};
  h.commit_slot = 1;
  h.push = {4, 1, 10};
  PushLog(h).recover();
  CHECK(std::memcmp(&h.clients[0], &done, sizeof(done)) == 0);
  CHECK(log.applied(4, 1) && !log.applied(4, 2) && h.push.client == 0);
}

TEST(the_oldest_client_makes_room) {
  auto memory = std::make_unique<Header>();
  PushLog log(*memory);
  for (std::uint64_t client = 1; client <= kClients; ++client) log.commit(client, 1);
  log.commit(1, 2);
  log.commit(1000, 1);
  CHECK(log.applied(1, 1) && log.applied(1, 2) && !log.applied(2, 1) && log.applied(3, 1) && log.applied(1000, 1));
}

TEST(bad_configurations) {
  ThreadPool pool(1);
  Store store(pool);
  for (const auto& change : std::vector<std::function<void(TableConfig&)>>{
           [](auto& c) { c.name = ""; }, [](auto& c) { c.dim = 0; }, [](auto& c) { c.shards = 3; },
           [](auto& c) { c.capacity = 0; }, [](auto& c) { c.optimizer.beta1 = 1.0; },
           [](auto& c) { c.capacity = std::uint64_t{1} << 40; }, [](auto& c) { c.optimizer.eps = -1.0f; }}) {
    TableConfig c = config_of(100, 1);
    change(c);
    CHECK_THROWS(store.create_table(c), std::invalid_argument);
  }
  store.create_table(config_of(100, 1));
  CHECK_THROWS(store.create_table(config_of(100, 1)), std::invalid_argument);
  CHECK_THROWS(store.size(1), std::invalid_argument);
}

MAIN

TEST_OF_ONE_THREAD(rows_leave_that_were_not_touched_for_their_time) {
  row_shape.ttl = 160;
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(config_of(1 << 20, 2));
  row_shape = {};
  const auto found = [&](const Keys& keys) {
    std::vector<std::uint8_t> found(keys.size());
    store.peek(0, keys, found.data());
    return std::accumulate(found.begin(), found.end(), 0);
  };
  store.advance_clock(0, 0);
  look(store, range(0, 1000));
  push(store, range(0, 1000));
  store.advance_clock(0, 10);
  look(store, range(500, 1500));
  store.advance_clock(0, 159);
  CHECK(found(range(0, 1500)) == 1500);
  store.advance_clock(0, 1);  // 170, of which 160 since the mark after the first rows
  CHECK(found(range(0, 500)) == 0 && found(range(500, 1500)) == 1000);
  CHECK(push(store, range(0, 500)).absent == 500);
  for (const float value : look(store, range(0, 500), false)) CHECK(value == 0.0f);
  CHECK(store.size(0) == 1500);
  // They begin again, and their memory serves new rows.
  const auto fresh = look(store, range(0, 200));
  ThreadPool other_pool(1);
  Store other(other_pool);
  other.create_table(config_of(1 << 20, 2));
  CHECK(fresh == look(other, range(0, 200)));
  for (std::uint64_t id = 10000; id < 12000; id += 100) look(store, range(id, id + 100));
  CHECK(store.size(0) == 3200 && found(range(0, 12000)) == 3200);
  CHECK(store.counters(0).evicted == 0);
}

TEST_OF_ONE_THREAD(no_request_waits_for_rows_that_have_left) {
  row_shape.ttl = 16;
  ThreadPool pool(1);
  Store store(pool);
  store.create_table(config_of(1 << 20, 1));
  row_shape = {};
  store.advance_clock(0, 0);
  look(store, range(0, 100'000));
  store.advance_clock(0, 1);
  look(store, range(1, 99'999));
  store.advance_clock(0, 16);
  look(store, {200'000});  // in place of row 0, which is found immediately
  CHECK(store.size(0) == 100'000);
  look(store, range(300'000, 300'010));  // The last row is not looked at before thousands of others.
  CHECK(store.size(0) == 100'010);
  look(store, range(400'000, 430'000));
  CHECK(store.size(0) == 130'009);
}
