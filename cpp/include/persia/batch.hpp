// The batch path: processes the ids and rows of one batch between the data and the network.
//
// Every result is bit-identical for any number of threads and on any machine: ids keep the order of their first
// occurrence, a pooled row is summed in the order of its bag, and a gradient row is summed in the order of the
// features, then of the samples, then of the positions of the bag.
//
// Functions block until done and are thread-safe. They throw std::invalid_argument for invalid contents; the outputs
// are then undefined, but nothing else is touched.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "persia/thread_pool.hpp"

namespace persia {

// Scratch memory that is reused between calls, because new pages cost more than the loops that use them.
// Thread-safe. A block is returned when its lease ends; all memory is freed with the arena.
class Arena {
 public:
  class Lease {
   public:
    // Borrows a block of at least `bytes`.
    Lease(Arena& arena, std::size_t bytes);
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    // Returns uninitialised memory, aligned to a cache line.
    template <class T>
    T* as() {
      return reinterpret_cast<T*>(block_.memory.get());
    }

   private:
    friend class Arena;
    Arena& arena_;
    struct Free {
      void operator()(std::byte* memory) const;
    };
    struct Block {
      std::unique_ptr<std::byte, Free> memory;
      std::size_t bytes = 0;
    } block_;
  };

 private:
  std::mutex mutex_;
  std::vector<Lease::Block> free_;
};

// The features that share a table, and buffers for their distinct ids.
struct UniqueGroup {
  std::vector<std::span<const std::uint64_t>> features;
  std::uint64_t* ids = nullptr;      // capacity for one id per position
  std::uint32_t* inverse = nullptr;  // capacity for one entry per position; holds uint16 entries if not `wide`
  std::size_t count = 0;             // result: number of distinct ids
  bool wide = false;                 // result: inverse is uint32 (more than 65,536 distinct ids)

  // Returns the total number of ids of all features.
  std::size_t positions() const;
};

// Removes duplicates: ids[inverse[i]] is the i-th id of the group's features, concatenated.
void unique(std::span<UniqueGroup> groups, ThreadPool& pool, Arena& arena);

// The distinct ids of a table, and the inverses that point to them.
struct OwnerGroup {
  struct Inverse {
    void* entries = nullptr;  // uint16 or uint32
    std::size_t count = 0;
    bool wide = false;
  };
  std::uint64_t name_hash = 0;  // XXH64 of the table's name
  std::span<std::uint64_t> ids;
  std::vector<Inverse> inverses;
  std::int64_t* bounds = nullptr;  // result: [servers + 1], the ids of server p are bounds[p] ... bounds[p + 1]
};

// The server of each bucket: `of_bucket` is [kBuckets], each below `servers`.
struct BucketOwners {
  std::span<const std::uint16_t> of_bucket;
  std::uint32_t servers = 0;
};

// Sorts ids stably by the server that owns their bucket, and updates the inverses.
void group_by_owner(std::span<OwnerGroup> groups, const BucketOwners& owners, ThreadPool& pool, Arena& arena);

// Writes the bucket of each id of a table, whose name has the hash XXH64 `name_hash`.
void buckets_of(std::uint64_t name_hash, std::span<const std::uint64_t> ids, std::span<std::uint16_t> buckets);

enum class Pooling : std::uint8_t { sum, mean, sqrtn, sequence };

// Positions of the values of one feature among the rows of its table.
struct FeaturePlan {
  const void* inverse = nullptr;  // uint16 or uint32 [positions]
  bool wide = false;              // uint32
  std::size_t positions = 0;
  const std::int64_t* offsets = nullptr;  // [batch + 1], or null: one value per sample
  std::size_t batch = 0;
  Pooling pooling = Pooling::sum;
  std::size_t max_length = 0;      // maximum values per sample, 0: all; required for a sequence
  const float* weights = nullptr;  // [positions], factors of the rows, or null; not for a sequence
};

struct PoolTable {
  const float* rows = nullptr;  // [count, dim]
  std::size_t count = 0;
  std::size_t dim = 0;
};

// One feature to pool. Strides are in floats (mask: bytes). Outputs of one call must not overlap.
struct PoolFeature {
  FeaturePlan plan;
  PoolTable table;
  float* out = nullptr;  // [batch, dim], or [batch, max_length, dim] for a sequence
  std::ptrdiff_t sample_stride = 0;
  std::ptrdiff_t position_stride = 0;
  std::uint8_t* mask = nullptr;  // [batch, max_length], sequences only
  std::ptrdiff_t mask_stride = 0;
};

// Pools the rows of each feature. Empty bags and the padding of sequences become zeros. With weights, mean divides by
// their sum, and sqrtn by the root of the sum of their squares; a bag for which that is 0 becomes zeros.
void pool_forward(std::span<const PoolFeature> features, ThreadPool& pool);

struct GradientFeature {
  FeaturePlan plan;
  const float* gradient = nullptr;  // shaped like the output; null counts as zero
  std::ptrdiff_t sample_stride = 0;
  std::ptrdiff_t position_stride = 0;
  std::size_t name = 0;  // number of the feature, for error messages
};

struct GradientTable {
  std::vector<GradientFeature> features;
  float* out = nullptr;  // [count, dim]
  std::size_t count = 0;
  std::size_t dim = 0;
};

// Computes the gradient of every row of every table.
void pool_backward(std::span<const GradientTable> tables, ThreadPool& pool, Arena& arena);

}  // namespace persia
