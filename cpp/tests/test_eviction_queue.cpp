// The queue of rows to evict, compared with a search for the smallest (stamp, row).
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "persia/eviction_queue.hpp"
#include "persia/layout.hpp"

namespace {
long fail_in = 0;  // the allocation that fails; 0: none
}

void* operator new(std::size_t bytes) {
  if (fail_in > 0 && --fail_in == 0) throw std::bad_alloc();
  void* const found = std::malloc(bytes > 0 ? bytes : 1);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
// By default they call those above, but not with sanitizers.
void* operator new[](std::size_t bytes) { return operator new(bytes); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

using namespace persia;

namespace {

// The rows of a shard of some capacity, of which a queue chooses the one to evict.
struct Rows {
  Rows(std::uint64_t most, std::size_t run) : capacity(most), headers(most), queue(run) {}

  Stamps stamps() { return {reinterpret_cast<std::byte*>(headers.data()), sizeof(RowHeader), used}; }

  void touch(std::uint32_t row) {
    const std::uint32_t before = std::exchange(headers[row].stamp, clock);
    queue.touch(stamps(), clock, row, before);
  }

  std::uint32_t oldest() const {
    std::uint32_t found = 0;
    for (std::uint32_t row = 1; row < used; ++row) {
      if (headers[row].stamp < headers[found].stamp) found = row;
    }
    return found;
  }

  // The share of rows that are older than a new one.
  double older() {
    const std::uint32_t stamp = queue.midpoint(clock);
    const auto is_older = [&](const RowHeader& header) { return header.stamp < stamp; };
    return static_cast<double>(std::count_if(headers.begin(), headers.end(), is_older)) / static_cast<double>(capacity);
  }

  // Gives a row to a new id, and returns the number of rows that were read for it.
  std::uint64_t insert(bool check = true) {
    const std::uint64_t before = queue.read();
    if (used < capacity) {
      queue.prepare(stamps(), clock, capacity - used);
      headers[used++].stamp = midpoint ? queue.midpoint(clock) : clock;
    } else {
      const std::uint32_t row = queue.front(stamps(), clock);
      if (check) CHECK(row == oldest());
      queue.pop(stamps(), clock);
      headers[row].stamp = midpoint ? queue.midpoint(clock) : clock;
    }
    return queue.read() - before;
  }

  bool midpoint = false;
  std::uint64_t capacity;
  std::vector<RowHeader> headers;
  EvictionQueue queue;
  std::uint64_t used = 0;
  std::uint32_t clock = 0;
};

// Which rows a request touches.
enum class Pattern { kAny, kFew, kInTurn, kOldest };

std::uint32_t draw(Rows& rows, Pattern pattern, std::mt19937& random, std::uint32_t& turn) {
  const auto used = static_cast<std::uint32_t>(rows.used);
  switch (pattern) {
    case Pattern::kAny:
      return static_cast<std::uint32_t>(random() % used);
    case Pattern::kFew:
      return static_cast<std::uint32_t>(random() % (used / 8 + 1));
    case Pattern::kInTurn:
      return turn++ % used;
    case Pattern::kOldest:
      break;
  }
  return rows.oldest();
}

}  // namespace

void compare_with_a_search(bool midpoint) {
  std::mt19937 random(1);
  for (const std::size_t run : {std::size_t{1}, std::size_t{3}, std::size_t{16}, EvictionQueue::kRun}) {
    for (const std::uint64_t capacity : {1u, 2u, 7u, 20u, 100u, 600u, 1500u}) {
      // The search takes long, above all under sanitizers.
      if (capacity > (kSanitized ? 20 : 600) && run != EvictionQueue::kRun) continue;
      for (const Pattern pattern : {Pattern::kAny, Pattern::kFew, Pattern::kInTurn, Pattern::kOldest}) {
        for (const std::uint32_t new_in : {1u, 2u, 10u, 50u}) {  // one of this number of ids is new
          Rows rows(capacity, run);
          rows.midpoint = midpoint;
          std::uint32_t turn = 0;
          const std::uint32_t most = random() % 3 == 0 ? 1 : 40;
          for (std::uint64_t done = 0; done < 4 * capacity + 200;) {
            ++rows.clock;
            for (auto left = 1 + random() % most; left > 0; --left, ++done) {
              if (rows.used == 0 || random() % new_in == 0) {
                rows.insert();
              } else {
                rows.touch(draw(rows, pattern, random, turn));
              }
            }
          }
        }
      }
    }
  }
}

TEST(evicts_in_the_order_of_a_search) { compare_with_a_search(false); }

TEST(evicts_in_that_order_if_new_rows_are_as_old_as_others) { compare_with_a_search(true); }

TEST(a_new_row_is_older_than_most_others) {
  constexpr std::uint64_t kRows = 20000;
  for (const std::uint32_t new_in : {2u, 10u}) {
    std::mt19937 random(3);
    Rows rows(kRows, EvictionQueue::kRun);
    rows.midpoint = true;
    for (std::uint64_t evicted = 0; evicted < 4 * kRows;) {
      ++rows.clock;
      for (int i = 0; i < 100; ++i) {
        if (rows.used > 0 && random() % new_in != 0) {
          rows.touch(static_cast<std::uint32_t>(random() % rows.used));
        } else {
          evicted += rows.used == kRows;
          rows.insert(false);
        }
      }
      if (evicted > kRows) CHECK(rows.older() > 0.1 && rows.older() < 0.45);
    }
  }
}

// A sample of 512 rows, and then a few rows with each eviction.
TEST(no_eviction_waits_for_a_scan) {
  constexpr std::uint64_t kRows = 50000;
  for (const std::uint32_t new_in : {1u, 10u}) {
    std::mt19937 random(2);
    Rows rows(kRows, EvictionQueue::kRun);
    std::uint64_t samples = 0, most = 0, most_skipped = 0, evicted = 0;
    while (evicted < 5 * kRows) {
      ++rows.clock;
      for (int i = 0; i < 100; ++i) {
        if (rows.used > 0 && random() % new_in != 0) {
          rows.touch(static_cast<std::uint32_t>(random() % rows.used));
          continue;
        }
        evicted += rows.used == kRows;
        const std::uint64_t skipped = rows.queue.skipped(), read = rows.insert(false);
        most_skipped = std::max(most_skipped, rows.queue.skipped() - skipped);
        if (read == 512) {
          ++samples;
        } else {
          most = std::max(most, read);
        }
      }
    }
    CHECK(most <= 40);
    CHECK(most_skipped <= 40);
    CHECK(samples > 20 && samples < 200);
    CHECK(rows.queue.read() < (new_in == 1 ? 9 : 20) * evicted);
  }
}

// Whatever leaves the queue, evicted or touched, in any order: a request reads a few rows for each of its ids.
TEST(no_request_waits_for_a_scan_whatever_others_have_touched) {
  constexpr std::uint64_t kRows = 50000;
  constexpr std::uint32_t kRequest = 100;
  struct Mix {
    std::uint32_t touched;  // before each request that evicts
    std::uint32_t evicted;  // by it
    std::uint32_t place;    // in the order of eviction, of the first row that is touched
    bool backwards = false;
  };
  for (const Mix& mix :
       {Mix{3000, 1, 0}, Mix{3000, 10, 0}, Mix{100, 1, 0}, Mix{3000, 1, 1}, Mix{3000, 1, 3200}, Mix{500, 20, 3200},
        Mix{1000, 3, 1000}, Mix{3000, 100, 6000}, Mix{3000, 2, 4000, true}, Mix{6000, 50, 200, true}}) {
    Rows rows(kRows, EvictionQueue::kRun);
    while (rows.used < kRows) {
      ++rows.clock;
      for (std::uint32_t i = 0; i < kRequest; ++i) rows.insert(false);
    }
    std::vector<std::uint32_t> order(kRows);
    std::uint64_t most = 0, most_skipped = 0;
    const auto request = [&](auto&& work) {
      ++rows.clock;
      const std::uint64_t read = rows.queue.read(), skipped = rows.queue.skipped();
      work();
      most = std::max(most, rows.queue.read() - read);
      most_skipped = std::max(most_skipped, rows.queue.skipped() - skipped);
    };
    for (int round = 0; round < (kSanitized ? 60 : 300); ++round) {
      const auto older = [&](std::uint32_t a, std::uint32_t b) {
        return std::pair(rows.headers[a].stamp, a) < std::pair(rows.headers[b].stamp, b);
      };
      std::iota(order.begin(), order.end(), 0u);
      const auto first = order.begin() + mix.place, last = first + mix.touched;
      std::nth_element(order.begin(), last, order.end(), older);
      std::sort(order.begin(), last, older);  // The others are not looked at.
      if (mix.backwards) std::reverse(first, last);
      for (auto at = first; at < last; at += kRequest) {
        request([&] { std::for_each(at, at + kRequest, [&](std::uint32_t row) { rows.touch(row); }); });
      }
      request([&] {
        for (std::uint32_t i = 0; i < mix.evicted; ++i) rows.insert(i == 0);
      });
    }
    CHECK(most <= 40 * kRequest);
    CHECK(most_skipped <= EvictionQueue::kRun + 4 * kRequest);
  }
}

// The rows that are evicted during a scan are in all of its runs then, and so are those that are touched after it.
TEST(no_request_waits_for_a_scan_if_rows_leave_every_run_in_turn) {
  constexpr std::uint32_t kRows = 50000, kRequest = 100;
  for (const std::uint32_t stride : {7919u, 5557u, 12503u, 25001u}) {
    Rows rows(kRows, EvictionQueue::kRun);
    rows.clock = 1;
    while (rows.used < kRows) rows.insert(false);
    std::vector<std::uint32_t> order(kRows);
    for (std::uint32_t i = 0; i < kRows; ++i) {
      order[i] = static_cast<std::uint32_t>(std::uint64_t{i} * stride % kRows);
      ++rows.clock;
      rows.touch(order[i]);
    }
    std::uint32_t next = 0;
    const auto request = [&](bool evicts) {
      ++rows.clock;
      const std::uint64_t read = rows.queue.read(), skipped = rows.queue.skipped();
      for (std::uint32_t i = 0; i < kRequest; ++i, ++next) {
        if (evicts) {
          rows.insert(i == 0);
        } else {
          rows.touch(order[next]);
        }
      }
      CHECK(rows.queue.skipped() - skipped <= 8 * kRequest);
      return rows.queue.read() - read;
    };
    while (request(true) > 0 || next < kRows / 16) CHECK(next < kRows / 2);  // makes the queue
    while (request(true) == 0) CHECK(next < kRows / 2);
    while (request(true) > 0) CHECK(next < kRows / 2);  // a scan, which ends
    std::uint64_t most = 0;
    for (const std::uint32_t last = next + kRows / 6; next < last;) most = std::max(most, request(false));
    for (int i = 0; i < 10; ++i) most = std::max(most, request(true));
    CHECK(most > 0 && most <= 40 * kRequest);
  }
}

TEST(rows_that_are_only_touched_are_not_read) {
  constexpr std::uint32_t kRows = 5000;
  Rows rows(kRows, EvictionQueue::kRun);
  for (std::uint32_t i = 0; i < kRows + 1; ++i) {
    ++rows.clock;
    rows.insert(false);
  }
  const auto touch_all = [&] {
    ++rows.clock;
    for (std::uint32_t row = 0; row < kRows; ++row) rows.touch(row);
  };
  for (int round = 0; round < 2; ++round) touch_all();  // ends the scan that evictions have begun, and makes one more
  const std::uint64_t before = rows.queue.read();
  CHECK(before < 4 * kRows);
  for (int round = 0; round < 20; ++round) touch_all();
  CHECK(rows.queue.read() == before);
  for (int i = 0; i < 3; ++i) {
    ++rows.clock;
    rows.insert();
  }
}

TEST(a_batch_that_replaces_all_rows_reads_them_once) {
  Rows rows(2000, EvictionQueue::kRun);
  for (rows.clock = 1; rows.clock < 4; ++rows.clock) {
    const std::uint64_t before = rows.queue.read();
    for (int i = 0; i < 6000; ++i) rows.insert(i % 100 == 0);
    CHECK(rows.queue.read() - before <= 3 * 2000);
  }
}

TEST(a_dropped_queue_changes_no_order) {
  std::mt19937 random(3);
  Rows rows(700, 16);
  for (int i = 0; i < 8000; ++i) {
    if (random() % 3 == 0) ++rows.clock;
    rows.insert();
    if (random() % 4 == 0) rows.touch(static_cast<std::uint32_t>(random() % rows.used));
    if (random() % 100 == 0) {
      rows.queue.clear();
      if (random() % 2 == 0) rows.queue.make_ready(rows.stamps(), rows.clock, rows.capacity - rows.used);
    }
  }
}

TEST(a_queue_that_was_made_ready_leaves_no_scan_to_a_request) {
  constexpr std::uint64_t kRows = 20000, kRequest = 100;
  for (const std::uint64_t space : {std::uint64_t{0}, kRows / 20}) {
    Rows rows(kRows, EvictionQueue::kRun);
    while (rows.used < kRows - space) {
      ++rows.clock;
      for (std::uint64_t i = 0; i < kRequest; ++i) rows.insert(false);
    }
    rows.queue.clear();
    rows.queue.make_ready(rows.stamps(), rows.clock, space);
    for (int request = 0; request < 200; ++request) {
      ++rows.clock;
      const std::uint64_t before = rows.queue.read();
      for (std::uint64_t i = 0; i < kRequest; ++i) rows.insert(i == 0);
      CHECK(rows.queue.read() - before <= 40 * kRequest);
    }
  }
}

TEST(a_queue_is_not_made_ready_twice) {
  Rows rows(20000, EvictionQueue::kRun);
  for (rows.clock = 1; rows.used < 20000; ++rows.clock) rows.insert(false);
  for (int i = 0; i < 100; ++i, ++rows.clock) rows.insert();
  const std::uint64_t before = rows.queue.read();
  CHECK(before > 0);
  rows.queue.make_ready(rows.stamps(), rows.clock, 0);
  CHECK(rows.queue.read() == before);
}

TEST(a_queue_is_not_made_ready_while_there_is_space) {
  Rows rows(20000, EvictionQueue::kRun);
  for (rows.clock = 1; rows.used < 10000; ++rows.clock) rows.insert(false);
  rows.queue.clear();
  const std::uint64_t before = rows.queue.read();
  rows.queue.make_ready(rows.stamps(), rows.clock, rows.capacity - rows.used);
  CHECK(rows.queue.read() == before);
}

// As of a table that was cleared: its clock begins again.
TEST(a_dropped_queue_knows_no_clock_at_which_no_row_was_older) {
  Rows rows(10, EvictionQueue::kRun);
  rows.clock = 5;
  for (int i = 0; i < 30; ++i) rows.insert(i < 10);
  rows.queue.clear();
  for (std::uint32_t row = 0; row < 10; ++row) rows.headers[row].stamp = 1 + (row + 3) % 4;
  rows.insert();
}

TEST(without_memory_an_eviction_fails_before_it_changes_anything) {
  for (const bool dropped : {false, true}) {
    for (long failing = 1; failing < 60; ++failing) {
      std::mt19937 random(4);
      Rows rows(500, 4);
      for (int i = 0; i < 1500; ++i) {
        ++rows.clock;
        if (i == 450 + 3 * failing) fail_in = failing;
        if (fail_in > 0 && dropped) rows.queue.clear();
        try {
          rows.insert();
        } catch (const std::bad_alloc&) {
          rows.insert();
        }
        if (i % 3 == 0) rows.touch(static_cast<std::uint32_t>(random() % rows.used));
      }
      fail_in = 0;
    }
  }
}

TEST(without_memory_no_queue_is_made_ready) {
  long failed = 0;
  for (long failing = 1; failing < 60; ++failing) {
    Rows rows(500, 4);
    for (rows.clock = 1; rows.clock < 700; ++rows.clock) rows.insert(false);
    rows.queue.clear();
    fail_in = failing;
    rows.queue.make_ready(rows.stamps(), rows.clock, 0);
    if (fail_in == 0) ++failed;
    fail_in = 0;
    for (int i = 0; i < 100; ++i, ++rows.clock) rows.insert();
  }
  CHECK(failed >= 10 && failed < 59);
}

MAIN
