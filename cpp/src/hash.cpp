#include "persia/hash.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

namespace persia {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87U;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FU;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9U;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63U;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5U;

template <class T>
inline T little_endian(T value) {
  if constexpr (std::endian::native == std::endian::big) {
    T swapped;
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    auto* to = reinterpret_cast<std::byte*>(&swapped);
    std::reverse_copy(from, from + sizeof(T), to);
    return swapped;
  }
  return value;
}

template <class T>
inline T read(const std::uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return little_endian(value);
}

inline std::uint64_t round(std::uint64_t sum, std::uint64_t input) {
  return std::rotl(sum + input * kPrime2, 31) * kPrime1;
}

inline std::uint64_t merge(std::uint64_t hash, std::uint64_t sum) { return (hash ^ round(0, sum)) * kPrime1 + kPrime4; }

inline std::uint64_t add8(std::uint64_t hash, std::uint64_t input) {
  return std::rotl(hash ^ round(0, input), 27) * kPrime1 + kPrime4;
}

inline std::uint64_t add4(std::uint64_t hash, std::uint32_t input) {
  return std::rotl(hash ^ (input * kPrime1), 23) * kPrime2 + kPrime3;
}

inline std::uint64_t add1(std::uint64_t hash, std::uint8_t input) {
  return std::rotl(hash ^ (input * kPrime5), 11) * kPrime1;
}

inline std::uint64_t avalanche(std::uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

constexpr std::size_t kBlock = 1 << 14;

// body(first, last) on blocks of [0, n).
template <class Body>
void in_blocks(std::size_t n, ThreadPool& pool, Body&& body) {
  pool.parallel_for((n + kBlock - 1) / kBlock,
                    [&](std::size_t block) { body(block * kBlock, std::min(n, (block + 1) * kBlock)); });
}

}  // namespace

std::uint64_t xxh64(const void* data, std::size_t size, std::uint64_t seed) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  std::size_t left = size;
  std::uint64_t hash;
  if (size >= 32) {
    std::uint64_t sums[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= 32; left -= 32, at += 32) {
      for (int lane = 0; lane < 4; ++lane) sums[lane] = round(sums[lane], read<std::uint64_t>(at + 8 * lane));
    }
    hash = std::rotl(sums[0], 1) + std::rotl(sums[1], 7) + std::rotl(sums[2], 12) + std::rotl(sums[3], 18);
    for (const std::uint64_t sum : sums) hash = merge(hash, sum);
  } else {
    hash = seed + kPrime5;
  }
  hash += size;
  for (; left >= 8; left -= 8, at += 8) hash = add8(hash, read<std::uint64_t>(at));
  for (; left >= 4; left -= 4, at += 4) hash = add4(hash, read<std::uint32_t>(at));
  for (; left > 0; --left, ++at) hash = add1(hash, *at);
  return avalanche(hash);
}

void hash_cross(std::span<const std::uint64_t* const> columns, std::uint64_t seed, std::span<std::uint64_t> out,
                ThreadPool& pool) {
  in_blocks(out.size(), pool, [&](std::size_t first, std::size_t last) {
    std::vector<std::uint64_t> row(columns.size());
    for (std::size_t i = first; i < last; ++i) {
      for (std::size_t c = 0; c < columns.size(); ++c) row[c] = little_endian(columns[c][i]);
      out[i] = xxh64(row.data(), row.size() * sizeof(std::uint64_t), seed);
    }
  });
}

}  // namespace persia
