// The file of rows on disk: its segments, and a disk that is full.
#include <sched.h>
#include <sys/mount.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <vector>

#include "row_log_rows.hpp"

using namespace persia;

TEST(segments_are_used_again) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  const std::uint32_t of_segment = log.segment_records();
  std::vector<Numbers> segments;
  for (int s = 0; s < 6; ++s) segments.push_back(fill(log, of_segment, 80, 10000 * s));
  CHECK(log.oldest() == 0 && log.generation(0) == 1 && log.candidate() == RowLog::kNone);
  const std::uint64_t six = log.disk_bytes();
  const std::uint64_t lists = 4 * 4096;  // What a file system may take for its own list of the file's parts.
  CHECK(six >= 6 * 2 * 65536);
  release(log, segments[1]);
  release(log, segments[0]);
  CHECK(log.disk_bytes() + lists >= six && log.oldest() == 2);  // They keep their space ...
  release(log, segments[2]);
  CHECK(log.disk_bytes() <= six - 2 * 65536 + lists);  // ... up to a number.
  CHECK(log.generation(0) == 1 && log.generation(1) == 1 && log.generation(2) == 2);
  CHECK(fill(log, 1, 80).front() == 0 && log.generation(0) == 2 && log.end_record() == 6 * of_segment);
  CHECK(!log.full(0) && log.oldest() == 3);
  fill(log, of_segment - 1, 80);
  CHECK(log.full(0) && log.oldest() == 3);
  CHECK(fill(log, of_segment, 80).front() == of_segment);
  CHECK(fill(log, of_segment, 80, 77).front() == 2 * of_segment);
  CHECK(log.generation(2) == 3 && log.disk_bytes() + lists >= six);
  CHECK(holds(log, 2 * of_segment, 77, 80) && holds(log, 3 * of_segment, 30000, 80));
  for (int s = 3; s < 6; ++s) release(log, segments[s]);
  CHECK(log.oldest() == 0);
}

TEST(the_last_segment_is_left_for_compaction) {
  DiskReader reader;
  const Directory directory{temporary()};
  RowLog log = RowLog::create(options_in(directory, 80, 3), reader);
  const std::uint32_t of_segment = log.segment_records();
  fill(log, 2 * of_segment, 80);
  CHECK(log.exhausted());
  CHECK_THROWS(log.append(1, row_of(1, 80).data()), RegionFull);
  append(log, 1, 80);
  log.flush();
  for (std::uint32_t record = 0; record < of_segment; ++record) log.release(record);
  CHECK(log.next() == 2 * of_segment + 1 && log.exhausted());
  log.append(2, row_of(2, 80).data());  // In the segment that has been begun.
  for (std::uint32_t record = 0; record < of_segment; ++record) log.release(of_segment + record);
  CHECK(!log.exhausted());
}

TEST(numbers_run_out) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80, 3);
  RowLog log = RowLog::create(options, reader);
  const std::uint32_t of_segment = log.segment_records();
  const Numbers records = fill(log, 3 * of_segment - 10, 80);
  for (int i = 0; i < 10; ++i) append(log, 1, 80);
  CHECK(contains(message_of([&] { append(log, 1, 80); }), "all 4464 records are in use"));
  CHECK(log.next() == records.size() && log.candidate() == RowLog::kNone);
  fill(log, 10, 80, 5000);
  CHECK_THROWS(append(log, 1, 80), RegionFull);
  for (const std::uint32_t record : records) CHECK(holds(log, record, record + 1, 80));
  CHECK(holds(log, 3 * of_segment - 1, 5009, 80));
  log.release(2 * of_segment);
  CHECK(log.candidate() == RowLog::kNone);  // It would be copied for one record.
  for (std::uint32_t i = 1; i < of_segment / 8 + 1; ++i) log.release(2 * of_segment + i);
  CHECK(log.candidate() == 2);                      // An eighth suffices when no segment is left ...
  CHECK(log.candidate(2) == 2 && log.exhausted());  // ... also of one that would be spared else.
  release(log, Numbers(records.begin(), records.begin() + of_segment));
  CHECK(fill(log, 1, 80).front() == 0);
}

TEST(the_candidate_is_the_sparsest_once_a_third_is_dead) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80, 20);
  RowLog log = RowLog::create(options, reader);
  const std::uint32_t of_segment = log.segment_records();
  std::vector<Numbers> segments;
  for (int s = 0; s < 4; ++s) segments.push_back(fill(log, of_segment, 80));
  const Numbers writing = fill(log, of_segment / 2, 80);
  const auto release_of = [&](int s, std::uint32_t count) {
    for (; count > 0; --count) {
      log.release(segments[s].back());
      segments[s].pop_back();
    }
  };
  release_of(1, of_segment / 3);
  release_of(2, of_segment / 2);
  release(log, Numbers(writing.begin() + 1, writing.end()));
  CHECK(log.candidate() == RowLog::kNone);  // 5/6 of 4, and the one being written does not count
  release_of(3, of_segment / 2 + 1);
  CHECK(log.candidate() == 3);
  log.pin(3);
  CHECK(log.candidate() == RowLog::kNone);  // 5/6 of 3
  release_of(1, of_segment / 3);
  CHECK(log.candidate() == 1);
  log.unpin(3);
  CHECK(log.candidate() == 1);
}

TEST(pinned_segments_stay) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  const std::uint32_t of_segment = log.segment_records();
  const Numbers records = fill(log, of_segment, 80);
  log.pin(0);
  log.pin(0);
  release(log, records);
  for (int s = 1; s < 5; ++s) release(log, fill(log, of_segment, 80, 10000 * s));
  CHECK(log.generation(0) == 1 && holds(log, 7, 8, 80));
  log.clear();
  CHECK(fill(log, 1, 80).front() == of_segment && holds(log, 7, 8, 80));
  log.unpin(0);
  fill(log, of_segment - 1, 80);
  CHECK(fill(log, 1, 80).front() != 0 && holds(log, 7, 8, 80));
  log.unpin(0);
  fill(log, of_segment - 1, 80);
  CHECK(fill(log, 1, 80).front() == 0);
  log.pin(0);
  log.pin(3);
  log.unpin_all();
  log.clear();
  CHECK(fill(log, 1, 80).front() == 0);
}

TEST(clearing_frees_the_disk) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  fill(log, 5000, 80);
  append(log, 1, 80);
  const std::uint32_t generation = log.generation(0);
  log.clear();
  log.flush();
  CHECK(log.disk_bytes() <= 65536 && log.next() == 0 && log.live_records() == 0 && log.generation(0) > generation);
  CHECK(log.oldest() == RowLog::kNone && log.candidate() == RowLog::kNone && !log.live(0));
  read(log, {0, 4999});  // by one who does not know yet
  CHECK(fill(log, 5, 80) == (Numbers{0, 1, 2, 3, 4}) && holds(log, 4, 5, 80));
}

TEST(a_full_disk_changes_nothing) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  const std::uint32_t of_segment = log.segment_records();
  fill(log, of_segment - 5, 80);
  for (const auto access : {DiskAccess::kAllocate, DiskAccess::kWrite}) {
    for (const int error : {ENOSPC, EDQUOT, EIO}) {
      for (int i = 0; i < 2000; ++i) append(log, 999999, 80);
      fail_next(access, error, access == DiskAccess::kWrite ? 1 : 0);
      bool full = false;
      const std::string message = message_of([&] {
        try {
          log.flush();
        } catch (const RegionFull&) {
          full = true;
          throw;
        }
      });
      CHECK(contains(message, options.path) && full == (error != EIO));
      CHECK(!full || (contains(message, "free there: ") && contains(message, "Free space there")));
      CHECK(log.next() == of_segment - 5 && log.written_records() == of_segment - 5 && log.full(1));
      log.flush();  // Nothing is left to write.
      CHECK(log.next() == of_segment - 5);
    }
  }
  disk_hook = nullptr;
  const Numbers records = fill(log, 2000, 80, of_segment - 4);
  CHECK(records.front() == of_segment - 5 && log.next() == of_segment + 1995);
  for (std::uint32_t record = 0; record < log.next(); ++record) CHECK(holds(log, record, record + 1, 80));
  fail_next(DiskAccess::kRead, EIO);
  CHECK(contains(message_of([&] { read(log, {1, 2}); }), "Input/output error"));
  disk_hook = nullptr;
}

// In a separate mount namespace, of which nothing is left.
TEST(a_small_file_system_fills_and_has_room_again) {
  const Directory directory{temporary()};
  const int status = status_of_child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", directory.path.c_str(), "tmpfs", 0, "size=600k") != 0) {
      _exit(77);
    }
    DiskReader reader;
    const auto options = options_in(directory, 80, 100);
    RowLog log = RowLog::create(options, reader);
    std::vector<Numbers> parts;
    std::string message;
    while (message.empty()) {
      message = message_of([&] { parts.push_back(fill(log, 500, 80, 500 * parts.size() + 1)); });
    }
    CHECK(parts.size() >= 8 && contains(message, "no room to grow beyond 0 MiB (No space left on device"));
    for (const Numbers& part : parts) {
      for (const std::uint32_t record : part) CHECK(holds(log, record, record + 1, 80));
    }
    for (int i = 0; i < 3; ++i) release(log, parts[i]);
    const Numbers last = fill(log, 500, 80, 7777);
    CHECK(holds(log, last.front(), 7777, 80) && holds(log, parts[3].back(), parts[3].back() + 1, 80));
  });
  CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 77));
  if (WEXITSTATUS(status) == 77) std::printf("  skipped: needs root\n");
}

MAIN
