// Many tables behind one call. The work of a call is split by (table, shard) and shared among the pool's threads.
#pragma once
#include <sys/types.h>

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "persia/shard.hpp"
#include "persia/thread_pool.hpp"

namespace persia {

// The shard of an id among `shards`, a power of two.
inline std::uint32_t shard_of(std::uint64_t id, std::uint32_t shards) {
  return static_cast<std::uint32_t>(shard_of_hash(hash_id(id), shards));
}

struct Table {
  explicit Table(TableConfig table_config);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  TableConfig config;
  Optimizer optimizer;
  std::size_t state_width;
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<Shard*> all;         // the same, for calls that go to all of them
  std::vector<Recovery> recovery;  // by shard, of those that were attached
};

struct LookupRequest {
  std::size_t table;
  const std::uint64_t* ids;
  std::size_t count;
  float* out;  // [count, dim]
};

struct UpdateRequest {
  std::size_t table;
  const std::uint64_t* ids;
  std::size_t count;
  const float* gradients;  // [count, dim]
  float lr;
};

// All methods may be called from several threads at once. A table may appear once per call. After a fork, every method
// throws std::runtime_error in the child.
class Store {
 public:
  explicit Store(ThreadPool& pool);
  ~Store();

  // Throws std::invalid_argument for a bad configuration or a name in use, std::runtime_error if memory cannot be
  // reserved, or regions cannot be made or attached to; RegionFull if there is no room for them. Tables are numbered
  // from 0.
  std::size_t create_table(const TableConfig& config);
  std::size_t tables() const;
  const Table& table(std::size_t index) const;

  void lookup(std::span<const LookupRequest> requests, bool train);
  // Applies what arrives, in order. With client and sequence: exactly once per shard, however often it is called.
  std::vector<PushCounts> update(std::span<const UpdateRequest> requests, std::uint32_t step, std::uint64_t client,
                                 std::uint64_t sequence);

  // found[i] and row i of the result belong to ids[i]; columns of absent ids are zero.
  RowBatch peek(std::size_t table, std::span<const std::uint64_t> ids, std::uint8_t* found);
  void import_rows(std::size_t table, std::size_t count, const RowView& rows);
  // For calls about one shard; checks both numbers.
  Shard& shard(std::size_t table, std::size_t shard) const;

  std::uint64_t size(std::size_t table) const;
  std::uint64_t memory_bytes(std::size_t table) const;
  Counters counters(std::size_t table) const;
  void clear(std::size_t table);
  void set_dirty_epoch(std::size_t table, std::uint32_t epoch);

 private:
  struct Grouping;
  class Scratch;
  enum class Parts { kAny, kShards };

  void check_process() const;
  const Table& checked(std::size_t index, std::size_t count, std::vector<bool>& seen) const;
  // Calls body(request, slice, shards) for parts of all requests, in parallel. A part is a whole request in its own
  // order, or, of a request too large for one thread and always with kShards, the ids that fall into one shard.
  template <class Request, class Body>
  void for_each_part(std::span<const Request> requests, Parts parts, Body&& body);
  std::unique_ptr<Scratch> take_scratch();
  void give_scratch(std::unique_ptr<Scratch> scratch);

  ThreadPool* pool_;
  pid_t owner_;
  mutable std::shared_mutex tables_mutex_;
  std::vector<std::unique_ptr<Table>> tables_;
  std::mutex scratch_mutex_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
};

}  // namespace persia
