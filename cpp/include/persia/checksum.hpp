// CRC-32 as in zlib, gzip and PNG (polynomial 0x04C11DB7, reflected), at the speed of memory.
#pragma once
#include <cstddef>
#include <cstdint>

namespace persia {

// Returns the checksum of `bytes` bytes that follow data with checksum `crc`; 0 starts a new checksum.
std::uint32_t crc32(std::uint32_t crc, const std::byte* data, std::size_t bytes);

}  // namespace persia
