// One contiguous range of memory, reserved at once and backed by pages as they are touched.
#pragma once
#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace persia {

inline constexpr std::size_t kHugePage = std::size_t{2} << 20;

inline constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Owns a mapping. What lies inside is addressed by offsets from `base()`, never by pointers kept in it, so the same
// bytes can be mapped elsewhere, in another process, or from a file.
class Region {
 public:
  // Reserves `bytes` of zeroed private memory. Throws std::runtime_error where the address space does not suffice.
  static Region anonymous(std::size_t bytes);

  Region() = default;
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* base() const { return base_; }
  std::size_t size() const { return size_; }

  // Asks for huge pages in [offset, offset + bytes), less what lies before a 2 MiB boundary.
  void advise_huge(std::size_t offset, std::size_t bytes) const;
  // Gives the pages of [offset, offset + bytes) back; they read as zeros afterwards.
  void discard(std::size_t offset, std::size_t bytes) const;

 private:
  void release() noexcept;

  std::byte* base_ = nullptr;
  std::size_t size_ = 0;
  void* mapping_ = nullptr;
  std::size_t mapping_size_ = 0;
  pid_t owner_ = 0;
};

}  // namespace persia
