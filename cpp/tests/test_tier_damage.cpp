// Rows on disk that cannot be read or written: what does not need them goes on, what needs them fails and says so.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "one_table.hpp"
#include "persia/disk_faults.hpp"
#include "persia/row_log.hpp"

using namespace persia;

namespace {

struct Tested {
  Tested(std::uint64_t capacity, std::uint64_t memory_rows) : pool(1), store(pool) {
    TableConfig c = config_of(capacity, 1);
    if (memory_rows > 0) c.tier = {directory.path + "/t", memory_rows};
    store.create_table(c);
  }

  // Changes a byte of the first block of the file, which has no name but that of its descriptor.
  void damage() const {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;
      const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
      if (gone || target.find(directory.path + "/") != 0) continue;
      const int file = open(entry.path().c_str(), O_RDWR);
      CHECK(file >= 0);
      constexpr off_t at = RowLog::kFileHeader + 1000;
      char byte = 0;
      CHECK(pread(file, &byte, 1, at) == 1);
      byte = static_cast<char>(byte ^ 1);
      CHECK(pwrite(file, &byte, 1, at) == 1 && fsync(file) == 0);
      close(file);
      return;
    }
    CHECK(false);
  }

  std::uint64_t unreadable() { return store.tier_counts(0).unreadable; }

  const Directory directory{temporary()};
  ThreadPool pool;
  Store store;
};

// The one row that was damaged, or none of these.
std::vector<std::uint64_t> lost_of(Store& store, const Keys& keys) {
  std::vector<std::uint64_t> lost;
  for (const std::uint64_t id : keys) {
    try {
      look(store, {id}, false);
    } catch (const std::runtime_error& error) {
      CHECK(std::string(error.what()).find("checkpoint") != std::string::npos);
      lost.push_back(id);
    }
  }
  return lost;
}

int unreadable_disk(DiskAccess access) { return access == DiskAccess::kRead ? EIO : 0; }

int writes_before = 0;
int write_that_fails(DiskAccess access) { return access == DiskAccess::kWrite && writes_before-- == 0 ? EIO : 0; }

}  // namespace

TEST(a_damaged_row_is_an_error_for_those_who_need_it_alone) {
  Tested tested(20'000, 500), twin(20'000, 0);
  for (Tested* each : {&tested, &twin}) {
    look(each->store, range(0, 5000));
    push(each->store, range(0, 5000), {1, 9, 1});
  }
  tested.damage();
  const auto lost = lost_of(tested.store, range(0, 5000));
  CHECK(lost.size() == 1);
  CHECK(tested.unreadable() == 1);
  CHECK_THROWS(look(tested.store, {lost[0]}), std::runtime_error);
  CHECK(tested.unreadable() == 2);
  CHECK_THROWS(push(tested.store, {lost[0]}, {2, 9, 2}), std::runtime_error);
  CHECK(tested.unreadable() == 3);
  for (std::uint64_t id = 0; id < 5000; id += 7) {
    if (id == lost[0]) continue;
    CHECK(look(tested.store, {id}) == look(twin.store, {id}));
  }
}

TEST(a_table_at_its_capacity_takes_new_rows_though_those_on_disk_longest_cannot_be_read) {
  Tested tested(20'000, 500);
  look(tested.store, range(0, 20'000));
  tested.damage();
  for (std::uint64_t from = 20'000; from < 60'000; from += 250) {
    look(tested.store, range(from, from + 250));
    CHECK(tested.store.size(0) <= 20'000);
  }
  CHECK(tested.unreadable() == 1);
  CHECK(tested.store.size(0) > 15'000);
  CHECK(lost_of(tested.store, range(59'000, 60'000)).empty());
  tested.store.clear(0);
  CHECK(tested.unreadable() == 0);
  look(tested.store, range(0, 10'000));
  CHECK(lost_of(tested.store, range(0, 10'000)).empty());
}

// Rows that were there before are lost first, as without it.
TEST(a_disk_that_cannot_be_read_for_a_while_leaves_no_trace) {
  Tested tested(20'000, 500), twin(20'000, 500);
  for (Tested* each : {&tested, &twin}) look(each->store, range(0, 20'000));
  disk_hook = unreadable_disk;
  for (int i = 0; i < 3; ++i) CHECK_THROWS(look(tested.store, range(20'000, 21'000)), std::runtime_error);
  disk_hook = nullptr;
  for (std::uint64_t from = 20'000; from < 60'000; from += 250) {
    for (Tested* each : {&tested, &twin}) look(each->store, range(from, from + 250));
  }
  CHECK(tested.unreadable() == 0);
  CHECK(tested.store.size(0) == twin.store.size(0));
  const auto there = [](Store& store, std::uint64_t from, std::uint64_t to) {
    std::vector<std::uint8_t> found(to - from);
    store.peek(0, range(from, to), found.data());
    return std::count(found.begin(), found.end(), 1);
  };
  CHECK(there(tested.store, 0, 40'000) == there(twin.store, 0, 40'000));
  CHECK(there(tested.store, 45'000, 60'000) == 15'000);
}

TEST(a_segment_that_cannot_be_read_is_not_compacted_again_and_again) {
  row_shape.dim = 64;
  Tested tested(20'000, 500);
  look(tested.store, range(0, 10'000));
  tested.damage();
  const auto lost = lost_of(tested.store, range(0, 10'000));
  CHECK(lost.size() == 1);
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    Keys keys;
    while (keys.size() < 400) {
      if (const std::uint64_t id = random() % 10'000; id != lost[0]) keys.push_back(id);
    }
    look(tested.store, keys);
  }
  const TierCounts counts = tested.store.tier_counts(0);
  CHECK(counts.unreadable == 2);  // Its segment, and the request of above.
  CHECK(counts.compacted > 0 && counts.compacted < 3 * counts.demoted);
  CHECK(lost_of(tested.store, range(0, 10'000)) == lost);
  row_shape = {};
}

TEST(a_write_that_fails_once_loses_nothing_and_sets_nothing_aside) {
  row_shape.dim = 64;
  int failures = 0, quiet = 0;
  for (int before = 0; before < 30; ++before) {
    Tested tested(4000, 100), twin(4000, 0);
    for (Tested* each : {&tested, &twin}) look(each->store, range(0, 2000));
    std::mt19937 random(1);
    writes_before = before;
    for (int i = 0; i < 120; ++i) {
      disk_hook = i < 80 ? nullptr : write_that_fails;  // By then, segments are compacted.
      Keys keys(100);
      for (auto& key : keys) key = random() % 2000;
      try {
        look(tested.store, keys);
      } catch (const std::runtime_error&) {
        ++failures;
        look(tested.store, keys);
      }
      look(twin.store, keys);
    }
    quiet += writes_before < 0;
    disk_hook = nullptr;
    CHECK(tested.unreadable() == 0);
    CHECK(look(tested.store, range(0, 2000)) == look(twin.store, range(0, 2000)));
  }
  std::printf("  %d faults, %d seen by a request\n", quiet, failures);
  CHECK(failures > 0 && quiet > failures);  // Some met compaction, which tries again later.
  row_shape = {};
}

MAIN
