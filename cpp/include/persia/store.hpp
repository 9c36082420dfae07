// A store of many tables. The work of a call is split by (table, shard) among the threads of a pool.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "persia/memory.hpp"
#include "persia/shard.hpp"
#include "persia/thread_pool.hpp"

namespace persia {

// Returns the shard of an id among `shards`, a power of two.
inline std::uint32_t shard_of(std::uint64_t id, std::uint32_t shards) {
  return static_cast<std::uint32_t>(shard_of_hash(hash_id(id), shards));
}

struct Table {
  // Creates the shards, or attaches to their files.
  explicit Table(TableConfig table_config);
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  TableConfig config;
  Optimizer optimizer;
  std::size_t state_width;
  std::size_t row_words;               // of an embedding, as stored
  std::unique_ptr<DiskReader> reader;  // of rows on disk
  std::vector<std::unique_ptr<Shard>> shards;
  std::vector<Shard*> all;         // the same shards, for calls to all of them
  std::vector<Recovery> recovery;  // by shard, of an attached table
  // Parts of requests that are processed, or wait for a lock.
  alignas(kLine) mutable std::atomic<std::uint32_t> parts{0};
};

struct LookupRequest {
  std::size_t table;
  const std::uint64_t* ids;
  std::size_t count;
  float* out;                     // [count, words of a row], as stored (half.hpp)
  std::uint8_t* found = nullptr;  // [count]: whether each id has a row; only without training; may be null
};

struct UpdateRequest {
  std::size_t table;
  const std::uint64_t* ids;
  std::size_t count;
  const float* gradients;  // [count, dim]
  float lr;
};

// Thread-safe. A table may appear once per call. After a fork, every method throws std::runtime_error in the child.
class Store {
 public:
  // A store without tables. The pool must outlive it.
  explicit Store(ThreadPool& pool);
  ~Store();

  // Adds a table and returns its number, counted from 0. Throws std::invalid_argument for an invalid configuration or a
  // name in use, std::runtime_error if memory cannot be reserved or regions cannot be created or attached to, and
  // RegionFull if there is too little free space for them.
  std::size_t create_table(const TableConfig& config);
  // Returns the number of tables.
  std::size_t tables() const;
  // Returns a table by number.
  const Table& table(std::size_t index) const;

  // Writes one embedding per id. Training admits missing ids and touches rows; otherwise nothing changes.
  void lookup(std::span<const LookupRequest> requests, bool train);
  // Applies gradients in order. With client and sequence, applies them exactly once per shard, even if repeated.
  std::vector<PushCounts> update(std::span<const UpdateRequest> requests, std::uint32_t step, std::uint64_t client,
                                 std::uint64_t sequence);

  // Advances the clock of a table with a time to live; see `Shard::advance_clock`.
  void advance_clock(std::size_t table, std::uint64_t by);
  // Keeps the step of each row's last change from now on; until then it is 0. Throws RegionFull if there is too little
  // free space; a repetition continues.
  void keep_last_steps(std::size_t table);
  // Writes the step of the last change of each row; 0 for a new or absent row.
  void last_steps(std::size_t table, std::span<const std::uint64_t> ids, std::uint32_t* out);

  // Reads whole rows without touching them: found[i] and row i belong to ids[i]. Columns of absent ids are zero.
  RowBatch peek(std::size_t table, std::span<const std::uint64_t> ids, std::uint8_t* found);
  // Overwrites or appends rows.
  void import_rows(std::size_t table, std::size_t count, const RowView& rows);
  // Removes the rows of ids. Returns how many there were.
  std::uint64_t remove_rows(std::size_t table, std::span<const std::uint64_t> ids);
  // Prepares evictions after the last import into a table, in parallel over its shards.
  void end_import(std::size_t table);
  // Returns a shard, checking both numbers.
  Shard& shard(std::size_t table, std::size_t shard) const;

  // Returns the number of rows of a table.
  std::uint64_t size(std::size_t table) const;
  // Returns the bytes of rows, last steps, index, sketch, headers and marks of changes in use.
  std::uint64_t memory_bytes(std::size_t table) const;
  // Returns the counters of a table, summed over its shards.
  Counters counters(std::size_t table) const;
  // Returns what there is on disk of a table, summed over its shards.
  TierCounts tier_counts(std::size_t table) const;
  // Removes all rows of a table and frees their memory.
  void clear(std::size_t table);

 private:
  struct Grouping;
  class Scratch;
  using Work = std::function<void(std::size_t)>;

  void check_process() const;
  const Table& checked(std::size_t index, std::size_t count, std::vector<bool>& seen) const;
  // Calls work(0) ... work(count - 1), by several threads if there are enough ids.
  void run(bool parallel, std::size_t count, const Work& work);
  // Calls body(request, slice, locks) for parts of all requests, in parallel, while their shards are locked. A part is
  // a whole request in its own order, or the ids that fall into one shard: of a request too large for one thread, and
  // wherever other calls work in the table. Shards that are free come first.
  template <class Request, class Body>
  void for_each_part(std::span<const Request> requests, Body&& body);
  // Calls body(slice, shard) for the ids of each shard, in parallel, without locks.
  template <class Body>
  void for_each_shard(std::size_t table, const std::uint64_t* ids, std::size_t count, Body&& body);
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
