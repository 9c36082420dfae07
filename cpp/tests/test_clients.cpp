// Requests of several clients to one table: each locks the shards that it is working in, and gets what it would get
// without the others.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"

using namespace persia;

namespace {

constexpr std::uint32_t kShards = 4;
constexpr std::uint64_t kCallers = 8;
constexpr std::chrono::seconds kDeadline(20);
// Ids of a request that one thread processes, and of one that the threads of a pool share.
constexpr std::uint64_t kFew = 300, kMany = 3000;

template <class Condition>
void wait_for(Condition&& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::yield();
  }
}

// A call in a thread of its own.
class Call {
 public:
  explicit Call(std::function<void()> work) : done_(std::async(std::launch::async, std::move(work))) {}
  bool ended(std::chrono::seconds within = {}) { return done_.wait_for(within) == std::future_status::ready; }

 private:
  std::future<void> done_;
};

Keys of_shards(const Keys& keys, const std::function<bool(std::uint32_t)>& chosen) {
  Keys some;
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(some),
               [&](auto id) { return chosen(shard_of(id, kShards)); });
  return some;
}

bool same_bytes(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Everything of a row but its stamp, as bytes: a word of two 16-bit values may be NaN as a float.
bool same_rows(Store& store, Store& twin, const Keys& keys) {
  std::vector<std::uint8_t> found(keys.size()), found_twin(keys.size());
  const RowBatch a = store.peek(0, keys, found.data()), b = twin.peek(0, keys, found_twin.data());
  return found == found_twin && same_bytes(a.embeddings, b.embeddings) && same_bytes(a.states, b.states) &&
         a.update_counts == b.update_counts && a.last_steps == b.last_steps;
}

TableConfig shared_config(const Directory* disk = nullptr) {
  TableConfig c = config_of(100'000, kShards);
  if (disk != nullptr) c.tier = {disk->path + "/t", 2000};
  return c;
}

// What a client does: lookups and pushes of any of its rows.
void train(Store& store, std::uint64_t client, const Keys& keys, std::uint64_t rounds) {
  std::mt19937_64 random(client);
  for (std::uint64_t round = 1; round <= rounds; ++round) {
    Keys some = keys;
    std::shuffle(some.begin(), some.end(), random);
    some.resize(random() % 4 == 0 ? keys.size() : random() % (keys.size() / 4));
    look(store, some);
    std::vector<float> gradients(some.size() * row_shape.dim);
    for (float& g : gradients) g = static_cast<float>(random() % 1000) / 1000.0f - 0.5f;
    const Origin origin{static_cast<std::uint32_t>(round), client + 1, round};
    CHECK(push(store, some, gradients, origin).applied == some.size());
    if (round % 3 == 0) CHECK(push(store, some, gradients, origin).duplicates == some.size());
    std::vector<std::uint32_t> steps(some.size());
    store.last_steps(0, some, steps.data());
    CHECK(std::all_of(steps.begin(), steps.end(), [&](std::uint32_t step) { return step == round; }));
  }
}

constexpr std::uint64_t kRounds = kSanitized ? 6 : 15;

}  // namespace

TEST(a_request_waits_for_its_own_shards_only) {
  for (const std::size_t threads : {1, 2}) {
    for (const std::uint64_t count : {kFew, kMany}) {
      ThreadPool pool(threads);
      Store store(pool);
      store.create_table(shared_config());
      const Keys others = of_shards(range(0, count), [](auto shard) { return shard != 0; });
      look(store, range(0, count));
      std::vector<std::uint32_t> steps(others.size());
      Shard* const first = &store.shard(0, 0);
      const Shard::ShardLocks held({&first, 1});
      Call call([&] {
        look(store, others);
        look(store, others, false);
        CHECK(push(store, others).applied == others.size());
        store.last_steps(0, others, steps.data());
      });
      CHECK(call.ended(kDeadline));
    }
  }
}

TEST(a_request_works_in_free_shards_while_it_waits) {
  for (const std::size_t threads : {1, 2}) {
    for (const std::uint64_t count : {kFew, kMany}) {
      ThreadPool pool(threads);
      Store store(pool), twin(pool);
      for (Store* s : {&store, &twin}) s->create_table(shared_config());
      const Keys keys = range(0, count);
      std::vector<float> rows;
      const auto shards = store.table(0).all;
      // The counters of the shards that are free, each of which is locked for it.
      const auto counted = [&](auto counter) {
        std::uint64_t sum = 0;
        for (std::uint32_t s = 0; s < kShards; ++s) sum += s == 1 ? 0 : shards[s]->counters().*counter;
        return sum;
      };
      const std::uint64_t elsewhere = of_shards(keys, [](auto shard) { return shard != 1; }).size();
      for (const auto counter : {&Counters::misses, &Counters::applied}) {
        auto held = std::make_unique<Shard::ShardLocks>(Shard::Shards(shards).subspan(1, 1));
        Call call([&] {
          if (counter == &Counters::misses) {
            rows = look(store, keys);
          } else {
            CHECK(push(store, keys, {1, 7, 1}).applied == keys.size());
          }
        });
        wait_for([&] { return counted(counter) == elsewhere; });
        CHECK(!call.ended());
        held.reset();
        CHECK(call.ended(kDeadline));
      }
      CHECK(same_bytes(rows, look(twin, keys)));
      push(twin, keys);
      CHECK(same_rows(store, twin, keys));
    }
  }
}

TEST(a_lookup_that_was_deferred_is_the_same_by_shard) {
  ThreadPool pool(1);
  Directory disk, disk_twin;
  Store store(pool), twin(pool);
  store.create_table(shared_config(&disk));
  twin.create_table(shared_config(&disk_twin));
  const Keys keys = range(0, 20'000), some = range(500, 1000);
  for (Store* s : {&store, &twin}) {
    for (std::uint64_t first = 0; first < keys.size(); first += 1000) look(*s, range(first, first + 1000));
  }
  std::vector<float> rows(some.size() * words_of(row_shape.dtype, row_shape.dim));
  std::vector<Shard::Deferred> deferred;
  const Slice slice{some.data(), nullptr, some.size()};
  deferred.push_back(Shard::lookup(Shard::ShardLocks(store.table(0).all), slice, rows.data(), true));
  CHECK(deferred[0].positions.size() == some.size());
  Shard::fetch(deferred);
  for (const auto& part : Shard::by_shard(std::move(deferred[0]))) {
    Shard::lookup_deferred(Shard::ShardLocks(part.shards), part, true);
  }
  CHECK(same_bytes(rows, look(twin, some)));
  CHECK(same_rows(store, twin, keys));
}

// Each has rows of its own, so that each row is what it would be if its client were alone.
TEST(clients_get_what_they_would_get_alone) {
  for_each_row_shape([] {
    for (const bool tiered : {false, true}) {
      for (const std::size_t threads : {1, 2}) {
        ThreadPool pool(threads), one(1);
        Directory disk;
        Store store(pool), twin(one);
        store.create_table(shared_config(tiered ? &disk : nullptr));
        twin.create_table(shared_config());
        for (Store* s : {&store, &twin}) s->keep_last_steps(0);
        const auto keys_of = [](std::uint64_t client) { return range(client * 2000, (client + 1) * 2000); };
        std::vector<std::thread> clients;
        for (std::uint64_t c = 0; c < kCallers; ++c) {
          clients.emplace_back([&, c] { train(store, c, keys_of(c), kRounds); });
        }
        for (auto& client : clients) client.join();
        for (std::uint64_t c = 0; c < kCallers; ++c) {
          train(twin, c, keys_of(c), kRounds);
          CHECK(same_rows(store, twin, keys_of(c)));
        }
        const Counters counted = store.counters(0), alone = twin.counters(0);
        CHECK(counted.hits == alone.hits && counted.misses == alone.misses && counted.admitted == alone.admitted);
        CHECK(counted.applied == alone.applied && counted.duplicates == alone.duplicates);
        CHECK(counted.evicted == 0 && counted.absent == 0);
      }
    }
  });
}

// All have the same rows, and all gradients are equal, so that a row depends on the number of its updates only.
TEST(no_update_of_a_shared_row_is_lost) {
  ThreadPool pool(2), one(1);
  Store store(pool), twin(one);
  for (Store* s : {&store, &twin}) s->create_table(shared_config());
  const auto work = [](Store& s, std::uint64_t client) {
    std::mt19937_64 random(client);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
      const std::uint64_t first = random() % 2000;
      const Keys keys = range(first, first + (random() % 2 == 0 ? kFew : kMany));
      look(s, keys);
      CHECK(push(s, keys, {1, client + 1, round}).applied == keys.size());
    }
  };
  std::vector<std::thread> clients;
  for (std::uint64_t c = 0; c < kCallers; ++c) clients.emplace_back(work, std::ref(store), c);
  for (auto& client : clients) client.join();
  for (std::uint64_t c = 0; c < kCallers; ++c) work(twin, c);
  CHECK(same_rows(store, twin, range(0, 2000 + kMany)));
  const Counters counted = store.counters(0), alone = twin.counters(0);
  CHECK(counted.applied == alone.applied && counted.lookups == alone.lookups && counted.misses == alone.misses);
}

MAIN
