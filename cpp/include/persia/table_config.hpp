// The configuration of a table, and how its shards divide it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "persia/half.hpp"
#include "persia/optim.hpp"
#include "persia/random.hpp"

namespace persia {

// Policy that chooses the rows to evict from a full table. kMidpoint: new rows begin as if they had not been touched
// for a while.
enum class Eviction : std::uint32_t { kLru = 0, kMidpoint = 1 };

enum class Admission : std::uint32_t { kAll = 0, kProbability = 1, kMinFrequency = 2 };

// Files of a table's regions, which outlive the process: `path`.0 and so on, one per shard.
struct RegionFiles {
  std::string path;           // empty: memory of this process
  bool attach = false;        // attach to existing files
  double lock_seconds = 0.0;  // maximum wait for a process that still holds them
};

// Files of the tier, which has the rows that do not fit into memory: `path`.0 and so on, one per shard.
struct TierFiles {
  std::string path;               // empty: no tier; rows that leave memory are evicted
  std::uint64_t memory_rows = 0;  // rows in memory, over all shards
};

struct TableConfig {
  std::string name;
  std::size_t dim = 16;
  Dtype dtype = Dtype::kFloat32;                    // of embeddings; see state_dtype
  std::uint64_t capacity = std::uint64_t{1} << 30;  // rows, over all shards
  std::uint32_t shards = 8;                         // power of two
  std::uint64_t seed = 0;
  OptimizerConfig optimizer;
  InitializerConfig initializer;
  Admission admission = Admission::kAll;
  double admission_value = 0.0;  // the probability, or the number of occurrences
  std::uint64_t ttl = 0;         // rows expire that were not touched for so long, in `ttl_unit`; 0: never
  std::uint32_t ttl_unit = 1;    // 1: steps, 2: seconds. In regions and checkpoints: never reuse a number
  Eviction eviction = Eviction::kLru;
  bool durable = false;  // keep undo slot and push progress; always done in files, and with a tier
  RegionFiles files;
  TierFiles tier;

  // Returns whether rows that do not fit into memory move to a tier.
  bool tiered() const { return !tier.path.empty(); }
};

// Returns the part of `rows` that one of `shards` has.
inline std::uint64_t share_of(std::uint64_t rows, std::uint32_t shards, std::uint32_t shard) {
  return rows / shards + (shard < rows % shards ? 1 : 0);
}

// Returns the maximum number of rows of a shard, those in the tier included.
inline std::uint64_t total_of(const TableConfig& config, std::uint32_t shard) {
  return share_of(config.capacity, config.shards, shard);
}

// Returns the dtype of the optimizer's state: Adam's moments in a bfloat16 table have the dtype of the table. float16
// has no room for second moments, which underflow, and sums of squares stop growing where a step is lost.
inline Dtype state_dtype(const TableConfig& config) {
  const bool moments = config.optimizer.kind == OptimizerKind::kAdam && config.dtype == Dtype::kBfloat16;
  return moments ? Dtype::kBfloat16 : Dtype::kFloat32;
}

// Returns the shard of a hash among `shards`, a power of two.
inline std::size_t shard_of_hash(std::uint64_t hash, std::size_t shards) { return hash & (shards - 1); }

}  // namespace persia
