// The file of rows on disk against a map, with faults of the disk.
#include <algorithm>
#include <cerrno>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "row_log_rows.hpp"

using namespace persia;

namespace {

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

}  // namespace

TEST(behaves_as_a_map_does) {
  for (const char* parent : {"/tmp", "/dev/shm"}) {
    for (const auto kind : kKinds) {
      if (kThreadSanitized && kind == DiskReader::Kind::kUring) continue;  // It has one thread.
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

MAIN
