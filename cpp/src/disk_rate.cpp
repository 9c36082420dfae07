#include "persia/disk_rate.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <latch>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "persia/disk_reader.hpp"

namespace persia {
namespace {

constexpr std::size_t kBatch = 8192, kPage = 4096;

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Free {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Pages = std::unique_ptr<std::byte, Free>;

Pages pages(std::size_t bytes) {
  Pages found(static_cast<std::byte*>(std::aligned_alloc(kPage, bytes)));
  if (!found) throw std::bad_alloc();
  std::memset(found.get(), 0, bytes);  // so that no read waits for memory
  return found;
}

class Source {
 public:
  explicit Source(const RandomReads& reads)
      : reads_(reads), file_(open(reads.path.c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC)) {
    if (reads.blocks == 0 || reads.block_bytes == 0 || reads.begin % kPage != 0 || reads.block_bytes % kPage != 0) {
      if (file_ >= 0) close(file_);
      throw std::invalid_argument("blocks must be whole pages of 4 KiB, and at least one");
    }
    if (file_ < 0) fail(errno);
  }
  ~Source() { close(file_); }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  int file() const { return file_; }
  std::uint64_t offset(std::mt19937_64& random) const {
    return reads_.begin + random() % reads_.blocks * reads_.block_bytes;
  }
  [[noreturn]] void fail(int error) const {
    throw std::runtime_error(reads_.path + " cannot be read past the page cache (" +
                             (error == 0 ? "it is too short" : std::strerror(error)) + ")");
  }

 private:
  const RandomReads& reads_;
  int file_;
};

}  // namespace

double read_as_rows(const RandomReads& reads) {
  const Source source(reads);
  DiskReader reader;
  const std::size_t at_once = std::min(kBatch, reads.count);
  const Pages to = pages(std::max<std::size_t>(1, at_once) * reads.block_bytes);
  std::mt19937_64 random(reads.seed);
  std::vector<DiskReader::Read> batch(at_once);
  reader.kind();  // sets io_uring up
  const auto start = Clock::now();
  for (std::size_t left = reads.count; left > 0; left -= batch.size()) {
    batch.resize(std::min(left, at_once));
    for (std::size_t i = 0; i < batch.size(); ++i) {
      batch[i] = {source.file(), source.offset(random), reads.block_bytes, to.get() + i * reads.block_bytes};
    }
    reader.read(batch);
  }
  return since(start);
}

double read_by_threads(const RandomReads& reads, unsigned threads) {
  const Source source(reads);
  std::atomic<std::int64_t> left{static_cast<std::int64_t>(reads.count)};
  std::atomic<int> error{-1};
  std::latch ready(static_cast<std::ptrdiff_t>(threads) + 1);
  std::vector<Pages> buffers;
  for (unsigned t = 0; t < threads; ++t) buffers.push_back(pages(reads.block_bytes));
  std::vector<std::jthread> all;
  const auto work = [&](unsigned t) {
    std::mt19937_64 random(reads.seed * 1000 + t);
    ready.arrive_and_wait();
    while (left.fetch_sub(1) > 0) {
      const auto offset = static_cast<off_t>(source.offset(random));
      const ssize_t got = pread(source.file(), buffers[t].get(), reads.block_bytes, offset);
      if (got == static_cast<ssize_t>(reads.block_bytes)) continue;
      error = got < 0 ? errno : 0;
      left = 0;
    }
  };
  try {
    for (unsigned t = 0; t < threads; ++t) all.emplace_back(work, t);
  } catch (const std::system_error&) {  // too many threads
    left = 0;
    ready.count_down(static_cast<std::ptrdiff_t>(threads + 1 - all.size()));
    throw;
  }
  ready.arrive_and_wait();
  const auto start = Clock::now();
  all.clear();  // joins
  const double seconds = since(start);
  if (error >= 0) source.fail(error);
  return seconds;
}

}  // namespace persia
