// The hash functions of the store. They are part of the format, as they determine shards and initial values.
#pragma once
#include <cstdint>
#include <string_view>

namespace persia {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;

// The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection whose output bits each depend on all input bits.
inline constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Hashes an id. The high 32 bits place it in the index of its shard, low bits choose the shard. Sharing bits would
// crowd the ids of a shard into a part of its index.
inline constexpr std::uint64_t hash_id(std::uint64_t id) { return mix64(id + kGolden); }

// Hashes the name of a table (FNV-1a, finalised by mix64).
inline constexpr std::uint64_t hash_name(std::string_view name) {
  std::uint64_t h = 0xCBF29CE484222325u;
  for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return mix64(h);
}

// Returns the key of all random numbers of an id, so that they depend on (seed, table, id) only.
inline constexpr std::uint64_t row_key(std::uint64_t seed, std::uint64_t name_hash, std::uint64_t id) {
  return mix64(mix64(seed + name_hash) ^ mix64(id));
}

// Number of buckets of ids. A map has the embedding PS of each.
inline constexpr std::uint32_t kBuckets = 4096;

// Returns the bucket of an id, from the top bits of a hash that neither shards nor indices use. This is part of the
// protocol. `name_hash` is XXH64 of the table's name.
inline constexpr std::uint32_t bucket_of(std::uint64_t name_hash, std::uint64_t id) {
  return static_cast<std::uint32_t>(mix64(name_hash ^ id) >> 52);
}
static_assert(kBuckets == 1u << (64 - 52));

// Returns number `counter` of the random 64-bit sequence of a key (splitmix64, addressed by position).
inline constexpr std::uint64_t random_bits(std::uint64_t key, std::uint64_t counter) {
  return mix64(key + (counter + 1) * kGolden);
}

}  // namespace persia
