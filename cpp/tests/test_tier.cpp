// Rows on disk: a table with little memory is compared with one that has all of its rows there.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"
#include "persia/disk_faults.hpp"

using namespace persia;

namespace {

// By id: embedding, state, update count and last step.
using Rows = std::map<std::uint64_t, std::vector<float>>;

void collect(const RowBatch& batch, Rows& rows, std::size_t width) {
  const std::size_t dim = row_shape.dim;
  for (std::size_t i = 0; i < batch.ids.size(); ++i) {
    auto& row = rows[batch.ids[i]];
    CHECK(row.empty());
    row.assign(batch.embeddings.begin() + i * dim, batch.embeddings.begin() + (i + 1) * dim);
    row.insert(row.end(), batch.states.begin() + i * width, batch.states.begin() + (i + 1) * width);
    row.push_back(static_cast<float>(batch.update_counts[i]));
    row.push_back(static_cast<float>(batch.last_steps[i]));
  }
}

struct Tested {
  // A table with `memory_rows` of its rows in memory, or all if it is 0.
  Tested(std::uint64_t capacity, std::uint32_t shards, std::uint64_t memory_rows, std::size_t threads = 1)
      : pool(threads), store(pool) {
    TableConfig c = config_of(capacity, shards);
    if (memory_rows > 0) c.tier = {directory.path + "/t", memory_rows};
    store.create_table(c);
    store.keep_last_steps(0);
  }

  std::uint32_t shards() const { return static_cast<std::uint32_t>(store.table(0).all.size()); }

  Rows rows(std::uint64_t part = 1 << 20) {
    Rows all;
    for (std::uint32_t s = 0; s < shards(); ++s) {
      for (std::uint64_t next = 0; next != Shard::kNoRow;) {
        RowBatch batch;
        next = store.shard(0, s).export_rows(next, part, batch);
        for (const auto id : batch.ids) CHECK(shard_of(id, shards()) == s);
        collect(batch, all, store.table(0).state_width);
      }
    }
    return all;
  }

  // Rows as `peek` reads them.
  Rows peeked(const Keys& ids) {
    std::vector<std::uint8_t> found(ids.size());
    const RowBatch batch = store.peek(0, ids, found.data());
    Rows all;
    collect(batch, all, store.table(0).state_width);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (found[i] == 0) all.erase(ids[i]);
    }
    return all;
  }

  void begin_snapshot(std::uint32_t epoch, std::uint32_t since) {
    for (Shard* shard : store.table(0).all) {
      shard->begin_snapshot({epoch, since, directory.path, 1 << 12, 1 << 16, false});
    }
  }

  // Reads a part of a snapshot of one shard; whether there may be more.
  bool export_snapshot(std::uint32_t shard, std::uint32_t epoch, Rows& rows) {
    RowBatch batch;
    const bool more = store.shard(0, shard).export_snapshot(epoch, 1, batch);
    collect(batch, rows, store.table(0).state_width);
    return more;
  }

  Directory directory{temporary()};
  ThreadPool pool;
  Store store;
};

class Script {
 public:
  explicit Script(std::uint32_t seed, std::uint64_t ids) : random_(seed), ids_(ids) {}

  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  // Some ids come more often than others, and some twice.
  Keys some(std::size_t most) {
    Keys keys(1 + below(most));
    for (auto& key : keys) key = below(2) == 0 ? below(ids_) : below(1 + ids_ / 8);
    return keys;
  }

  Keys distinct(std::size_t most) {
    Keys keys = some(most);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
  }

  std::vector<float> gradients(std::size_t count) {
    std::vector<float> all(count * row_shape.dim);
    for (auto& g : all) g = static_cast<float>(below(2001)) * 1e-3f - 1.0f;
    return all;
  }

 private:
  std::mt19937 random_;
  std::uint64_t ids_;
};

// The same requests to both; they must answer the same.
void step(Script& script, Tested& tested, Tested& twin, std::uint32_t number) {
  switch (script.below(9)) {
    case 0:
    case 1:
    case 2: {
      const Keys keys = script.some(40);
      CHECK(look(tested.store, keys) == look(twin.store, keys));
      break;
    }
    case 3: {
      const Keys keys = script.some(40);
      CHECK(look(tested.store, keys, false) == look(twin.store, keys, false));
      break;
    }
    case 4: {
      const Keys keys = script.some(20);
      CHECK(tested.peeked(script.distinct(1)).size() <= 1);
      std::vector<std::uint32_t> steps(keys.size()), same(keys.size());
      tested.store.last_steps(0, keys, steps.data());
      twin.store.last_steps(0, keys, same.data());
      CHECK(steps == same);
      break;
    }
    case 5: {
      const Keys keys = script.distinct(10);
      for (Tested* each : {&tested, &twin}) set(each->store, keys, 0.125f, number);
      break;
    }
    default: {
      const Keys keys = script.some(40);
      const auto gradients = script.gradients(keys.size());
      const Origin origin{number, script.below(2) == 0 ? 0 : 9u, number};
      const PushCounts counts = push(tested.store, keys, gradients, origin);
      const PushCounts expected = push(twin.store, keys, gradients, origin);
      CHECK(counts.applied == expected.applied && counts.absent == expected.absent);
    }
  }
}

std::uint64_t on_disk(Tested& tested) { return tested.store.tier_counts(0).rows; }

}  // namespace

TEST_OF_ONE_THREAD(no_row_is_lost_or_changed) {
  const RowShape shapes[] = {{},
                             {1, Dtype::kBfloat16, OptimizerKind::kAdam},
                             {16, Dtype::kFloat16, OptimizerKind::kRowwiseAdagrad},
                             {33, Dtype::kFloat32, OptimizerKind::kSgd}};
  for (const RowShape& shape : shapes) {
    row_shape = shape;
    for (const std::uint32_t shards : {1u, 4u}) {
      for (const std::uint64_t memory : {4u, 40u, 200u}) {
        Tested tested(100'000, shards, memory), twin(100'000, shards, 0);
        Script script(static_cast<std::uint32_t>(memory + shards), 600);
        for (std::uint32_t i = 1; i <= 400; ++i) step(script, tested, twin, i);
        const Rows expected = twin.rows();
        CHECK(tested.rows() == expected && tested.rows(7) == expected);
        CHECK(tested.peeked(range(0, 700)) == twin.peeked(range(0, 700)));
        CHECK(tested.store.size(0) == twin.store.size(0) && tested.store.counters(0).evicted == 0);
        CHECK(on_disk(tested) > 0 && tested.store.size(0) - on_disk(tested) <= memory);
        const Counters mine = tested.store.counters(0), same = twin.store.counters(0);
        CHECK(mine.lookups == same.lookups && mine.hits == same.hits && mine.admitted == same.admitted);
      }
    }
  }
  row_shape = {};
}

TEST_OF_ONE_THREAD(a_request_of_more_rows_than_memory) {
  Tested tested(10'000, 1, 3), twin(10'000, 1, 0);
  for (std::uint32_t i = 1; i <= 5; ++i) {
    const Keys keys = range(i * 10, i * 10 + 100);
    CHECK(look(tested.store, keys) == look(twin.store, keys));
    push(tested.store, keys, {i, 9, i});
    push(twin.store, keys, {i, 9, i});
  }
  CHECK(tested.rows() == twin.rows());
}

TEST_OF_ONE_THREAD(rows_of_a_request_larger_than_memory_leave_in_blocks) {
  Tested tested(100'000, 1, 4000);
  look(tested.store, range(0, 40'001));
  const std::uint64_t demoted = tested.store.tier_counts(0).demoted;
  CHECK(demoted > 36'001 && demoted < 37'000);  // More than had to: the last block leaves vacant rows.
  CHECK(tested.rows().size() == 40'001);
}

TEST(threads_share_the_rows) {
  Tested tested(100'000, 8, 300, 2), twin(100'000, 8, 0);
  const auto work = [&](Store& store, std::uint64_t thread) {
    Script script(static_cast<std::uint32_t>(thread), 1000);
    for (std::uint32_t i = 1; i <= 150; ++i) {
      Keys keys = script.distinct(60);
      for (auto& key : keys) key = key * 4 + thread;
      look(store, keys);
      look(store, keys, false);
      push(store, keys, script.gradients(keys.size()), {i, 10 + thread, i});
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) threads.emplace_back([&, t] { work(tested.store, t); });
  for (auto& thread : threads) thread.join();
  for (std::uint64_t t = 0; t < 4; ++t) work(twin.store, t);
  CHECK(tested.rows() == twin.rows());
}

TEST_OF_ONE_THREAD(a_snapshot_sees_each_row_once) {
  for (const std::uint64_t memory : {4u, 60u}) {
    Tested tested(100'000, 2, memory), twin(100'000, 2, 0);
    Script script(static_cast<std::uint32_t>(memory), 700);
    Rows saved;  // what increments add up to
    std::uint32_t number = 1;
    for (std::uint32_t epoch = 2; epoch < 12; ++epoch) {
      for (int i = 0; i < 60; ++i) step(script, tested, twin, number++);
      const Rows expected = twin.rows();
      const std::uint32_t since = epoch == 2 || epoch % 4 == 0 ? 0 : epoch - 1;
      tested.begin_snapshot(epoch, since);
      Rows found;
      for (std::uint32_t s = 0; s < 2; ++s) {
        for (int i = 0; i < 8; ++i) step(script, tested, twin, number++);  // before the rows of memory are read
        while (tested.export_snapshot(s, epoch, found)) step(script, tested, twin, number++);
      }
      for (Shard* shard : tested.store.table(0).all) shard->end_snapshot();
      if (since == 0) saved.clear();
      for (auto& [id, row] : found) {
        CHECK(expected.contains(id) && expected.at(id) == row);
        saved[id] = row;
      }
      CHECK(saved == expected);
    }
  }
}

TEST_OF_ONE_THREAD(an_increment_leaves_out_what_has_not_changed) {
  Tested tested(100'000, 1, 50);
  look(tested.store, range(0, 1000));
  for (const std::uint32_t epoch : {2u, 3u}) {
    tested.begin_snapshot(epoch, epoch == 2 ? 0 : 2);
    Rows found;
    while (tested.export_snapshot(0, epoch, found)) {
    }
    tested.store.shard(0, 0).end_snapshot();
    CHECK(found.size() == (epoch == 2 ? 1000 : 0));
  }
  push(tested.store, range(100, 105));
  set(tested.store, range(105, 110), 0.5f, 1);
  look(tested.store, range(2000, 2100));
  tested.begin_snapshot(4, 3);
  Rows found;
  while (tested.export_snapshot(0, 4, found)) {
  }
  // Rows of memory that went to disk meanwhile have not changed.
  CHECK(found.size() == 110);
}

TEST_OF_ONE_THREAD(the_space_of_dead_records_is_used_again) {
  row_shape.dim = 64;
  Tested tested(20'000, 1, 500), twin(20'000, 1, 0);
  Script script(3, 10'000);
  for (Tested* each : {&tested, &twin}) look(each->store, range(0, 10'000));
  for (std::uint32_t i = 1; i <= 400; ++i) {
    const Keys keys = script.distinct(400);
    const auto gradients = script.gradients(keys.size());
    for (Tested* each : {&tested, &twin}) {
      look(each->store, keys);
      push(each->store, keys, gradients, {i, 9, i});
    }
  }
  const TierCounts counts = tested.store.tier_counts(0);
  CHECK(tested.rows() == twin.rows());
  CHECK(counts.compacted > 0 && counts.demoted > 50'000);
  const double bytes = 10'000.0 * (8 + sizeof(RowHeader) + 2 * 64 * 4);
  CHECK(static_cast<double>(counts.disk_bytes) < 2.5 * bytes);
  CHECK(static_cast<double>(counts.demoted + counts.compacted) < 2.5 * static_cast<double>(counts.demoted));
  row_shape = {};
}

TEST_OF_ONE_THREAD(a_table_at_its_capacity_evicts_what_was_on_disk_longest) {
  Tested tested(2000, 1, 100);
  for (std::uint64_t from = 0; from < 20'000; from += 50) {
    look(tested.store, range(from, from + 50));
    CHECK(tested.store.size(0) <= 2000);
  }
  CHECK(tested.store.size(0) > 1000 && tested.store.counters(0).evicted == 20'000 - tested.store.size(0));
  const Rows rows = tested.rows();
  CHECK(rows.size() == tested.store.size(0) && rows.begin()->first >= 20'000 - 2000);
}

// Requests that meet all rows alike leave the oldest segment the emptiest one.
TEST_OF_ONE_THREAD(a_full_table_goes_on) {
  for (const std::uint64_t ids : {10'980u, 12'000u}) {
    Tested tested(12'000, 1, 1000);
    look(tested.store, range(0, ids));
    std::mt19937 random(1);
    for (int i = 0; i < 400; ++i) {
      Keys keys(200);
      for (auto& key : keys) key = random() % ids;
      look(tested.store, keys);
    }
    const TierCounts counts = tested.store.tier_counts(0);
    CHECK(counts.compacted < 4 * counts.demoted);
    CHECK(tested.rows().size() == tested.store.size(0) && tested.store.size(0) > ids - 500);
  }
}

// Both have most of their rows on disk when a snapshot begins, and nearly all of them change while it is open.
TEST_OF_ONE_THREAD(training_goes_on_though_a_snapshot_keeps_records) {
  for (const bool lost : {false, true}) {
    const std::uint64_t ids = lost ? 11'990 : 10'500;
    Tested tested(12'000, 1, lost ? 100 : 1000), twin(20'000, 1, 0);
    for (Tested* each : {&tested, &twin}) look(each->store, range(0, ids));
    const Rows before = twin.rows();
    tested.begin_snapshot(2, 0);
    std::mt19937 random(1);
    for (std::uint32_t i = 1; i <= 400; ++i) {
      Keys keys(200);
      for (auto& key : keys) key = random() % ids;
      for (Tested* each : {&tested, &twin}) {
        look(each->store, keys);
        push(each->store, keys, {i, 9, i});
      }
    }
    Rows found;
    const auto read = [&](std::uint32_t epoch) {
      while (tested.export_snapshot(0, epoch, found)) {
      }
    };
    if (lost) {
      CHECK_THROWS(read(2), std::runtime_error);
    } else {
      read(2);
      CHECK(found == before);
    }
    tested.store.shard(0, 0).end_snapshot();
    CHECK(tested.rows() == twin.rows());
    tested.begin_snapshot(3, 0);
    found.clear();
    read(3);
    CHECK(found == twin.rows());
  }
}

TEST_OF_ONE_THREAD(a_small_table_keeps_to_its_capacity) {
  Tested tested(30, 1, 10);
  for (std::uint64_t id = 0; id < 500; ++id) {
    look(tested.store, {id});
    CHECK(tested.store.size(0) <= 30);
    CHECK(tested.rows().contains(id));
  }
}

TEST_OF_ONE_THREAD(rows_that_have_left_leave_the_disk) {
  row_shape.ttl = 10;
  Tested tested(100'000, 2, 40), twin(100'000, 2, 0);
  Script script(5, 3000);
  for (std::uint32_t i = 1; i <= 500; ++i) {
    step(script, tested, twin, i);
    if (i % 10 != 0) continue;
    tested.store.advance_clock(0, 1);
    twin.store.advance_clock(0, 1);
    CHECK(tested.rows() == twin.rows());
  }
  for (Tested* each : {&tested, &twin}) each->store.advance_clock(0, 20);
  CHECK(tested.rows() == twin.rows() && tested.rows().empty());
  look(tested.store, range(10'000, 20'000));
  CHECK(tested.rows().size() == 10'000 && tested.store.size(0) < 14'000);
  row_shape = {};
}

TEST_OF_ONE_THREAD(imported_rows_go_to_disk_too) {
  Tested tested(100'000, 2, 30), twin(100'000, 2, 0);
  const Keys keys = range(0, 500);
  const std::vector<float> embeddings(keys.size() * kDim, 0.25f), states(keys.size() * kDim, 2.0f);
  std::vector<std::uint32_t> words(keys.size());
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<std::uint32_t>(i * 7 % 500);
  const RowView view{keys.data(), embeddings.data(), states.data(), words.data(), words.data(), words.data()};
  for (Tested* each : {&tested, &twin}) {
    look(each->store, range(400, 900));
    each->store.import_rows(0, keys.size(), view);
    look(each->store, range(100, 120));
  }
  CHECK(tested.rows() == twin.rows());
  tested.store.clear(0);
  CHECK(tested.store.size(0) == 0 && tested.rows().empty() && on_disk(tested) == 0);
  twin.store.clear(0);
  for (Tested* each : {&tested, &twin}) look(each->store, range(0, 200));
  CHECK(tested.rows() == twin.rows());
}

TEST_OF_ONE_THREAD(recency_is_numbered_anew) {
  Tested tested(100'000, 1, 20), twin(100'000, 1, 0);
  for (Tested* each : {&tested, &twin}) {
    look(each->store, range(0, 100));
    push(each->store, range(30, 60), {1, 9, 1});
    each->store.shard(0, 0).memory().header.clock = ~0u;
    look(each->store, range(50, 120));
    push(each->store, range(0, 120), {2, 9, 2});
  }
  CHECK(tested.rows() == twin.rows());
}

TEST_OF_ONE_THREAD(the_last_clock_is_no_mark_of_vacant_rows) {
  for (const std::uint64_t memory : {0u, 12u}) {
    Tested tested(100'000, 1, memory);
    tested.store.shard(0, 0).memory().header.clock = kVacant - 3;
    for (const auto& keys : {range(0, 5), range(0, 5), range(0, 5), range(5, 10)}) look(tested.store, keys);
    CHECK(tested.rows().size() == 10);
    const std::vector<std::uint32_t> late{kVacant};
    const std::vector<float> values(kDim, 1.0f);
    const Keys one{77};
    tested.store.import_rows(0, 1, {one.data(), values.data(), values.data(), late.data(), late.data(), late.data()});
    look(tested.store, {78});
    CHECK(tested.rows().size() == 12);
  }
}

// Reads of the disk, each of many records; the first `failing` of them fail.
std::atomic<int> disk_reads, failing;

int count_reads(DiskAccess access) {
  if (access != DiskAccess::kRead) return 0;
  ++disk_reads;
  return failing-- > 0 ? EIO : 0;
}

TEST(a_lookup_reads_the_rows_of_all_tables_and_shards_at_once) {
  for (const std::size_t threads : {1u, 2u}) {
    const Directory directory{temporary()};
    ThreadPool pool(threads);
    Store store(pool), twin(pool);
    for (const char* name : {"a", "b", "c"}) {
      TableConfig c = config_of(100'000, 8);
      c.name = name;
      twin.create_table(c);
      c.tier = {directory.path + "/" + name, 80};
      store.create_table(c);
    }
    const auto look_up = [](Store& from, std::uint64_t first, std::uint64_t end, bool train) {
      const Keys keys = range(first, end);
      std::vector<float> out(3 * keys.size() * row_shape.dim);
      std::vector<std::uint8_t> found(3 * keys.size(), 7);
      std::vector<LookupRequest> requests;
      for (std::size_t t = 0; t < 3; ++t) {
        const std::size_t at = t * keys.size();
        requests.push_back({t, keys.data(), keys.size(), out.data() + at * row_shape.dim, found.data() + at});
      }
      from.lookup(requests, train);
      // Only readers ask which ids have a row; it may be in memory or on disk.
      for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == (train ? 7 : keys[i % keys.size()] < 2000));
      return out;
    };
    for (const bool train : {true, false}) {
      for (const int errors : {0, 1}) {
        CHECK(look_up(store, 0, 2000, true) == look_up(twin, 0, 2000, true));
        disk_hook = count_reads;
        disk_reads = 0;
        failing = errors;
        const auto rows = look_up(store, 100, 500, train);
        disk_hook = nullptr;
        CHECK(rows == look_up(twin, 100, 500, train));
        if (!train) CHECK(look_up(store, 1900, 2100, false) == look_up(twin, 1900, 2100, false));
        // If one file cannot be read, each is tried by itself.
        CHECK(disk_reads == (errors == 0 ? 1 : 1 + 3 * 8));
      }
    }
  }
}

TEST_OF_ONE_THREAD(a_table_of_more_memory_than_capacity_is_refused) {
  CHECK_THROWS(Tested(100, 1, 101), std::invalid_argument);
  CHECK_THROWS(Tested(100, 4, 3), std::invalid_argument);
  CHECK_THROWS(Tested(kMaxRows, 1, 100), std::invalid_argument);
}

MAIN
