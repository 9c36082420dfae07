#include "persia/hash.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
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

// `value` is unsigned and one of the four widths.
template <class T>
inline std::uint64_t hash_one(T value, std::uint64_t seed) {
  std::uint64_t hash = seed + kPrime5 + sizeof(T);
  if constexpr (sizeof(T) == 8) {
    hash = add8(hash, value);
  } else if constexpr (sizeof(T) == 4) {
    hash = add4(hash, value);
  } else {
    for (std::size_t byte = 0; byte < sizeof(T); ++byte) {
      hash = add1(hash, static_cast<std::uint8_t>(value >> (8 * byte)));
    }
  }
  return avalanche(hash);
}

constexpr std::size_t kBlock = 1 << 14;

// body(first, last) on blocks of [0, n).
template <class Body>
void in_blocks(std::size_t n, ThreadPool& pool, Body&& body) {
  pool.parallel_for((n + kBlock - 1) / kBlock,
                    [&](std::size_t block) { body(block * kBlock, std::min(n, (block + 1) * kBlock)); });
}

template <class Offset>
void hash_strings_as(const Strings& strings, std::span<const Offset> offsets, std::uint64_t seed, std::uint64_t null,
                     std::span<std::uint64_t> out, ThreadPool& pool) {
  if (offsets.size() != out.size() + 1)
    throw std::invalid_argument("strings: there must be one more offset than strings");
  std::atomic<bool> bad{false};
  const auto size = static_cast<std::int64_t>(strings.data.size());
  in_blocks(out.size(), pool, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t begin = offsets[i];
      const std::int64_t end = offsets[i + 1];
      if (begin < 0 || end < begin || end > size) {
        bad = true;
        return;
      }
      const std::size_t bit = strings.validity_start + i;
      const bool valid = strings.validity == nullptr || ((strings.validity[bit / 8] >> (bit % 8)) & 1) != 0;
      out[i] = valid ? xxh64(strings.data.data() + begin, static_cast<std::size_t>(end - begin), seed) : null;
    }
  });
  if (bad) throw std::invalid_argument("strings: offsets must not decrease and must stay inside the data");
}

// The bits of a floating point number with `Mantissa` stored mantissa bits.
template <class T, int kMantissa>
inline T canonical(T bits) {
  constexpr T kSign = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));
  constexpr T kInfinity = static_cast<T>((kSign - 1) & ~((T{1} << kMantissa) - 1));
  const T magnitude = static_cast<T>(bits & ~kSign);
  if (magnitude == 0) return 0;
  if (magnitude > kInfinity) return static_cast<T>(kInfinity | (T{1} << (kMantissa - 1)));
  return bits;
}

template <class T, int kMantissa = 0>
void hash_values_as(const void* values, std::uint64_t seed, std::span<std::uint64_t> out, ThreadPool& pool) {
  in_blocks(out.size(), pool, [&](std::size_t first, std::size_t last) {
    const auto* from = static_cast<const std::uint8_t*>(values);
    for (std::size_t i = first; i < last; ++i) {
      T value;  // in the machine's own byte order
      std::memcpy(&value, from + i * sizeof(T), sizeof(T));
      if constexpr (kMantissa != 0) value = canonical<T, kMantissa>(value);
      out[i] = hash_one(value, seed);
    }
  });
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

void hash_strings(const Strings& strings, std::span<const std::int32_t> offsets, std::uint64_t seed, std::uint64_t null,
                  std::span<std::uint64_t> out, ThreadPool& pool) {
  hash_strings_as(strings, offsets, seed, null, out, pool);
}

void hash_strings(const Strings& strings, std::span<const std::int64_t> offsets, std::uint64_t seed, std::uint64_t null,
                  std::span<std::uint64_t> out, ThreadPool& pool) {
  hash_strings_as(strings, offsets, seed, null, out, pool);
}

void hash_values(const void* values, std::size_t width, ValueKind kind, std::uint64_t seed,
                 std::span<std::uint64_t> out, ThreadPool& pool) {
  const bool floating = kind == ValueKind::floating;
  if (floating && width == 2) return hash_values_as<std::uint16_t, 10>(values, seed, out, pool);
  if (floating && width == 4) return hash_values_as<std::uint32_t, 23>(values, seed, out, pool);
  if (floating && width == 8) return hash_values_as<std::uint64_t, 52>(values, seed, out, pool);
  if (!floating && width == 1) return hash_values_as<std::uint8_t>(values, seed, out, pool);
  if (!floating && width == 2) return hash_values_as<std::uint16_t>(values, seed, out, pool);
  if (!floating && width == 4) return hash_values_as<std::uint32_t>(values, seed, out, pool);
  if (!floating && width == 8) return hash_values_as<std::uint64_t>(values, seed, out, pool);
  throw std::invalid_argument("values must have 1, 2, 4 or 8 bytes each (floating point: 2, 4 or 8)");
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
