// Batched reads from files, many at a time: what an SSD needs to be fast.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace persia {

// Thread-safe. Each calling thread has its own io_uring for the time of a call. Where the kernel has none, or
// forbids it (containers often do), a pool of threads reads instead. Rings and threads are made on first use.
class DiskReader {
 public:
  enum class Kind { kUring, kThreads };
  static constexpr unsigned kDepth = 128;          // maximum number of reads in flight, per call with io_uring ...
  static constexpr std::size_t kThreadCount = 16;  // ... and for all calls with threads

  // One range of a file. Files opened with O_DIRECT need all of it aligned, usually to 4 KiB.
  struct Read {
    int fd;
    std::uint64_t offset;
    std::size_t bytes;
    std::byte* to;
  };

  // `kUring` is a preference: it becomes `kThreads` where io_uring cannot be had.
  explicit DiskReader(Kind kind = Kind::kUring);
  ~DiskReader();
  DiskReader(const DiskReader&) = delete;
  DiskReader& operator=(const DiskReader&) = delete;

  // Returns how it reads, trying io_uring if nothing has been read yet.
  Kind kind();

  // Reads all ranges, in any order. Blocks until all have ended, however long the disk takes: a read in flight cannot
  // be taken back. Throws std::runtime_error for the first one that failed, or that the file is too short for; the
  // contents of all `to` are undefined then. Also throws in a forked child.
  void read(std::span<const Read> reads);

 private:
  class Ring;
  class RingLease;
  struct State;

  std::unique_ptr<State> state_;
  pid_t process_;
};

}  // namespace persia
