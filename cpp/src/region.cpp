#include "persia/region.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace persia {

Region Region::anonymous(std::size_t bytes) {
  Region region;
  region.size_ = align_up(bytes, 4096);
  region.mapping_size_ = region.size_ + kHugePage;
  void* mapping =
      mmap(nullptr, region.mapping_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    throw std::runtime_error("cannot reserve " + std::to_string(bytes >> 20) + " MiB of address space (" +
                             std::strerror(errno) + "); lower the capacity of the table, or raise `ulimit -v`");
  }
  // A forked child (a data loader's worker, say) must neither copy the page tables of a huge store nor make every
  // later write of the parent a copy. The child has no use for the rows: its threads and locks are gone.
  madvise(mapping, region.mapping_size_, MADV_DONTFORK);
  region.mapping_ = mapping;
  region.owner_ = getpid();
  region.base_ = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::size_t>(mapping), kHugePage));
  return region;
}

Region::Region(Region&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_size_(std::exchange(other.mapping_size_, 0)),
      owner_(other.owner_) {}

Region& Region::operator=(Region&& other) noexcept {
  if (this != &other) {
    release();
    base_ = std::exchange(other.base_, nullptr);
    size_ = std::exchange(other.size_, 0);
    mapping_ = std::exchange(other.mapping_, nullptr);
    mapping_size_ = std::exchange(other.mapping_size_, 0);
    owner_ = other.owner_;
  }
  return *this;
}

Region::~Region() { release(); }

void Region::release() noexcept {
  // In a forked child the range is not mapped, and something else may lie there by now.
  if (mapping_ != nullptr && owner_ == getpid()) munmap(mapping_, mapping_size_);
  mapping_ = nullptr;
}

void Region::advise_huge(std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = align_up(offset, kHugePage);
  const std::size_t end = offset + bytes;
  if (begin < end) madvise(base_ + begin, end - begin, MADV_HUGEPAGE);
}

void Region::discard(std::size_t offset, std::size_t bytes) const {
  const std::size_t begin = align_up(offset, 4096);
  const std::size_t end = (offset + bytes) / 4096 * 4096;
  if (begin < end) madvise(base_ + begin, end - begin, MADV_DONTNEED);
}

}  // namespace persia
