// The file of rows on disk: against a map, with faults of the disk, and killed.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "persia/disk_faults.hpp"
#include "persia/memory.hpp"
#include "persia/region.hpp"
#include "persia/row_log.hpp"

using namespace persia;
using Numbers = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

namespace {

constexpr std::size_t kRowBytes[] = {80, 144, 1536, 69992};  // records of 88, 152, 1,544 and 70,000 bytes
constexpr DiskReader::Kind kKinds[] = {DiskReader::Kind::kUring, DiskReader::Kind::kThreads};
constexpr std::uint64_t kId = 0x1234567890ABCDEF;

struct Directory {
  explicit Directory(const std::string& parent = "/tmp") {
    std::string name = parent + "/persia-test-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string path;
};

// Of segments of two blocks, eight of them.
RowLog::Options options_in(const Directory& directory, std::size_t row_bytes, std::uint64_t segments = 8) {
  RowLog::Options options;
  options.path = directory.path + "/rows";
  options.id = kId;
  options.row_bytes = row_bytes;
  options.segment_blocks = 2;
  options.max_records = segments * 2 * RowLog::block_records(row_bytes);
  options.keep = true;
  options.lock_seconds = 0.02;
  return options;
}

Bytes row_of(std::uint64_t seed, std::size_t bytes) {
  Bytes row(bytes);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u;
  for (std::size_t i = 0; i < bytes; ++i) {
    if (i % 8 == 0) state = state * 6364136223846793005u + 1442695040888963407u;
    row[i] = static_cast<std::byte>(state >> (32 + i % 4 * 8));
  }
  return row;
}

// The last segment may be used, too.
std::uint32_t append(RowLog& log, std::uint64_t seed, std::size_t row_bytes) {
  return log.append(static_cast<std::uint32_t>(seed), row_of(seed, row_bytes).data(), RowLog::For::kCompaction);
}

bool holds(const RowLog& log, std::uint32_t record, const std::byte* bytes, std::uint64_t seed, std::size_t row_bytes) {
  const Bytes row = row_of(seed, row_bytes);
  return RowLog::last_step_in(bytes) == static_cast<std::uint32_t>(seed) &&
         std::memcmp(log.row_in(record, bytes), row.data(), row_bytes) == 0;
}

Bytes read(const RowLog& log, const Numbers& records) {
  Bytes bytes(records.size() * log.record_bytes());
  log.read(records, bytes.data());
  return bytes;
}

bool holds(const RowLog& log, std::uint32_t record, std::uint64_t seed, std::size_t row_bytes) {
  return holds(log, record, read(log, {record}).data(), seed, row_bytes);
}

template <class Work>
std::string message_of(Work&& work) {
  try {
    work();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Changes the file behind the log's back.
void overwrite(const std::string& path, std::uint64_t offset, const Bytes& bytes) {
  const int fd = open(path.c_str(), O_WRONLY);
  CHECK(fd >= 0);
  CHECK(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes.size()));
  fsync(fd);
  close(fd);
}

std::uint64_t offset_of(const RowLog::Options& options, std::uint32_t record) {
  const std::size_t record_bytes = options.row_bytes + 8, of_block = RowLog::block_records(options.row_bytes);
  const std::size_t block_bytes = align_up(of_block * record_bytes, 4096);
  return 65536 + record / of_block * block_bytes + record % of_block * record_bytes;
}

// Faults: the access that is to fail next, if any, and how.
std::optional<DiskAccess> fails_at;
int fails_with = 0, fails_in = 0;

int fail_access(DiskAccess access) {
  if (fails_at != access || fails_in-- > 0) return 0;
  fails_at.reset();
  return fails_with;
}

void fail_next(DiskAccess access, int error, int after = 0) {
  disk_hook = fail_access;
  fails_at = access;
  fails_with = error;
  fails_in = after;
}

// A log and what should be in it.
class Model {
 public:
  Model(const RowLog::Options& options, DiskReader& reader, unsigned seed)
      : options_(options), reader_(reader), random_(seed), log_(RowLog::create(options, reader)) {}

  void step() {
    const unsigned what = random_() % 100;
    if (what < 40) {
      append_some();
    } else if (what < 60) {
      release_some();
    } else if (what < 75) {
      read_some();
    } else if (what < 85) {
      compact();
    } else if (what < 90) {
      pin_or_unpin();
    } else if (what < 94) {
      fault();
    } else if (what < 99) {
      attach();
    } else if (random_() % 4 == 0) {
      clear();
    }
    check();
  }

 private:
  struct Row {
    std::uint64_t seed;
    std::uint32_t generation;
  };

  std::uint32_t records_of(std::size_t count) { return static_cast<std::uint32_t>(random_() % count); }

  void commit(const std::vector<std::pair<std::uint32_t, std::uint64_t>>& appended) {
    for (const auto& [record, seed] : appended) {
      CHECK(!rows_.contains(record));
      // Nobody may have begun a segment again that an open snapshot reads.
      CHECK(!ghosts_.contains(record));
      log_.revive(record);
      rows_[record] = {seed, log_.generation(log_.segment_of(record))};
    }
  }

  // Appends up to two blocks and a half, in one flush or several.
  void append_some() {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> appended;
    const std::uint64_t written = log_.written_records();
    const std::size_t count = random_() % (RowLog::block_records(options_.row_bytes) * 5 / 2 + 2);
    try {
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t seed = ++seeds_;
        appended.emplace_back(append(log_, seed, options_.row_bytes), seed);
      }
      log_.flush();
    } catch (const RegionFull& error) {
      CHECK(contains(error.what(), "records are in use"));
      ++full_;
      log_.flush();  // Nothing is left to write.
      CHECK(log_.written_records() == written);
      release_some();
      return;
    }
    CHECK(log_.written_records() == written + count);
    commit(appended);
  }

  void release_some() {
    if (rows_.empty()) return;
    // Here and there, or a range, so that segments become free.
    const bool range = random_() % 2 == 0;
    const std::uint32_t segment = records_of(log_.end_record() / log_.segment_records());
    const unsigned odds = 2 + random_() % 6;
    for (auto at = rows_.begin(); at != rows_.end();) {
      const bool leaves = range ? log_.segment_of(at->first) == segment : random_() % odds == 0;
      at = leaves ? release(at) : std::next(at);
    }
  }

  std::map<std::uint32_t, Row>::iterator release(std::map<std::uint32_t, Row>::iterator at) {
    const auto [record, row] = *at;
    if (pinned_.contains(log_.segment_of(record))) ghosts_[record] = row;
    log_.release(record);
    return rows_.erase(at);
  }

  void read_some() {
    std::map<std::uint32_t, Row> all = rows_;
    all.insert(ghosts_.begin(), ghosts_.end());
    if (all.empty()) return;
    Numbers records;
    std::vector<std::uint64_t> seeds;
    for (const auto& [record, row] : all) {
      for (unsigned times = random_() % 3; times > 0; --times) records.push_back(record);
    }
    std::shuffle(records.begin(), records.end(), random_);
    if (random_() % 2 == 0) records.resize(std::min<std::size_t>(records.size(), 20));
    const Bytes bytes = read(log_, records);
    for (std::size_t i = 0; i < records.size(); ++i) {
      CHECK(holds(log_, records[i], bytes.data() + i * log_.record_bytes(), all[records[i]].seed, options_.row_bytes));
    }
  }

  void compact() {
    const std::uint32_t segment = log_.candidate();
    if (segment == RowLog::kNone) return;
    CHECK(!pinned_.contains(segment) && log_.full(segment));
    std::vector<std::pair<std::uint32_t, std::uint64_t>> moved;
    Numbers left;
    try {
      for (const auto& [record, row] : rows_) {
        if (log_.segment_of(record) != segment) continue;
        moved.emplace_back(append(log_, row.seed, options_.row_bytes), row.seed);
        left.push_back(record);
      }
      log_.flush();
    } catch (const RegionFull&) {
      return;
    }
    CHECK(!left.empty() && left.size() < log_.segment_records());
    commit(moved);
    for (const std::uint32_t record : left) release(rows_.find(record));
    CHECK(log_.live_in(segment) == 0);
    ++compacted_;
  }

  void pin_or_unpin() {
    if (!pinned_.empty() && random_() % 2 == 0) {
      const auto at = pinned_.begin();
      log_.unpin(at->first);
      if (--at->second == 0) {
        const std::uint32_t segment = at->first;
        std::erase_if(ghosts_, [&](const auto& ghost) { return log_.segment_of(ghost.first) == segment; });
        pinned_.erase(at);
      }
    } else if (!rows_.empty()) {
      const std::uint32_t segment = log_.segment_of(rows_.begin()->first);
      log_.pin(segment);
      ++pinned_[segment];
    }
  }

  void fault() {
    const std::uint64_t next = log_.next();
    const std::size_t count = 1 + random_() % (RowLog::block_records(options_.row_bytes) * 3);
    try {
      for (std::size_t i = 0; i < count; ++i) append(log_, ++seeds_, options_.row_bytes);
    } catch (const RegionFull&) {
      return;
    }
    const int error = random_() % 2 == 0 ? ENOSPC : EIO;
    fail_next(random_() % 4 == 0 ? DiskAccess::kAllocate : DiskAccess::kWrite, error, static_cast<int>(random_() % 3));
    try {
      log_.flush();
    } catch (const RegionFull&) {
      CHECK(error == ENOSPC && log_.next() == next);
      ++faults_;
    } catch (const std::runtime_error& failure) {
      CHECK(error == EIO && log_.next() == next && contains(failure.what(), "Input/output error"));
      ++faults_;
    }
    disk_hook = nullptr;
  }

  void attach() {
    const std::uint64_t next = log_.next();
    const std::uint64_t record_bytes = log_.record_bytes();
    {
      const RowLog gone = std::move(log_);
    }
    // What a kill has torn lies behind the last record, in a block that is not full.
    if (const std::uint64_t in_block = next % RowLog::block_records(options_.row_bytes); in_block != 0) {
      const auto last = static_cast<std::uint32_t>(next - 1);
      overwrite(options_.path, offset_of(options_, last) + record_bytes,
                Bytes(random_() % record_bytes, std::byte{0xA5}));
    }
    log_ = RowLog::attach(options_, next, reader_);
    CHECK(log_.next() == next && log_.live_records() == 0);
    pinned_.clear();
    ghosts_.clear();
    for (auto& [record, row] : rows_) {
      log_.revive(record);
      log_.revive(record);
      row.generation = log_.generation(log_.segment_of(record));
    }
  }

  void clear() {
    log_.clear();
    rows_.clear();
    CHECK(log_.next() == 0);
  }

  void check() {
    CHECK(log_.live_records() == rows_.size());
    std::map<std::uint32_t, std::uint32_t> live;
    for (const auto& [record, row] : rows_) {
      CHECK(log_.live(record) && row.generation == log_.generation(log_.segment_of(record)));
      ++live[log_.segment_of(record)];
    }
    std::uint64_t bits = 0;
    for (const std::uint64_t word : log_.live_bits()) bits += static_cast<std::uint64_t>(__builtin_popcountll(word));
    CHECK(bits == rows_.size());
    for (std::uint32_t s = 0; s < log_.end_record() / log_.segment_records(); ++s) CHECK(log_.live_in(s) == live[s]);
    CHECK(log_.end_record() <= options_.max_records);
  }

  RowLog::Options options_;
  DiskReader& reader_;
  std::mt19937 random_;
  RowLog log_;
  std::map<std::uint32_t, Row> rows_, ghosts_;  // ghosts: released ones in pinned segments
  std::map<std::uint32_t, int> pinned_;
  std::uint64_t seeds_ = 0;

 public:
  int full_ = 0, compacted_ = 0, faults_ = 0;
};

// Appends rows with seeds from `seed` on, and commits them.
Numbers fill(RowLog& log, std::size_t count, std::size_t row_bytes, std::uint64_t seed = 1) {
  Numbers records;
  for (std::size_t i = 0; i < count; ++i) records.push_back(append(log, seed + i, row_bytes));
  log.flush();
  for (const std::uint32_t record : records) log.revive(record);
  return records;
}

void release(RowLog& log, const Numbers& records) {
  for (const std::uint32_t record : records) log.release(record);
}

template <class Work>
int status_of_child(Work&& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  return status;
}

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

TEST(behaves_as_a_map_does) {
  for (const char* parent : {"/tmp", "/dev/shm"}) {
    for (const auto kind : kKinds) {
      for (const std::size_t row_bytes : kRowBytes) {
        DiskReader reader(kind);
        const Directory directory(parent);
        Model model(options_in(directory, row_bytes), reader, static_cast<unsigned>(row_bytes));
        for (int i = 0; i < 400; ++i) model.step();
        CHECK(model.full_ > 0 && model.compacted_ > 0 && model.faults_ > 0);
      }
    }
  }
}

TEST(records_lie_densely_and_blocks_are_pages) {
  CHECK(RowLog::block_records(80) == 744 && RowLog::block_records(144) == 431 && RowLog::block_records(1536) == 42);
  CHECK(RowLog::block_records(65528) == 1 && RowLog::block_records(65529) == 1 && RowLog::block_records(69992) == 1);
  DiskReader reader;
  const Directory directory;
  for (const std::size_t row_bytes : {80, 81, 1536, 40000, 69992}) {
    auto options = options_in(directory, row_bytes);
    const std::size_t count = 3 * RowLog::block_records(row_bytes);
    RowLog log = RowLog::create(options, reader);
    CHECK(log.record_bytes() == align_up(row_bytes, 4) + 8);
    const Numbers records = fill(log, count, row_bytes);
    for (std::size_t i = 0; i < count; ++i) CHECK(records[i] == i);
    const Bytes all = read(log, records);
    for (std::size_t i = 0; i < count; ++i) {
      CHECK(holds(log, records[i], all.data() + i * log.record_bytes(), i + 1, row_bytes));
    }
    options.row_bytes = align_up(row_bytes, 4);
    const std::uint64_t segments = (count + log.segment_records() - 1) / log.segment_records();
    CHECK(std::filesystem::file_size(options.path) ==
          offset_of(options, static_cast<std::uint32_t>(segments * log.segment_records())));
  }
}

TEST(a_batch_larger_than_the_window_is_read) {
  DiskReader reader;
  const Directory directory;
  auto options = options_in(directory, 1536);
  options.segment_blocks = 200;
  options.max_records = 200 * 42;
  RowLog log = RowLog::create(options, reader);
  Numbers records = fill(log, 200 * 42, 1536);  // 12.5 MiB
  std::shuffle(records.begin(), records.end(), std::mt19937(1));
  const Bytes bytes = read(log, records);
  for (std::size_t i = 0; i < records.size(); ++i) {
    CHECK(holds(log, records[i], bytes.data() + i * log.record_bytes(), records[i] + 1, 1536));
  }
}

TEST(several_logs_are_read_together) {
  DiskReader reader;
  const Directory directory;
  constexpr std::size_t kRowBytes[] = {1536, 40, 300};
  constexpr std::size_t kCount[] = {200 * 42, 1000, 0};  // 12.5 MiB, more than the window; and none at all
  std::vector<RowLog> logs;
  std::vector<Numbers> records;
  std::vector<Bytes> bytes;
  std::vector<RowLog::Wanted> wanted;
  for (std::size_t i = 0; i < 3; ++i) {
    auto options = options_in(directory, kRowBytes[i]);
    options.path += std::to_string(i);
    options.segment_blocks = 200;
    options.max_records = 200 * RowLog::block_records(kRowBytes[i]);
    logs.push_back(RowLog::create(options, reader));
    records.push_back(fill(logs[i], kCount[i], kRowBytes[i], 7 * i));
    std::shuffle(records[i].begin(), records[i].end(), std::mt19937(1));
    bytes.emplace_back(records[i].size() * logs[i].record_bytes());
  }
  for (std::size_t i = 0; i < 3; ++i) wanted.push_back({&logs[i], records[i], bytes[i].data()});
  RowLog::read(wanted);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t n = 0; n < records[i].size(); ++n) {
      const std::byte* const found = bytes[i].data() + n * logs[i].record_bytes();
      CHECK(holds(logs[i], records[i][n], found, records[i][n] + 7 * i, kRowBytes[i]));
    }
  }
  RowLog::read({});
}

TEST(what_is_not_flushed_is_not_there) {
  DiskReader reader;
  const Directory directory;
  const auto options = options_in(directory, 80);
  std::optional<RowLog> log = RowLog::create(options, reader);
  fill(*log, 10, 80);
  append(*log, 11, 80);
  CHECK(log->next() == 10);
  log.reset();
  log = RowLog::attach(options, 10, reader);
  CHECK(fill(*log, 1, 80, 12) == Numbers{10});
  for (std::uint32_t record = 0; record < 10; ++record) CHECK(holds(*log, record, record + 1, 80));
  CHECK(holds(*log, 10, 12, 80));
}

TEST(a_file_that_is_not_kept_has_no_name) {
  DiskReader reader;
  for (const char* parent : {"/tmp", "/dev/shm"}) {
    const Directory directory(parent);
    auto options = options_in(directory, 80);
    options.keep = false;
    RowLog log = RowLog::create(options, reader);
    CHECK(std::filesystem::is_empty(directory.path));
    fill(log, 1000, 80);
    CHECK(holds(log, 999, 1000, 80));
    const RowLog other = RowLog::create(options, reader);  // They do not know of each other.
    CHECK(holds(log, 999, 1000, 80));
  }
}

TEST(a_changed_byte_anywhere_is_found) {
  DiskReader reader;
  const Directory directory;
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  fill(log, 10, 80);
  const Bytes bytes = read(log, {5});
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (unsigned bit = 0; bit < 8; ++bit) {
      Bytes changed = bytes;
      changed[i] ^= std::byte{1} << bit;
      CHECK_THROWS(log.row_in(5, changed.data()), std::runtime_error);
    }
    Bytes changed = bytes;
    changed[i] ^= std::byte{0xFF};
    overwrite(options.path, offset_of(options, 5) + i, {changed[i]});
    const Bytes found = read(log, {5});
    CHECK(found == changed);
    const std::string message = message_of([&] { log.row_in(5, found.data()); });
    CHECK(contains(message, options.path) && contains(message, "record 5") && contains(message, "checkpoint"));
    CHECK(contains(message, "offset " + std::to_string(offset_of(options, 5))));
    overwrite(options.path, offset_of(options, 5) + i, {bytes[i]});
    CHECK(holds(log, 5, 6, 80));
  }
  // A record in the place of another one, and zeros.
  CHECK_THROWS(log.row_in(6, bytes.data()), std::runtime_error);
  for (std::uint32_t record = 0; record < 1000; ++record) {
    CHECK_THROWS(log.row_in(record, Bytes(log.record_bytes()).data()), std::runtime_error);
  }
}

TEST(a_file_of_another_table_is_refused) {
  DiskReader reader;
  const Directory directory;
  const auto options = options_in(directory, 80);
  const auto attach = [&](const RowLog::Options& other, std::uint64_t next) {
    return message_of([&] { RowLog::attach(other, next, reader); });
  };
  CHECK(contains(attach(options, 0), "gone") && contains(attach(options, 0), options.path));
  {
    RowLog log = RowLog::create(options, reader);
    fill(log, 2000, 80);
  }
  CHECK(attach(options, 2000).empty());
  auto other = options;
  other.id = kId + 1;
  CHECK(contains(attach(other, 2000), "another table"));
  other = options;
  other.row_bytes = 144;
  CHECK(contains(attach(other, 1), "rows of 80 bytes in segments of 2 blocks, and a table like this has rows of 144"));
  other = options;
  other.segment_blocks = 4;
  CHECK(contains(attach(other, 2000), "segments of 2 blocks"));
  other = options;
  other.max_records = 1500;
  CHECK(contains(attach(other, 2000), "max_records"));
  CHECK(contains(attach(options, ~std::uint64_t{0}), "max_records"));
  // Every byte of the header.
  const int fd = open(options.path.c_str(), O_RDONLY);
  Bytes header(36);
  CHECK(pread(fd, header.data(), header.size(), 0) == 36);
  close(fd);
  for (std::size_t i = 0; i < header.size(); ++i) {
    overwrite(options.path, i, {header[i] ^ std::byte{1}});
    CHECK(contains(attach(options, 2000), "Remove it"));
    overwrite(options.path, i, {header[i]});
  }
  CHECK(attach(options, 2000).empty());
  std::filesystem::remove(options.path);
  std::filesystem::create_directory(options.path);
  CHECK(!attach(options, 0).empty());
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
  std::filesystem::remove(options.path);
  std::filesystem::create_symlink("/etc/hostname", options.path);
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
}

TEST(a_file_that_was_cut_short_is_refused) {
  DiskReader reader;
  const Directory directory;
  const auto options = options_in(directory, 80);
  Numbers records;
  {
    RowLog log = RowLog::create(options, reader);
    records = fill(log, 4000, 80);  // two segments, and a part of the third
  }
  const auto whole = std::filesystem::file_size(options.path);
  for (const std::uintmax_t size : {whole - 1, whole / 2, std::uintmax_t{65536}, std::uintmax_t{100}}) {
    std::filesystem::resize_file(options.path, size);
    CHECK(contains(message_of([&] { RowLog::attach(options, 4000, reader); }), size > 100 ? "cut short" : "is not"));
  }
  std::filesystem::remove(options.path);
  {
    RowLog log = RowLog::create(options, reader);
    fill(log, 4000, 80);
  }
  // Segments are used again, so the last record is not always in the last one.
  std::filesystem::resize_file(options.path, whole - 1);
  RowLog log = RowLog::attach(options, 2000, reader);
  log.revive(2000);
  CHECK(contains(message_of([&] { log.revive(3999); }), "cut short"));
  CHECK(log.live_records() == 1);
  // And during the work.
  std::filesystem::resize_file(options.path, 65536 + 4096);
  CHECK(contains(message_of([&] { read(log, {1, 2000}); }), "too short"));
}

TEST(a_file_in_use_is_refused) {
  DiskReader reader;
  const Directory directory;
  const auto options = options_in(directory, 80);
  RowLog log = RowLog::create(options, reader);
  const Numbers records = fill(log, 10, 80);
  CHECK(contains(message_of([&] { RowLog::attach(options, 10, reader); }), "in use"));
  CHECK(contains(message_of([&] { RowLog::create(options, reader); }), "in use"));
  CHECK(holds(log, 9, 10, 80));
  // It is waited for.
  auto patient = options;
  patient.lock_seconds = 20;
  std::optional<RowLog> held = std::move(log);
  std::atomic<bool> attached{false};
  std::thread waiting([&] {
    RowLog::attach(patient, 10, reader);
    attached = true;
  });
  CHECK(!attached);
  held.reset();
  waiting.join();
  CHECK(attached);
}

TEST(invalid_options_are_refused) {
  DiskReader reader;
  const Directory directory;
  auto options = options_in(directory, 80);
  options.max_records = 2 * 744 - 1;
  CHECK(contains(message_of([&] { RowLog::create(options, reader); }), "Invalid max_records = 1487"));
  options.max_records = ~std::uint64_t{0};
  RowLog::create(options, reader);
  options.segment_blocks = 0;
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
  options.segment_blocks = std::size_t{1} << 24;
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
  options = options_in(directory, 80);
  options.row_bytes = 0;
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
  options = options_in(directory, 80);
  options.path = directory.path + "/none/rows";
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
  options.keep = false;
  CHECK_THROWS(RowLog::create(options, reader), std::runtime_error);
}

TEST(segments_are_used_again) {
  DiskReader reader;
  const Directory directory;
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
  const Directory directory;
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
  const Directory directory;
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
  const Directory directory;
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
  const Directory directory;
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
  const Directory directory;
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
  const Directory directory;
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

// In a mount namespace of its own, of which nothing is left.
TEST(a_small_file_system_fills_and_has_room_again) {
  const Directory directory;
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
    const Directory directory;
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
  const Directory directory;
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
