// The file of rows on disk: its form, and files that are refused.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "row_log_rows.hpp"

using namespace persia;

TEST(records_lie_densely_and_blocks_are_pages) {
  CHECK(RowLog::block_records(80) == 744 && RowLog::block_records(144) == 431 && RowLog::block_records(1536) == 42);
  CHECK(RowLog::block_records(65528) == 1 && RowLog::block_records(65529) == 1 && RowLog::block_records(69992) == 1);
  DiskReader reader;
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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
  const Directory directory{temporary()};
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

MAIN
