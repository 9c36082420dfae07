// XXH64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): turns strings, numbers and feature crosses into ids.
// Ids are stored in checkpoints, so these functions never change. Thread-safe; large arrays use the pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "persia/thread_pool.hpp"

namespace persia {

std::uint64_t xxh64(const void* data, std::size_t size, std::uint64_t seed);

// Strings in the layout of Arrow: string i is data[offsets[i], offsets[i + 1]). Where the validity bitmap (may be null)
// has no bit, starting at bit `validity_start`, the hash is `null`. Throws std::invalid_argument for offsets that
// decrease or leave the data. out.size() strings, one offset more.
struct Strings {
  std::span<const std::uint8_t> data;
  const std::uint8_t* validity = nullptr;
  std::size_t validity_start = 0;
};
void hash_strings(const Strings& strings, std::span<const std::int32_t> offsets, std::uint64_t seed, std::uint64_t null,
                  std::span<std::uint64_t> out, ThreadPool& pool);
void hash_strings(const Strings& strings, std::span<const std::int64_t> offsets, std::uint64_t seed, std::uint64_t null,
                  std::span<std::uint64_t> out, ThreadPool& pool);

enum class ValueKind : std::uint8_t { integer, floating };

// XXH64 of the little-endian bytes of each value of 1, 2, 4 or 8 bytes. Floating point values that are the same
// category hash alike: -0.0 as 0.0, every NaN as the positive quiet one.
void hash_values(const void* values, std::size_t width, ValueKind kind, std::uint64_t seed,
                 std::span<std::uint64_t> out, ThreadPool& pool);

// XXH64 of the little-endian bytes of columns[0][i], columns[1][i], ...: the id of a feature cross.
void hash_cross(std::span<const std::uint64_t* const> columns, std::uint64_t seed, std::span<std::uint64_t> out,
                ThreadPool& pool);

}  // namespace persia
