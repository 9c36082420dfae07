// A process dies at every point where it could leave something half done; another attaches to its regions, and goes on.
#include <algorithm>
#include <array>
#include <iterator>

#include "crashing.hpp"

using namespace persia;

namespace {

bool grows(Tested& t, std::uint32_t shard) { return t.store.shard(0, shard).memory().header.index_old_slots != 0; }

// Inserts rows until the indices of all shards grow. Returns the ids.
Keys look_until_growing(Tested& t) {
  Keys keys;
  for (std::uint64_t id = 0; !grows(t, 0) || !grows(t, 1); ++id) {
    if (grows(t, shard_of(id, kShards))) continue;
    t.look({id});
    keys.push_back(id);
  }
  return keys;
}

// Returns the first ids of which `count` fall into each shard, in ascending order.
Keys evenly(std::uint64_t count) {
  Keys keys;
  std::array<std::uint64_t, kShards> counts{};
  for (std::uint64_t id = 0; keys.size() < kShards * count; ++id) {
    if (counts[shard_of(id, kShards)]++ < count) keys.push_back(id);
  }
  return keys;
}

constexpr std::uint64_t kNew = 1000;  // ids from here on are not among those

// Of 20 rows with a ttl of 10, 12 leave.
void some_rows_leave(Tested& t) {
  t.store.advance_clock(0, 0);
  t.look(range(0, 20));
  t.push(range(0, 20), 9, 1);
  t.store.advance_clock(0, 5);
  t.look(range(0, 8));
  t.store.advance_clock(0, 5);
  CHECK(t.rows().size() == 20);
  t.store.advance_clock(0, 5);
  CHECK(t.rows().size() == 8 && t.store.size(0) == 20);
}

}  // namespace

TEST(a_push) {
  crash_everywhere(
      100, [](Tested& t) { t.look(range(0, 60)); }, [](Tested& t) { t.push(backwards(range(0, 70)), 9, 1, 33); });
}

TEST(a_push_after_others) {
  crash_everywhere(
      100,
      [](Tested& t) {
        t.look(range(0, 60));
        for (std::uint64_t sequence = 1; sequence < 5; ++sequence) t.push(range(0, 60), 9, sequence);
        t.push(range(20, 40), 8, 1);
      },
      [](Tested& t) { t.push(backwards(range(10, 30)), 9, 5); });
}

TEST(a_lookup_that_inserts_and_grows_index_and_file) {
  crash_everywhere(5000, [](Tested& t) { t.look(range(0, 40)); }, [](Tested& t) { t.look(backwards(range(20, 120))); });
}

TEST(a_push_while_the_index_grows) {
  crash_everywhere(
      5000, [](Tested& t) { look_until_growing(t); }, [](Tested& t) { t.push(backwards(range(10, 30)), 9, 1); });
}

TEST(a_lookup_that_inserts_while_the_index_grows) {
  crash_everywhere(
      5000, [](Tested& t) { look_until_growing(t); }, [](Tested& t) { t.look(backwards(range(kNew, kNew + 25))); });
}

TEST(a_lookup_that_evicts_while_the_index_grows) {
  crash_everywhere(
      2 * 53,  // of 64 slots each, of which 51 may be in use
      [](Tested& t) {
        for (std::uint64_t id = kNew; t.store.size(0) < 2 * 53; ++id) {
          if (t.store.shard(0, shard_of(id, kShards)).size() < 53) t.look({id});
        }
        CHECK(grows(t, 0) && grows(t, 1));
      },
      [](Tested& t) { t.look(backwards(range(10, 30))); });
}

TEST(an_import_while_the_index_grows) {
  crash_everywhere(
      5000, [](Tested& t) { look_until_growing(t); }, [](Tested& t) { t.import(range(kNew - 5, kNew + 15), 0.5f); });
}

TEST(clearing_while_the_index_grows) {
  crash_everywhere(5000, [](Tested& t) { look_until_growing(t); }, [](Tested& t) { t.store.clear(0); });
}

TEST(an_index_that_was_cleared_while_it_grew_is_kept) {
  const Directory directory;
  {
    Tested t(directory.path, false, 5000);
    look_until_growing(t);
    t.store.clear(0);
    t.look(range(0, 40));
  }
  Tested t(directory.path, true, 5000);
  for (const auto& found : t.store.table(0).recovery) CHECK(!found.rebuilt);
  CHECK(t.rows().size() == 40);
}

TEST(growth_goes_on_after_attaching) {
  for (const bool killed : {false, true}) {
    const Directory directory;
    Keys keys;
    Tested twin("", false, 5000);
    keys = look_until_growing(twin);
    CHECK(dies(killed ? 30 : 0, [&] {
            Tested t(directory.path, false, 5000);
            const long kill = std::exchange(crash_in, 0);
            look_until_growing(t);
            crash_in = kill;
            t.push(keys, 9, 1);
          }) == killed);
    Tested t(directory.path, true, 5000);
    for (const auto& found : t.store.table(0).recovery) CHECK(!found.rebuilt);
    for (std::uint32_t s = 0; s < kShards; ++s) {
      const Header &mine = t.store.shard(0, s).memory().header, &same = twin.store.shard(0, s).memory().header;
      CHECK(grows(t, s) && mine.index_old_slots == same.index_old_slots);
      CHECK(mine.index_frontier == same.index_frontier && mine.index_slots == same.index_slots);
    }
    t.push(keys, 9, 1);
    twin.push(keys, 9, 1);
    CHECK(t.rows() == twin.rows());
    for (Tested* each : {&t, &twin}) {
      for (std::uint64_t id = kNew; grows(*each, 0) || grows(*each, 1); ++id) each->look({id});
      each->look(range(2 * kNew, 3 * kNew));
    }
    CHECK(t.rows() == twin.rows() && t.order() == twin.order());
  }
}

TEST(a_damaged_state_of_growth_is_mended_or_refused) {
  const auto damaged = [](const std::function<void(Header&)>& damage) {
    const Directory directory;
    std::map<std::uint64_t, std::vector<float>> rows;
    {
      Tested t(directory.path, false, 5000);
      look_until_growing(t);
      rows = t.rows();
      damage(t.store.shard(0, 1).memory().header);
    }
    Tested t(directory.path, true, 5000);
    CHECK(t.rows() == rows && !grows(t, 1));
    t.look(range(kNew, 2 * kNew));
    return t.store.table(0).recovery[1].rebuilt;
  };
  CHECK(damaged([](Header& h) { h.index_frontier = kRowMask / 4 * 3; }));
  CHECK(damaged([](Header& h) { h.index_old_slots = 0; }));  // as if it did not grow
  CHECK_THROWS(damaged([](Header& h) { h.index_old_slots = h.index_slots + Index::kLineSlots; }), std::runtime_error);
  CHECK_THROWS(damaged([](Header& h) { h.index_old_slots -= 1; }), std::runtime_error);
}

// Whatever is there does not become part of the index when it grows.
TEST(what_lies_behind_the_slots_is_cleared) {
  const Directory directory;
  {
    Tested t(directory.path, false, 5000);
    t.look(range(0, 80));
    Header& h = t.store.shard(0, 0).memory().header;
    const auto layout = Layout::of(h.capacity, h.row_stride, h.sketch_width);
    auto* slots = reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&h) + layout.index);
    CHECK(h.index_backed > h.index_slots + kIndexTail);
    std::fill(slots + h.index_slots + kIndexTail, slots + h.index_backed, 0xA5A5A5A5A5A5A5A5u);
  }
  Tested t(directory.path, true, 5000), twin("", false, 5000);
  twin.look(range(0, 80));
  for (Tested* each : {&t, &twin}) each->look(range(80, 4000));
  CHECK(t.rows() == twin.rows());
}

TEST(a_lookup_of_rows_that_have_left) {
  row_shape.ttl = 10;
  crash_everywhere(5000, some_rows_leave, [](Tested& t) { t.look(backwards(range(5, 12)) + range(kNew, kNew + 5)); });
  row_shape = {};
}

TEST(time_that_passes) {
  row_shape.ttl = 10;
  crash_everywhere(
      5000,
      [](Tested& t) {
        for (int i = 0; i < 20; ++i) {
          t.look(range(0, 4));
          t.store.advance_clock(0, 2);
        }
        t.look(range(4, 12));
        t.store.advance_clock(0, 1);
        t.look(range(0, 4));
        t.store.advance_clock(0, 10);
      },
      [](Tested& t) {
        t.look(range(0, 4));
        t.store.advance_clock(0, 1);
      });
  row_shape = {};
}

TEST(a_push_to_rows_that_have_left) {
  row_shape.ttl = 10;
  crash_everywhere(
      20,
      [](Tested& t) {
        t.look(range(0, 20));
        for (int i = 0; i < 4; ++i) {
          t.store.advance_clock(0, 3);
          t.look(range(0, 8));
        }
        t.store.advance_clock(0, 3);
      },
      [](Tested& t) { t.push(backwards(range(5, 12)), 9, 1); });
  row_shape = {};
}

TEST(a_lookup_that_evicts) {
  crash_everywhere(
      40,
      [](Tested& t) {
        t.look(range(0, 50));
        t.look(range(100, 106));
      },
      [](Tested& t) { t.look(backwards(range(30, 46))); });
}

// New rows begin as old as others, and their first gradients leave them so. Of the second ones, which are uses, a push
// that is repeated must not miss those that were applied before. Nothing is evicted, so the order is checked, too.
TEST(a_push_to_rows_inserted_at_the_midpoint) {
  row_shape.eviction = Eviction::kMidpoint;
  const Keys old = evenly(190), full = evenly(200);
  Keys inserted;
  std::set_difference(full.begin(), full.end(), old.begin(), old.end(), std::back_inserter(inserted));
  const Keys once(old.begin() + 100, old.begin() + 115), never(old.begin() + 200, old.begin() + 215);
  const Keys inserted_once(inserted.begin(), inserted.begin() + 10);
  crash_everywhere(
      kShards * 200,
      [&](Tested& t) {
        for (auto at = old.begin(); at != old.end(); at += 10) t.look(Keys(at, at + 10));
        for (std::uint32_t s = 0; s < kShards; ++s) CHECK(t.store.shard(0, s).memory().eviction.midpoint(~0u) != ~0u);
        t.look(inserted);
        t.push(once + inserted_once, 9, 1);
      },
      [&](Tested& t) {
        t.push(backwards(once + never + inserted), 9, 2, once[7]);
        CHECK(t.store.counters(0).evicted == 0);
      });
  row_shape = {};
}

// The scan from which the midpoint comes is lost with a process, so the order of those who come later may differ.
TEST(a_lookup_that_evicts_by_the_midpoint) {
  row_shape.eviction = Eviction::kMidpoint;
  crash_everywhere(
      80,
      [](Tested& t) {
        for (std::uint64_t id = 0; id < 90; id += 5) t.look(range(id, id + 5));
        t.push(range(0, 90), 9, 1);
        t.look(range(60, 70));
      },
      [](Tested& t) { t.look(backwards(range(65, 95))); });
  row_shape = {};
}

TEST(a_lookup_at_which_recency_is_numbered_anew) {
  crash_everywhere(
      40,
      [](Tested& t) {
        t.look(range(0, 40));
        t.import({100, 101}, 0.5f);
        t.look(range(7, 20));
        t.look(range(10, 30));
        for (std::uint32_t s = 0; s < kShards; ++s) t.store.shard(0, s).memory().header.clock = ~0u;
      },
      [](Tested& t) { t.look({5, 110, 9, 111, 112}); });
}

TEST(an_import) {
  crash_everywhere(100, [](Tested& t) { t.look(range(0, 30)); }, [](Tested& t) { t.import(range(20, 40), 0.5f); });
}

// Updates, insertions and evictions, and imports; odd dims, and state behind them that has 16 bits, or 32.
TEST(rows_of_16_bits) {
  const RowShape shapes[] = {{1, Dtype::kBfloat16, OptimizerKind::kAdam},
                             {3, Dtype::kBfloat16, OptimizerKind::kRowwiseAdagrad},
                             {5, Dtype::kFloat16, OptimizerKind::kSgd}};
  for (const RowShape& shape : shapes) {
    row_shape = shape;
    crash_everywhere(
        100,
        [](Tested& t) {
          t.look(range(0, 20));
          t.push(range(5, 20), 9, 1);
        },
        [](Tested& t) { t.push(backwards(range(0, 25)), 9, 2, 13); });
    crash_everywhere(
        16,
        [](Tested& t) {
          t.look(range(0, 20));
          t.push(range(5, 20), 9, 1);
          t.look(range(15, 20));
        },
        [](Tested& t) { t.look(backwards(range(17, 23))); });
    crash_everywhere(100, [](Tested& t) { t.look(range(0, 12)); }, [](Tested& t) { t.import(range(8, 16), 0.7f); });
  }
  row_shape = {};
}

// An odd dim, so that rows begin in the middle of a word.
TEST(rows_of_16_bits_that_move_leave_or_are_cleared) {
  row_shape = {3, Dtype::kBfloat16, OptimizerKind::kRowwiseAdagrad};
  crash_everywhere(
      5000, [](Tested& t) { look_until_growing(t); }, [](Tested& t) { t.push(backwards(range(10, 16)), 9, 1); });
  crash_everywhere(100, [](Tested& t) { t.look(range(0, 10)); }, [](Tested& t) { t.store.clear(0); });
  row_shape.ttl = 10;
  crash_everywhere(5000, some_rows_leave, [](Tested& t) { t.look(backwards(range(5, 9)) + range(kNew, kNew + 3)); });
  row_shape = {};
}

TEST(clearing) {
  crash_everywhere(100, [](Tested& t) { t.look(range(0, 30)); }, [](Tested& t) { t.store.clear(0); });
}

TEST(pushes_that_overlap_and_are_repeated_in_any_order) {
  const Keys keys = range(0, 40);
  Tested twin("", false, 100);
  twin.look(keys);
  for (std::uint64_t sequence = 1; sequence <= 3; ++sequence) twin.push(keys, 9, sequence);
  const auto expected = twin.rows();
  for (long first = 20; first < 100; first += 13) {
    for (long second = 20; second < 100; second += 17) {
      const Directory directory;
      CHECK(dies(0, [&] {
        Tested t(directory.path, false, 100);
        t.look(keys);
        crash_in = first;
        t.push(keys, 9, 1);
      }));
      // Another one of the same client comes first, and is interrupted too.
      CHECK(dies(0, [&] {
        Tested t(directory.path, true, 100);
        crash_in = second;
        t.push(keys, 9, 2);
      }));
      Tested t(directory.path, true, 100);
      t.push(keys, 9, 3);
      t.push(keys, 9, 1);
      t.push(keys, 9, 2);
      for (const auto& [id, row] : t.rows()) CHECK(row[2 * kDim] == 3.0f);
      CHECK(t.rows().size() == expected.size());
      CHECK(t.push(keys, 9, 1).duplicates == keys.size() && t.push(keys, 9, 2).duplicates == keys.size());
    }
  }
}

TEST(a_table_whose_creation_was_interrupted_is_refused) {
  for (long point = 1;; ++point) {
    const Directory directory;
    const bool died = dies(point, [&] { Tested(directory.path, false, 100, false); });
    if (!died) break;
    CHECK_THROWS(Tested(directory.path, true, 100), std::runtime_error);
    Tested anew(directory.path, false, 100);
    anew.look(range(0, 10));
    CHECK(anew.rows().size() == 10);
  }
}

MAIN
