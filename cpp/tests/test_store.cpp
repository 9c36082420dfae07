#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "one_table.hpp"

using namespace persia;

namespace {

TableConfig durable(TableConfig config) {
  config.durable = true;
  return config;
}

// An index beside a map of what should be in it.
struct IndexModel {
  std::vector<std::uint64_t> memory;
  Index index;
  std::vector<std::uint32_t> tags;  // by row
  std::vector<bool> present;

  explicit IndexModel(std::uint64_t max_slots) : memory(max_slots + kIndexTail), index(memory.data(), 64, max_slots) {}

  bool finds(std::uint32_t row) const {
    return index.find(tags[row], [&](std::uint32_t r) { return r == row; }) == row;
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
      if (model.index.full(live)) model.index.grow();
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

TEST(index_refuses_crafted_collisions) {
  IndexModel model(1 << 20);
  const auto fill = [&] {
    for (std::uint32_t row = 0; row < 10000; ++row) model.index.insert(1, row);
  };
  CHECK_THROWS(fill(), std::runtime_error);
}

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

TEST(evicts_the_least_recent) {
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

TEST(threads_share_a_store) {
  ThreadPool pool(2);
  Store store(pool);
  store.create_table(config_of(3000, 4));
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&store, t] {
      for (std::uint64_t i = 0; i < 20; ++i) {
        look(store, range(i * 100 * t, i * 100 * t + 2000));
        push(store, range(i * 100 * t, i * 100 * t + 2000), {1, t + 1, i + 1});
        look(store, range(0, 1000), false);
        store.counters(0);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(store.size(0) == 3000);
}

TEST(a_push_counts_once_even_after_a_crash_in_its_middle) {
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
  Header& h = shard.header();
  const auto layout = Layout::of(h.capacity, h.row_stride, h.sketch_width);
  std::memcpy(reinterpret_cast<std::byte*>(&h) + layout.undo, shard.row_bytes(40), h.row_stride);
  h.push = {9, 1, 40};
  h.undo_mark = 40;
  h.undo_row = 41;
  h.busy = 1;
  std::memset(shard.row_bytes(40) + 30, 0x55, 8);
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
    shard.header().push = {9, 1, mine.size()};
    shard.header().busy = 1;
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
  Header& h = shard.header();
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
