#include "persia/region.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace persia {
namespace {

constexpr long kHugeTlbFs = 0x958458F6;
constexpr auto kLockRetry = std::chrono::milliseconds(5);

std::string mib(std::size_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

[[noreturn]] void fail(const std::string& path, const std::string& what, int error) {
  throw std::runtime_error("region " + path + ": " + what + " (" + std::strerror(error) + ")");
}

}  // namespace

// Address space on a huge page boundary, in which nothing lies yet.
void Region::reserve(std::size_t bytes) {
  size_ = align_up(bytes, page_);
  mapping_size_ = size_ + kHugePage;
  void* mapping = mmap(nullptr, mapping_size_, file_ < 0 ? PROT_READ | PROT_WRITE : PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw std::runtime_error("cannot reserve " + mib(bytes) + " of address space (" + std::strerror(errno) +
                             "); lower the capacity of the table, or raise `ulimit -v`");
  }
  mapping_ = mapping;
  owner_ = getpid();
  base_ = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::size_t>(mapping), kHugePage));
}

Region Region::anonymous(std::size_t bytes) {
  Region region;
  region.reserve(bytes);
  // A forked child (a data loader's worker, say) must neither copy the page tables of a huge store nor make every
  // later write of the parent a copy. The child has no use for the rows: its threads and locks are gone.
  madvise(region.mapping_, region.mapping_size_, MADV_DONTFORK);
  return region;
}

Region Region::create(const std::string& path, std::size_t bytes, double lock_seconds) {
  return file(path, bytes, lock_seconds, true);
}

Region Region::attach(const std::string& path, std::size_t bytes, double lock_seconds) {
  return file(path, bytes, lock_seconds, false);
}

Region Region::file(const std::string& path, std::size_t bytes, double lock_seconds, bool create) {
  Region region;
  region.path_ = path;
  region.file_ = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0), 0600);
  if (region.file_ < 0) fail(path, create ? "cannot be made" : "cannot be opened", errno);
  struct stat status{};
  if (fstat(region.file_, &status) != 0) fail(path, "cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) throw std::runtime_error("region " + path + ": is no ordinary file");
  struct statfs system{};
  if (fstatfs(region.file_, &system) == 0 && system.f_type == kHugeTlbFs) {
    region.page_ = static_cast<std::size_t>(system.f_bsize);
  }
  region.lock(lock_seconds);
  const std::size_t total = align_up(bytes, region.page_);
  if (create) {
    if (ftruncate(region.file_, 0) != 0 || ftruncate(region.file_, static_cast<off_t>(total)) != 0) {
      fail(path, "cannot have a length of " + mib(total) + "; lower the capacity of the table, or raise `ulimit -f`",
           errno);
    }
  } else {
    fstat(region.file_, &status);
    if (static_cast<std::size_t>(status.st_size) != total) {
      throw std::runtime_error("region " + path + ": has " + std::to_string(status.st_size) + " bytes, and a table " +
                               "like this has " + std::to_string(total) +
                               ": it was cut short, or made for another table, capacity or dtype");
    }
  }
  region.reserve(total);
  if (mmap(region.base_, region.size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, region.file_,
           0) == MAP_FAILED) {
    fail(path, "cannot be mapped", errno);
  }
  madvise(region.mapping_, region.mapping_size_, MADV_DONTFORK);
  return region;
}

// The kernel gives the lock back when the process that has it has ended, however it ends; tearing down its memory may
// take a moment.
void Region::lock(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) fail(path_, "cannot be locked", errno);
    if (std::chrono::steady_clock::now() >= end) {
      throw std::runtime_error("region " + path_ +
                               ": another process has it in use; two servers on one region would "
                               "destroy it. End the other one (`fuser " +
                               path_ +
                               "` names it), or give each its own "
                               "directory");
    }
    std::this_thread::sleep_for(kLockRetry);
  }
  struct stat here{}, there{};
  if (fstat(file_, &here) != 0 || stat(path_.c_str(), &there) != 0 || here.st_ino != there.st_ino) {
    throw std::runtime_error("region " + path_ + ": it was removed while this process waited for it; start again");
  }
}

std::size_t Region::backed_bytes() const {
  struct stat status{};
  return fstat(file_, &status) == 0 ? static_cast<std::size_t>(status.st_blocks) * 512 : 0;
}

void Region::back(std::size_t offset, std::size_t bytes) const {
  if (file_ < 0 && bytes < kHugePage / 2) return;
  const std::size_t begin = offset / page_ * page_;
  const std::size_t count = align_up(offset + bytes, page_) - begin;
  // First as a write through the mapping would: only so does a tmpfs give huge pages to those who ask for them.
  // Whatever this does not do (it is new in Linux 5.14), the next call does, or says why not, or the first write.
  madvise(base_ + begin, count, MADV_POPULATE_WRITE);
  if (file_ < 0) return;
  int error = EINTR;
  while (error == EINTR) error = posix_fallocate(file_, static_cast<off_t>(begin), static_cast<off_t>(count));
  if (error == 0) return;
  struct statvfs system{};
  const bool known = fstatvfs(file_, &system) == 0;
  throw RegionFull("region " + path_ + ": no room to grow to " + mib(backed_bytes() + count) + " (" +
                   std::strerror(error) + (known ? "; free there: " + mib(system.f_bavail * system.f_frsize) : "") +
                   "). Free memory there, enlarge it (`mount -o remount,size=... /dev/shm`), lower the capacity of the "
                   "tables, or choose another directory");
}

Region::Region(Region&& other) noexcept { *this = std::move(other); }

Region& Region::operator=(Region&& other) noexcept {
  if (this != &other) {
    release();
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapping_size_ = std::exchange(other.mapping_size_, 0);
    owner_ = other.owner_;
    file_ = std::exchange(other.file_, -1);
    page_ = other.page_;
    path_ = std::move(other.path_);
  }
  return *this;
}

Region::~Region() { release(); }

void Region::release() noexcept {
  // In a forked child the range is not mapped, and something else may lie there by now.
  if (mapping_ != nullptr && owner_ == getpid()) munmap(mapping_, mapping_size_);
  mapping_ = nullptr;
  if (file_ >= 0) close(file_);
  file_ = -1;
}

void Region::advise_huge(std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = align_up(offset, kHugePage);
  const std::size_t end = offset + bytes;
  if (begin < end) madvise(base_ + begin, end - begin, MADV_HUGEPAGE);
}

void Region::discard(std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = align_up(offset, page_);
  const std::size_t end = (offset + bytes) / page_ * page_;
  if (begin >= end) return;
  if (file_ < 0) {
    madvise(base_ + begin, end - begin, MADV_DONTNEED);
  } else {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
              static_cast<off_t>(end - begin));
  }
}

}  // namespace persia
