// A process dies at every point where it could leave something half done; another attaches to its regions, and goes on.
#pragma once
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"
#include "persia/memory.hpp"

namespace persia {

inline constexpr int kCrashed = 42;
inline constexpr std::uint32_t kShards = 2;

inline long crash_in = 0;
inline Store* crashing = nullptr;
// Rows of a table that are in memory; the others are on disk. 0: all of them.
inline std::uint64_t memory_rows = 0;

// Points from one crash to the next. Forks are slow with sanitizers, which look for other defects; without them a
// process dies at each point. Where rows move to disk each word is one. These tests have one thread: a detector of
// races finds nothing more at more points.
inline long stride() { return !kSanitized ? 1 : (memory_rows > 0 ? 29 : 5) * (kThreadSanitized ? 3 : 1); }

// Returns the first crash point of the next scenario. It moves from one scenario to the next, the same way in each run,
// so that between them scenarios of a kind die at more points than every stride()-th. The shortest one has 10 points.
inline long first_point() {
  static long scenarios = 0;
  return 1 + 7 * scenarios++ % std::min(stride(), 10L);
}

// In another order than that in which rows were made, and so lie.
inline Keys backwards(Keys keys) {
  std::reverse(keys.begin(), keys.end());
  return keys;
}

inline Keys operator+(Keys a, const Keys& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Leaves garbage wherever this process may have been writing when it died.
inline void scribble(Shard& shard) {
  Header& h = shard.memory().header;
  const auto layout = Layout::of(h.capacity, h.row_stride, h.sketch_width);  // without rows on disk
  const auto fill = [](void* at, std::size_t bytes) { std::memset(at, 0xA5, bytes); };
  const auto fill_row = [&](std::uint32_t row) {
    fill(shard.memory().store.row_bytes(row), h.row_stride);
    if (h.keeps_last_steps == 0 || h.tier.log != 0) return;
    fill(reinterpret_cast<std::byte*>(&h) + layout.last_steps + row * 4, 4);
  };
  if (h.undo_row != 0 && h.undo_mark == h.push.rows_applied) {
    fill_row(static_cast<std::uint32_t>(h.undo_row - 1));
  }
  if (h.removing != 0 && h.removing >> 32 == h.rows_used - 1) fill_row(static_cast<std::uint32_t>(h.removing));
  if (h.rows_used < h.rows_backed) fill_row(static_cast<std::uint32_t>(h.rows_used));
  for (std::uint64_t row = 0; h.tier.log != 0 && row < h.rows_used; ++row) {
    const auto number = static_cast<std::uint32_t>(row);
    auto* const bytes = shard.memory().store.row_bytes(number);
    if (reinterpret_cast<const RowHeader*>(bytes)->stamp != kVacant || h.tier.move_row == row + 1) continue;
    fill(bytes, offsetof(RowHeader, stamp));
    fill(bytes + sizeof(RowHeader), h.row_stride - sizeof(RowHeader));
  }
  if ((h.busy & kIndexBusy) != 0 && h.tier.log == 0) {
    fill(reinterpret_cast<std::byte*>(&h) + layout.index, 4096);
    if (h.index_old_slots != 0) h.index_frontier = 0xA5A5;
  }
  if (h.commit_slot != 0) fill(&h.clients[h.commit_slot - 1], sizeof(ClientEntry));
}

inline void maybe_die() {
  if (crash_in == 0 || --crash_in != 0) return;
  if (crashing->tables() > 0) {  // Else it dies attaching.
    for (std::uint32_t s = 0; s < kShards; ++s) scribble(crashing->shard(0, s));
  }
  _exit(kCrashed);
}

// A store with one table: in files, or for comparison in the memory of this process.
struct Tested {
  Tested(const std::string& directory, bool attach, std::uint64_t capacity, bool last_steps = true)
      : pool(1), store(pool) {
    TableConfig c = config_of(capacity, kShards);
    if (!directory.empty()) {
      c.files = {directory + "/t", attach, 5.0};
      if (memory_rows > 0) c.tier = {directory + "/spilled", memory_rows};
    }
    crashing = &store;
    store.create_table(c);
    if (last_steps) store.keep_last_steps(0);
  }

  void look(const Keys& keys) { persia::look(store, keys); }

  // The gradient of `bad`, if it is among the keys, is not finite, or in every other push its square is not.
  PushCounts push(const Keys& keys, std::uint64_t client, std::uint64_t sequence, std::uint64_t bad = ~0ull) {
    const std::size_t dim = row_shape.dim;
    std::vector<float> gradients(keys.size() * dim);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] =
          keys[i / dim] == bad ? (sequence % 2 == 0 ? INFINITY : 3e38f) : 0.01f * static_cast<float>(i % 17 + 1);
    }
    return persia::push(store, keys, gradients, {static_cast<std::uint32_t>(sequence), client, sequence});
  }

  void import(const Keys& keys, float value) {
    const std::vector<float> embeddings(keys.size() * row_shape.dim, value);
    const std::vector<float> states(keys.size() * store.table(0).state_width, 2 * value);
    const std::vector<std::uint32_t> words(keys.size(), 3);
    store.import_rows(0, keys.size(),
                      {keys.data(), embeddings.data(), states.data(), words.data(), words.data(), words.data()});
  }

  // By id: all of a row but its recency, which depends on how often something was tried.
  std::map<std::uint64_t, std::vector<float>> rows() {
    std::map<std::uint64_t, std::vector<float>> all;
    for (std::uint32_t s = 0; s < kShards; ++s) {
      RowBatch batch;
      for (std::uint64_t next = 0; next != Shard::kNoRow;) next = store.shard(0, s).export_rows(next, 1 << 20, batch);
      for (std::size_t i = 0; i < batch.ids.size(); ++i) {
        CHECK(shard_of(batch.ids[i], kShards) == s);
        auto& row = all[batch.ids[i]];
        CHECK(row.empty());
        const std::size_t dim = row_shape.dim, width = store.table(0).state_width;
        row.assign(batch.embeddings.begin() + i * dim, batch.embeddings.begin() + (i + 1) * dim);
        row.insert(row.end(), batch.states.begin() + i * width, batch.states.begin() + (i + 1) * width);
        row.push_back(static_cast<float>(batch.update_counts[i]));
        row.push_back(static_cast<float>(batch.last_steps[i]));
      }
    }
    CHECK(all.size() == store.size(0) || row_shape.ttl != 0);
    Keys ids;
    for (const auto& [id, row] : all) ids.push_back(id);
    std::vector<std::uint8_t> found(ids.size());
    store.peek(0, ids, found.data());
    for (const auto f : found) CHECK(f == 1);
    return all;
  }

  // By shard: ids as their rows lie, and as they would be evicted. All that eviction ever depends on.
  std::vector<Keys> order() {
    std::vector<Keys> all;
    for (std::uint32_t s = 0; s < kShards; ++s) {
      RowBatch batch;
      store.shard(0, s).export_rows(0, 1 << 20, batch);
      std::vector<std::size_t> rows(batch.ids.size());
      std::iota(rows.begin(), rows.end(), 0u);
      std::stable_sort(rows.begin(), rows.end(),
                       [&](std::size_t a, std::size_t b) { return batch.stamps[a] < batch.stamps[b]; });
      Keys& evicted = all.emplace_back();
      for (const std::size_t row : rows) evicted.push_back(batch.ids[row]);
      all.push_back(std::move(batch.ids));
    }
    return all;
  }

  ThreadPool pool;
  Store store;
};

// Runs in a separate process; whether it died at its `point`-th crash point.
inline bool dies(long point, const std::function<void()>& work) {
  const pid_t child = fork();
  if (child == 0) {
    crash_in = point;
    crash_hook = maybe_die;
    if (memory_rows > 0) word_hook = maybe_die;
    work();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kCrashed));
  return WEXITSTATUS(status) == kCrashed;
}

using Step = std::function<void(Tested&)>;

// Kills `step` at each of its crash points, and attaching after it at some of its own; what is there then must be what
// was there before or after `step`, row by row, and the same as without any kill, down to the order of eviction, once
// `step` has been repeated; with midpoint insertion to that order only if nothing has been evicted.
inline void crash_everywhere(std::uint64_t capacity, const Step& prepare, const Step& step) {
  Tested twin("", false, capacity);
  prepare(twin);
  const auto before = twin.rows();
  step(twin);
  const auto after = twin.rows();
  const auto order = twin.order();
  // A new process does not know which rows were looked at for one that has left, so others may be taken. Nor does it
  // know the last midpoint.
  const bool ordered = row_shape.ttl == 0 && memory_rows == 0 &&
                       (row_shape.eviction == Eviction::kLru || twin.store.counters(0).evicted == 0);
  const long first = first_point();
  long points = 0;
  for (long point = first;; point += stride()) {
    const Directory directory;
    const bool died = dies(0, [&] {
      Tested tested(directory.path, false, capacity);
      prepare(tested);
      crash_in = point;
      step(tested);
    });
    for (long attaching = 1; dies(attaching, [&] { Tested(directory.path, true, capacity); }); attaching *= 2) ++points;
    Tested tested(directory.path, true, capacity);
    const auto found = tested.rows();
    for (const auto& [id, row] : found) {
      CHECK((before.contains(id) && before.at(id) == row) || (after.contains(id) && after.at(id) == row));
    }
    for (const auto& [id, row] : before) CHECK(found.contains(id) || !after.contains(id));
    if (!died) CHECK(found == after);
    step(tested);
    CHECK(tested.rows() == after);
    CHECK(tested.order() == order || !ordered);
    CHECK(died || point > first);
    if (!died) break;
    ++points;
  }
  std::printf("  %ld crash points\n", points);
}

}  // namespace persia
