// One contiguous range of memory, reserved at once and backed by pages as they are touched.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace persia {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

inline constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// A file system has no room for what a region needs. Nothing has changed.
class RegionFull : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Owns a mapping. What lies inside is addressed by offsets from `base()`, never by pointers kept in it, so the same
// bytes can be mapped elsewhere, in another process, or from a file.
class Region {
 public:
  // Reserves `bytes` of zeroed private memory. Throws std::runtime_error where the address space does not suffice.
  static Region anonymous(std::size_t bytes);
  // A new file of zeros, in place of any that was there, and locked. It has no memory before `back`. Throws
  // std::runtime_error if the file cannot be made, or if another process still holds it after `lock_seconds`.
  static Region create(const std::string& path, std::size_t bytes, double lock_seconds);
  // A file of this size that is there. Throws as `create` does, and if the size differs.
  static Region attach(const std::string& path, std::size_t bytes, double lock_seconds);

  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* base() const { return base_; }
  std::size_t size() const { return size_; }
  // Whether it outlives the process.
  bool is_file() const { return file_ >= 0; }
  // Bytes of memory that the file has.
  std::size_t backed_bytes() const;
  // Ensures that [offset, offset + bytes) can be written to: a write to a file that cannot grow is a SIGBUS. Throws
  // RegionFull. Does nothing for anonymous memory.
  void back(std::size_t offset, std::size_t bytes) const;

  // Asks for huge pages in [offset, offset + bytes), less what lies before a 2 MiB boundary.
  void advise_huge(std::size_t offset, std::size_t bytes) const;
  // Gives the pages of [offset, offset + bytes) back; they read as zeros afterwards.
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
