// Rows of a log that can be told from one another, and what tests do with logs.
#pragma once
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "directory.hpp"
#include "persia/disk_faults.hpp"
#include "persia/memory.hpp"
#include "persia/region.hpp"
#include "persia/row_log.hpp"

namespace persia {

using Numbers = std::vector<std::uint32_t>;
using Bytes = std::vector<std::byte>;

inline constexpr std::size_t kRowBytes[] = {80, 144, 1536, 69992};  // records of 88, 152, 1,544 and 70,000 bytes
inline constexpr DiskReader::Kind kKinds[] = {DiskReader::Kind::kUring, DiskReader::Kind::kThreads};
inline constexpr std::uint64_t kId = 0x1234567890ABCDEF;

// Of segments of two blocks, eight of them.
inline RowLog::Options options_in(const Directory& directory, std::size_t row_bytes, std::uint64_t segments = 8) {
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

inline Bytes row_of(std::uint64_t seed, std::size_t bytes) {
  Bytes row(bytes);
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u;
  for (std::size_t i = 0; i < bytes; ++i) {
    if (i % 8 == 0) state = state * 6364136223846793005u + 1442695040888963407u;
    row[i] = static_cast<std::byte>(state >> (32 + i % 4 * 8));
  }
  return row;
}

// The last segment may be used, too.
inline std::uint32_t append(RowLog& log, std::uint64_t seed, std::size_t row_bytes) {
  return log.append(static_cast<std::uint32_t>(seed), row_of(seed, row_bytes).data(), RowLog::For::kCompaction);
}

inline bool holds(const RowLog& log, std::uint32_t record, const std::byte* bytes, std::uint64_t seed,
                  std::size_t row_bytes) {
  const Bytes row = row_of(seed, row_bytes);
  return RowLog::last_step_in(bytes) == static_cast<std::uint32_t>(seed) &&
         std::memcmp(log.row_in(record, bytes), row.data(), row_bytes) == 0;
}

inline Bytes read(const RowLog& log, const Numbers& records) {
  Bytes bytes(records.size() * log.record_bytes());
  log.read(records, bytes.data());
  return bytes;
}

inline bool holds(const RowLog& log, std::uint32_t record, std::uint64_t seed, std::size_t row_bytes) {
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

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Changes the file behind the log's back.
inline void overwrite(const std::string& path, std::uint64_t offset, const Bytes& bytes) {
  const int fd = open(path.c_str(), O_WRONLY);
  CHECK(fd >= 0);
  CHECK(pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes.size()));
  fsync(fd);
  close(fd);
}

inline std::uint64_t offset_of(const RowLog::Options& options, std::uint32_t record) {
  const std::size_t record_bytes = options.row_bytes + 8, of_block = RowLog::block_records(options.row_bytes);
  const std::size_t block_bytes = align_up(of_block * record_bytes, 4096);
  return 65536 + record / of_block * block_bytes + record % of_block * record_bytes;
}

// Faults: the access that is to fail next, if any, and how.
inline std::optional<DiskAccess> fails_at;
inline int fails_with = 0, fails_in = 0;

inline int fail_access(DiskAccess access) {
  if (fails_at != access || fails_in-- > 0) return 0;
  fails_at.reset();
  return fails_with;
}

inline void fail_next(DiskAccess access, int error, int after = 0) {
  disk_hook = fail_access;
  fails_at = access;
  fails_with = error;
  fails_in = after;
}

// Appends rows with seeds from `seed` on, and commits them.
inline Numbers fill(RowLog& log, std::size_t count, std::size_t row_bytes, std::uint64_t seed = 1) {
  Numbers records;
  for (std::size_t i = 0; i < count; ++i) records.push_back(append(log, seed + i, row_bytes));
  log.flush();
  for (const std::uint32_t record : records) log.revive(record);
  return records;
}

inline void release(RowLog& log, const Numbers& records) {
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

}  // namespace persia
