// The same of tables with rows on disk: a process dies at every word that it writes while rows move.
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "crashing.hpp"
#include "persia/disk_faults.hpp"

using namespace persia;

namespace {

// With this number of rows in memory.
void crash_with(std::uint64_t rows, const Step& prepare, const Step& step, std::uint64_t capacity = 10'000) {
  memory_rows = rows;
  crash_everywhere(capacity, prepare, step);
  memory_rows = 0;
}

void most_rows_spill(Tested& t) {
  t.look(range(0, 60));
  t.push(range(0, 60), 9, 1);
}

}  // namespace

TEST(a_lookup_that_spills) {
  crash_with(24, [](Tested& t) { t.look(range(0, 22)); }, [](Tested& t) { t.look(backwards(range(15, 35))); });
}

TEST(a_lookup_of_rows_on_disk) {
  crash_with(16, most_rows_spill, [](Tested& t) { t.look(backwards(range(0, 12))); });
}

TEST(a_push_to_rows_on_disk) {
  crash_with(16, most_rows_spill, [](Tested& t) { t.push(backwards(range(2, 10)) + range(50, 64), 9, 2, 5); });
}

TEST(rows_of_16_bits) {
  row_shape = {3, Dtype::kBfloat16, OptimizerKind::kRowwiseAdagrad};
  crash_with(24, [](Tested& t) { t.look(range(0, 22)); }, [](Tested& t) { t.look(backwards(range(15, 30))); });
  crash_with(16, most_rows_spill, [](Tested& t) { t.push(backwards(range(2, 10)) + range(50, 56), 9, 2, 5); });
  row_shape = {};
}

TEST(rows_that_spill_while_the_index_grows) {
  crash_with(
      20,
      [](Tested& t) {
        Keys keys;
        const auto grows = [&](std::uint32_t s) { return t.store.shard(0, s).memory().header.index_old_slots != 0; };
        for (std::uint64_t id = 0; !grows(0) || !grows(1); ++id) {
          if (!grows(shard_of(id, kShards))) t.look({id});
        }
      },
      [](Tested& t) { t.look(backwards(range(1000, 1010)) + range(0, 5)); });
}

TEST(compaction) {
  row_shape.dim = 1200;  // four records in a block, and one block in a segment
  row_shape.optimizer = OptimizerKind::kAdam;
  std::uint64_t compacted = 0;  // in the store without crashes, which comes first
  crash_with(
      6,
      [](Tested& t) {
        t.look(range(0, 40));
        for (std::uint64_t i = 0; i < 40; i += 10) t.look({i, i + 3, i + 5});  // some of each segment
      },
      [&](Tested& t) {
        const std::uint64_t before = t.store.tier_counts(0).compacted;
        for (std::uint64_t i = 0; i < 40; i += 8) t.look({i + 1, i + 7});
        compacted += t.store.tier_counts(0).compacted - before;
      },
      80);
  CHECK(compacted > 10);
  row_shape = {};
}

// Which rows are evicted depends on when they came to disk, so there is no twin in memory.
TEST(a_table_at_its_capacity) {
  constexpr std::uint64_t capacity = 24;
  Tested all("", false, 1000);
  all.look(range(0, 60));
  const auto values = all.rows();
  memory_rows = 6;
  long points = 0;
  for (bool died = true; died; ++points) {
    const Directory directory;
    died = dies(0, [&] {
      Tested t(directory.path, false, capacity);
      t.look(range(0, 30));
      crash_in = points + 1;
      t.look(backwards(range(40, 43)));
    });
    Tested t(directory.path, true, capacity);
    const auto check = [&] {
      const auto rows = t.rows();
      CHECK(rows.size() <= capacity && rows.size() >= capacity - 4);
      for (const auto& [id, row] : rows) CHECK(values.at(id) == row);
    };
    check();
    t.look(backwards(range(40, 43)));
    check();
    CHECK(t.rows().contains(41));
  }
  memory_rows = 0;
  std::printf("  %ld crash points\n", points - 1);
  CHECK(points > 30);
}

TEST(an_import_of_rows_on_disk_and_new_ones) {
  crash_with(
      12, [](Tested& t) { t.look(range(0, 40)); }, [](Tested& t) { t.import(range(5, 12) + range(60, 66), 0.5f); });
}

TEST(clearing_rows_on_disk) {
  crash_with(12, [](Tested& t) { t.look(range(0, 40)); }, [](Tested& t) { t.store.clear(0); });
}

// Leaves an index that has to be rebuilt: no process leaves it so, the memory failed. Rows of memory are found by
// themselves, those on disk by what is left. Returns whether each shard has vacant rows of memory.
bool damage_index(Tested& t) {
  bool all = true;
  for (std::uint32_t s = 0; s < kShards; ++s) {
    Shard& shard = t.store.shard(0, s);
    Header& h = shard.memory().header;
    const auto index = Layout::of(h.capacity, h.row_stride, h.sketch_width).index;
    const std::span slots(reinterpret_cast<std::uint64_t*>(reinterpret_cast<std::byte*>(&h) + index), h.index_slots);
    const auto in_memory = std::find_if(
        slots.begin(), slots.end(), [&](std::uint64_t slot) { return slot != 0 && (slot & kRowMask) < h.capacity; });
    CHECK(in_memory != slots.end());
    *in_memory = 0;
    bool vacant = false;
    for (std::uint32_t row = 0; row < h.rows_used; ++row) {
      vacant |= reinterpret_cast<const RowHeader*>(shard.memory().store.row_bytes(row))->stamp == kVacant;
    }
    all = all && vacant;
  }
  return all;
}

TEST(a_damaged_index_is_rebuilt) {
  memory_rows = 1600;
  Tested twin("", false, 10'000);
  twin.look(range(0, 3001));
  const Directory directory;
  {
    Tested t(directory.path, false, 10'000);
    t.look(range(0, 3001));
    CHECK(damage_index(t));  // A row that is taken twice would be two ids' at once.
  }
  Tested t(directory.path, true, 10'000);
  for (const auto& found : t.store.table(0).recovery) CHECK(found.rebuilt);
  CHECK(t.rows() == twin.rows());
  for (Tested* each : {&t, &twin}) {
    each->look(backwards(range(0, 300)) + range(4000, 4300));
    each->push(range(200, 400), 9, 1);
  }
  CHECK(t.rows() == twin.rows());
  memory_rows = 0;
}

// A store whose index is to be rebuilt, in which a process may have died doing so.
struct Damaged {
  Damaged() {
    memory_rows = 30;
    Tested t(directory.path, false, 10'000);
    t.look(range(0, 61));
    rows = t.rows();
    damage_index(t);
  }
  ~Damaged() { memory_rows = 0; }

  // Kills a process that attaches at one of its crash points. Returns whether it died.
  bool kill_at(long point) const {
    return dies(point, [&] { Tested(directory.path, true, 10'000); });
  }
  void check() const {
    Tested t(directory.path, true, 10'000);
    CHECK(t.rows() == rows);
    for (std::uint32_t s = 0; s < kShards; ++s) CHECK(access(slots(s).c_str(), F_OK) != 0);
  }
  std::string slots(std::uint32_t shard) const {
    return directory.path + "/spilled." + std::to_string(shard) + ".slots";
  }
  // Dies where the slots of shard 0 are in their file, and the index is being built.
  void die_while_building() const {
    for (long point = 1;; ++point) {
      CHECK(kill_at(point));
      if (rebuilding()) return;
    }
  }
  bool rebuilding() const {
    FILE* const file = std::fopen((directory.path + "/t.0").c_str(), "rb");
    CHECK(file != nullptr);
    Header header;
    CHECK(std::fread(static_cast<void*>(&header), sizeof(header), 1, file) == 1);
    std::fclose(file);
    return header.tier.rebuilding != 0;
  }

  Directory directory;
  std::map<std::uint64_t, std::vector<float>> rows;
};

TEST(a_process_dies_wherever_it_rebuilds_an_index) {
  long points = 0, torn = 0, left = 0;
  for (bool died = true; died; points += stride()) {
    const Damaged damaged;
    died = damaged.kill_at(points + 1);
    struct stat file{};
    if (stat(damaged.slots(0).c_str(), &file) == 0) {
      torn += !damaged.rebuilding();
      left += damaged.rebuilding();
    }
    for (long again = 1; damaged.kill_at(again); again *= 2) {
    }
    damaged.check();
  }
  std::printf("  %ld crash points, %ld in the file of slots, %ld after it\n", points - 1, torn, left);
  CHECK(kSanitized || (torn > 2 && left > 5));
}

int full_disk(DiskAccess access) { return access == DiskAccess::kWrite ? ENOSPC : 0; }
int failing_disk(DiskAccess access) { return access == DiskAccess::kWrite ? EIO : 0; }
int good_reads = 0;
int unreadable_disk(DiskAccess access) { return access == DiskAccess::kRead && good_reads-- <= 0 ? EIO : 0; }

TEST(a_full_disk_while_an_index_is_rebuilt) {
  const Damaged damaged;
  for (const bool is_full : {true, false}) {
    disk_hook = is_full ? full_disk : failing_disk;
    bool full = false;
    std::string what;
    try {
      Tested(damaged.directory.path, true, 10'000);
    } catch (const RegionFull& error) {
      full = true, what = error.what();
    } catch (const std::runtime_error& error) {
      what = error.what();
    }
    disk_hook = nullptr;
    CHECK(full == is_full);
    CHECK(what.find(is_full ? "no room for the index" : "cannot be written") != std::string::npos);
    CHECK(access(damaged.slots(0).c_str(), F_OK) != 0);  // It would take the space that is to be freed.
    CHECK(!damaged.rebuilding());
  }
  damaged.check();
}

TEST(a_file_of_slots_that_is_gone_cut_or_damaged_is_refused) {
  const Damaged damaged;
  damaged.die_while_building();
  const std::string path = damaged.slots(0), aside = damaged.directory.path + "/aside";
  const auto refused = [&] {
    try {
      Tested(damaged.directory.path, true, 10'000);
    } catch (const std::runtime_error& error) {
      const std::string what = error.what();
      return what.find(path) != std::string::npos && what.find("go on from a checkpoint") != std::string::npos;
    }
    return false;
  };
  bool unreadable = false;
  disk_hook = unreadable_disk;
  for (int before = 0; before < 10 && !unreadable; ++before) {  // Others are of the rows' file.
    good_reads = before;
    unreadable = refused();
  }
  disk_hook = nullptr;
  CHECK(unreadable);
  CHECK(std::rename(path.c_str(), aside.c_str()) == 0);
  CHECK(refused());
  CHECK(std::rename(aside.c_str(), path.c_str()) == 0);
  FILE* const file = std::fopen(path.c_str(), "r+b");
  CHECK(file != nullptr);
  std::vector<char> bytes(1 << 16);
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
  const auto write = [&](const std::vector<char>& changed) {
    CHECK(ftruncate(fileno(file), 0) == 0);
    std::rewind(file);
    if (!changed.empty()) CHECK(std::fwrite(changed.data(), 1, changed.size(), file) == changed.size());
    CHECK(std::fflush(file) == 0);
  };
  for (const std::size_t kept : {std::size_t{0}, std::size_t{9}, bytes.size() - 8, bytes.size() - 1}) {
    write({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(kept)});
    CHECK(refused());
  }
  for (const std::size_t at : {std::size_t{0}, std::size_t{5}, std::size_t{8}, bytes.size() - 3}) {
    std::vector<char> changed = bytes;
    changed[at] = static_cast<char>(changed[at] ^ 4);
    write(changed);
    CHECK(refused());
  }
  std::vector<char> longer = bytes;
  longer.resize(longer.size() + 8);
  write(longer);
  CHECK(refused());
  write(bytes);
  std::fclose(file);
  damaged.check();
}

TEST(rows_on_disk_that_have_left) {
  row_shape.ttl = 10;
  crash_with(
      8,
      [](Tested& t) {
        t.store.advance_clock(0, 0);
        t.look(range(0, 30));
        t.push(range(0, 30), 9, 1);
        for (int i = 0; i < 4; ++i) {
          t.store.advance_clock(0, 3);
          t.look(range(10, 14));
        }
        t.store.advance_clock(0, 3);
      },
      [](Tested& t) { t.look(backwards(range(5, 12)) + range(1000, 1005)); });
  row_shape = {};
}

MAIN
