// A contiguous range of memory, reserved in one call and backed by pages on first use.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace persia {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Rounds `value` up to a multiple of `alignment`.
inline constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// The file system has too little free space for a region. Nothing has changed.
class RegionFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Owns a mapping. Its contents are addressed by offsets from `base()` and hold no pointers, so the same bytes can be
// mapped elsewhere, in another process, or from a file.
class Region {
 public:
  // Reserves `bytes` of zeroed private memory. Throws std::runtime_error if the address space does not suffice.
  static Region anonymous(std::size_t bytes);
  // Creates and locks a file of zeros, replacing an existing one. It has no memory before `back`. Throws
  // std::runtime_error if the file cannot be created, or if another process still holds it after `lock_seconds`.
  static Region create(const std::string& path, std::size_t bytes, double lock_seconds);
  // Maps and locks an existing file. Throws as `create` does, and if its size differs from `bytes`.
  static Region attach(const std::string& path, std::size_t bytes, double lock_seconds);

  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  // Returns the first byte.
  std::byte* base() const { return base_; }
  // Returns the reserved bytes.
  std::size_t size() const { return size_; }
  // Whether the region is a file, which outlives the process.
  bool is_file() const { return file_ >= 0; }
  // Returns the bytes of memory that the file occupies.
  std::size_t backed_bytes() const;
  // Allocates memory for [offset, offset + bytes). In a file it must come before a write, which would be a SIGBUS if
  // the file cannot grow; throws RegionFull. In anonymous memory, where a write does the same, it only sets the
  // time, and only for large ranges.
  void back(std::size_t offset, std::size_t bytes) const;

  // Requests huge pages for [offset, offset + bytes), from its first 2 MiB boundary on.
  void advise_huge(std::size_t offset, std::size_t bytes) const;
  // Frees the pages of [offset, offset + bytes), which then read as zeros.
  void discard(std::size_t offset, std::size_t bytes) const;

 private:
  static Region file(const std::string& path, std::size_t bytes, double lock_seconds, bool create);
  void reserve(std::size_t bytes);
  void lock(double seconds);
  void release() noexcept;

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
  pid_t owner_ = 0;
  int file_ = -1;
  std::size_t page_ = 4096;
  std::string path_;
};

}  // namespace persia
