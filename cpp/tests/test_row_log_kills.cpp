// The file of rows on disk, killed, and read while it changes.
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "row_log_rows.hpp"

using namespace persia;

namespace {

// What a process shares with the one that it will kill.
struct Shared {
  std::atomic<std::uint64_t> next, rounds;
  std::atomic<std::uint64_t> seeds[1 << 15];  // by record; 0: not in use

  static Shared* map() {
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    return static_cast<Shared*>(at);
  }
  static void unmap(Shared* shared) { munmap(shared, sizeof(Shared)); }
};

// Appends, commits and releases rows as a shard does, until killed.
void work_until_killed(const RowLog::Options& options, Shared& shared, std::uint64_t rounds) {
  DiskReader reader;
  RowLog log = RowLog::create(options, reader);
  std::mt19937 random(5);
  std::uint64_t seed = 0;
  Numbers live;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> appended;
    for (std::size_t i = random() % (2 * RowLog::block_records(options.row_bytes)) + 1; i > 0; --i) {
      ++seed;
      appended.emplace_back(append(log, seed, options.row_bytes), seed);
    }
    log.flush();
    shared.next = log.next();
    for (const auto& [record, of] : appended) {
      shared.seeds[record] = of;
      log.revive(record);
      live.push_back(record);
    }
    // The oldest leave, so that segments are used again.
    const std::size_t keep = 3 * log.segment_records();
    for (std::size_t i = 0; i + keep < live.size(); ++i) {
      shared.seeds[live[i]] = 0;
      log.release(live[i]);
    }
    if (live.size() > keep) live.erase(live.begin(), live.end() - static_cast<std::ptrdiff_t>(keep));
    shared.rounds = round + 1;
  }
}

// Attaches to what a killed process has left. Returns the number of rows, all of which must be there.
std::size_t check_after_kill(const RowLog::Options& options, const Shared& shared) {
  DiskReader reader;
  RowLog::Options patient = options;
  patient.lock_seconds = 5;
  RowLog log = RowLog::attach(patient, shared.next, reader);
  Numbers records;
  for (std::uint32_t record = 0; record < options.max_records; ++record) {
    if (shared.seeds[record] != 0) records.push_back(record);
  }
  for (const std::uint32_t record : records) log.revive(record);
  Bytes bytes = read(log, records);
  for (std::size_t i = 0; i < records.size(); ++i) {
    CHECK(holds(log, records[i], bytes.data() + i * log.record_bytes(), shared.seeds[records[i]], options.row_bytes));
  }
  // And it goes on.
  for (const std::uint32_t record : fill(log, 3, options.row_bytes, 1 << 20)) CHECK(shared.seeds[record] == 0);
  return records.size();
}

long crash_in = 0;
std::string crash_path;
const Shared* crash_shared = nullptr;
const RowLog::Options* crash_options = nullptr;

// Dies, leaving garbage behind the last record that was committed: a torn write.
void die_torn() {
  if (--crash_in != 0) return;
  const std::uint64_t next = crash_shared->next;
  const std::size_t of_block = RowLog::block_records(crash_options->row_bytes);
  if (next % of_block != 0) {
    const auto last = static_cast<std::uint32_t>(next - 1);
    const std::size_t record_bytes = crash_options->row_bytes + 8;
    overwrite(crash_options->path, offset_of(*crash_options, last) + record_bytes,
              Bytes((of_block - next % of_block) * record_bytes, std::byte{0xA5}));
  }
  _exit(42);
}

}  // namespace

TEST(a_kill_at_any_point_leaves_what_was_flushed) {
  for (const std::size_t row_bytes : {std::size_t{80}, std::size_t{69992}}) {
    long points = 0;
    for (long point = 1;; point += 1 + point / 4) {
      const Directory directory("/dev/shm");
      const auto options = options_in(directory, row_bytes);
      Shared* const shared = Shared::map();
      const int status = status_of_child([&] {
        crash_options = &options;
        crash_shared = shared;
        crash_in = point;
        crash_hook = die_torn;
        work_until_killed(options, *shared, 20);
      });
      CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 42));
      if (point > 2) check_after_kill(options, *shared);  // before, its header is not written
      Shared::unmap(shared);
      if (WEXITSTATUS(status) == 0) break;
      ++points;
    }
    std::printf("  %ld crash points\n", points);
  }
}

TEST(a_kill_at_any_time_leaves_what_was_flushed) {
  std::mt19937 random(3);
  std::size_t rows = 0;
  for (int kill_number = 0; kill_number < 20; ++kill_number) {
    const Directory directory(kill_number % 4 == 0 ? "/dev/shm" : "/tmp");
    const auto options = options_in(directory, kRowBytes[kill_number % 3]);
    Shared* const shared = Shared::map();
    const pid_t child = fork();
    if (child == 0) {
      work_until_killed(options, *shared, ~std::uint64_t{0});
      _exit(0);
    }
    const std::uint64_t rounds = 1 + random() % 30;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (shared->rounds < rounds) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));  // anywhere within a round
    kill(child, SIGKILL);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
    rows += check_after_kill(options, *shared);
    Shared::unmap(shared);
  }
  std::printf("  %zu rows\n", rows);
}

// As requests of a shard do: records are looked up and used under its lock, and read without it.
TEST(reads_run_beside_everything_else) {
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    const Directory directory{temporary()};
    const auto options = options_in(directory, 80);
    RowLog log = RowLog::create(options, reader);
    std::mutex mutex;
    std::map<std::uint32_t, std::uint64_t> rows;
    std::atomic<bool> done{false};
    std::atomic<std::uint64_t> used{0}, stale{0};
    std::vector<std::thread> readers;
    for (unsigned t = 0; t < 3; ++t) {
      readers.emplace_back([&, t] {
        std::mt19937 random(t);
        while (!done) {
          Numbers records, generations;
          {
            const std::lock_guard lock(mutex);
            for (const auto& [record, seed] : rows) {
              if (random() % 16 != 0) continue;
              records.push_back(record);
              generations.push_back(log.generation(log.segment_of(record)));
            }
          }
          const Bytes bytes = read(log, records);
          const std::lock_guard lock(mutex);
          for (std::size_t i = 0; i < records.size(); ++i) {
            const auto found = rows.find(records[i]);
            if (found == rows.end() || log.generation(log.segment_of(records[i])) != generations[i]) {
              ++stale;
              continue;
            }
            CHECK(holds(log, records[i], bytes.data() + i * log.record_bytes(), found->second, 80));
            ++used;
          }
        }
      });
    }
    std::mt19937 random(9);
    std::uint64_t seed = 0;
    for (int round = 0; round < 300; ++round) {
      {
        const std::lock_guard lock(mutex);
        // The oldest leave, so that segments become free, and some here and there.
        std::erase_if(rows, [&](const auto& row) {
          if (row.second + 4000 > seed && random() % 20 != 0) return false;
          log.release(row.first);
          return true;
        });
        const Numbers records = fill(log, 1 + random() % 900, 80, seed + 1);
        for (const std::uint32_t record : records) rows[record] = ++seed;
        if (round % 100 == 50) {
          log.clear();
          rows.clear();
        }
      }
      std::this_thread::yield();
      // A busy machine may give readers no turn in all these rounds: wait for one now and then.
      if (round % 20 == 19) {
        const std::uint64_t before = used;
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (used == before && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
        if (used == before) break;
      }
    }
    done = true;
    for (auto& each : readers) each.join();
    CHECK(used >= 300 / 20);
    std::printf("  %llu used, %llu stale\n", static_cast<unsigned long long>(used.load()),
                static_cast<unsigned long long>(stale.load()));
  }
}

TEST(a_forked_child_lets_go) {
  DiskReader reader;
  const Directory directory{temporary()};
  const auto options = options_in(directory, 80);
  auto* log = new RowLog(RowLog::create(options, reader));
  fill(*log, 100, 80);
  CHECK(status_of_child([&] {
          CHECK_THROWS(read(*log, {1, 2}), std::runtime_error);
          delete log;
        }) == 0);
  fill(*log, 100, 80, 101);
  CHECK(holds(*log, 199, 200, 80));
  delete log;
}

MAIN
