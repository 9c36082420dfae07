// XXH64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): turns texts and feature crosses into ids.
// Ids are stored in checkpoints, so these functions never change. Thread-safe; large arrays use the pool.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "persia/thread_pool.hpp"

namespace persia {

// Returns the XXH64 of `size` bytes.
std::uint64_t xxh64(const void* data, std::size_t size, std::uint64_t seed);

// Computes the ids of a feature cross: XXH64 of the little-endian bytes of columns[0][i], columns[1][i], ...
void hash_cross(std::span<const std::uint64_t* const> columns, std::uint64_t seed, std::span<std::uint64_t> out,
                ThreadPool& pool);

}  // namespace persia
