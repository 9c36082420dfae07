// One shard of a table: the calls to its rows, in memory and in the tier, under one lock.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "persia/bucket_set.hpp"
#include "persia/change_log.hpp"
#include "persia/layout.hpp"
#include "persia/memory_rows.hpp"
#include "persia/mix.hpp"
#include "persia/sketch.hpp"
#include "persia/slice.hpp"
#include "persia/snapshot.hpp"
#include "persia/table_config.hpp"
#include "persia/tier.hpp"

namespace persia {

struct PushCounts {
  std::uint64_t applied = 0;
  std::uint64_t absent = 0;
  std::uint64_t nonfinite = 0;   // rows that stay as they are: their gradient, or a value after it, is not finite
  std::uint64_t duplicates = 0;  // gradients of a push that the shard had applied before

  PushCounts& operator+=(const PushCounts& other);
};

struct Push {
  const float* gradients;  // row-major, one row per position
  float lr;
  std::uint32_t step;
  std::uint64_t client;  // 0: not tracked
  std::uint64_t sequence;
};

// State in which a shard was found when attaching to its region.
struct Recovery {
  bool busy = false;     // the previous process died during a request
  bool undone = false;   // a partly written row was rolled back
  bool open = false;     // a push was interrupted, and continues when it is repeated
  bool rebuilt = false;  // the index was rebuilt from the rows
};

// Whole rows to import; see `RowBatch`.
struct RowView {
  const std::uint64_t* ids;
  const float* embeddings;
  const float* states;
  const std::uint32_t* update_counts;
  const std::uint32_t* last_steps;
  const std::uint32_t* stamps;
};

// State of a shard besides its rows.
struct ShardState {
  std::uint32_t clock = 0;
  std::uint32_t snapshot = 1;  // id of the last one
  std::uint64_t client_clock = 0;
  std::vector<ClientEntry> clients;  // kClients
  std::array<std::uint64_t, kCounters> counters{};
  std::vector<std::uint16_t> sketch;  // empty without one
  TtlState ttl{};
};

// Thread-safe: all methods lock unless noted, or unless they get locks.
class Shard {
 public:
  // The shards that may hold the ids of a slice: one, or all of a table in order.
  using Shards = std::span<Shard* const>;
  class ShardLocks;

  // Creates the region of shard number `shard`, or attaches to its file. Throws as `Store::create_table` does.
  // `reader` reads the tier of a table that has one; it must outlive the shard.
  Shard(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard, DiskReader* reader = nullptr);

  // What `lookup` has not written: ids whose rows are in the tier, or may be.
  struct Deferred {
    Shards shards;
    const std::uint64_t* ids;
    float* out;
    std::uint8_t* found;  // by position; may be null
    std::vector<std::uint32_t> positions;
    std::vector<FetchedRecords> fetched;  // by shard
  };

  // Writes one embedding per position, as stored: the words of its dtype (half.hpp). Training admits missing ids and
  // touches rows; otherwise nothing changes. What is deferred goes to `fetch`, with that of other tables, since a disk
  // is fast only with many reads in flight, and then to `lookup_deferred`; `slice.ids` must stay until then. `found`
  // gets whether each id has a row, unless it is null; not in training, which makes rows.
  static Deferred lookup(const ShardLocks& locks, const Slice& slice, float* out, bool train,
                         std::uint8_t* found = nullptr);
  // Reads the rows of the tier, without locks, which others need meanwhile.
  static void fetch(std::span<Deferred> deferred);
  // Returns the parts of each shard that has any.
  static std::vector<Deferred> by_shard(Deferred&& deferred);
  // Writes what was deferred.
  static void lookup_deferred(const ShardLocks& locks, const Deferred& deferred, bool train);
  // Applies a push, in the order of the slice. A tracked push is applied exactly once.
  static PushCounts update(const ShardLocks& locks, const Slice& slice, const Push& push);

  // Advances the clock of the time to live. Rows that were last touched longer than `ttl` ago, or up to a sixteenth of
  // it later, expire: they are absent from then on, and their memory goes to new rows.
  void advance_clock(std::uint64_t by);
  // Keeps the step of each row's last change from now on; until then it is 0. Throws RegionFull.
  void keep_last_steps();
  // Writes the step of the last change of each row; 0 for a new or absent row. Changes nothing.
  static void last_steps(const ShardLocks& locks, const Slice& slice, std::uint32_t* out);
  // Sets found[position] and, if it is 1, the row at the same position of `rows`. Changes nothing.
  void peek(const Slice& slice, std::uint8_t* found, RowBatch& rows);
  // Appends up to `max_rows` rows from row number `start` on to `rows`; those of the tier come last. Returns the row
  // number to continue with; kNoRow at the end.
  static constexpr std::uint64_t kNoRow = ~std::uint64_t{0};
  std::uint64_t export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows);
  // Takes a snapshot. `export_snapshot` then returns the rows of this moment. One at a time.
  void begin_snapshot(const SnapshotOptions& options);
  // Appends the next `max_rows` or more rows of the snapshot of this id, in row order, to `rows`, and locks for a
  // few of them at a time; rows of buckets that it leaves out count, but are not appended. Returns whether there may be
  // more. Throws std::runtime_error if the snapshot is lost or ended.
  bool export_snapshot(std::uint32_t id, std::uint64_t max_rows, RowBatch& rows);
  // Returns the ids of rows that were evicted between `SnapshotOptions::since` and the snapshot.
  std::vector<std::uint64_t> snapshot_evicted(std::uint32_t id);
  // Returns the id of the snapshot since which changes and evicted ids are known; 0 if they are unknown.
  std::uint32_t changes_since();
  // Ends the snapshot, read or not.
  void end_snapshot();
  // Begins a pass over the rows that have changed since the last pass, or over all. `take_changes` then returns them.
  // From the first pass over all rows on changes are marked, and the ids of removed rows are listed, at most this
  // number. Returns false, and begins none, if what has changed is not known: there were too many removed rows, the
  // last pass was not read to its end, the shard was cleared or got another state.
  bool begin_changes(bool all, std::size_t removed_limit);
  // Appends what the pass has next: about `max_rows`, and up to `kRowsPerLock` more; ids of removed rows come first.
  // Locks for a few of them at a time. Returns whether there may be more. Values are as of now; a row of which they are
  // newer than the pass is not marked any more. Throws std::runtime_error if there is no pass, or it is lost.
  bool take_changes(std::uint64_t max_rows, RowChanges& changes);
  // Marks no more changes, and frees the memory of marks.
  void end_changes();
  // Overwrites or appends rows, which then count as changed; a snapshot that is being read has the rows before. A full
  // shard without a tier keeps the more recent of the incoming and its oldest row. The oldest rows are determined once
  // per call, so rows of the same call replace each other only approximately in that order.
  void import_rows(const Slice& slice, const RowView& rows);
  // Returns the state besides rows.
  ShardState export_state();
  // Restores the state of `export_state`.
  void import_state(const ShardState& state);
  // Builds the queue of rows to evict if there is none and the shard is nearly full, so that the first request after an
  // import does not.
  void end_import();

  // Removes the rows of ids, if there are any; other rows may get other places. Returns how many there were. Throws as
  // `remove_buckets` does.
  std::uint64_t remove_rows(const Slice& slice);
  // Removes the rows of the ids in some buckets, a few under each lock, and frees their memory. Other rows get other
  // places. Rows of these buckets must not come meanwhile. Returns how many there were. Throws std::runtime_error
  // while a snapshot is being read, or if a row on disk cannot be read; a repetition continues.
  std::uint64_t remove_buckets(const BucketSet& buckets);
  // Removes all rows and frees their memory.
  void clear();
  // Recovers from a crash: rolls back a partly written row, completes a commit, rebuilds the index if needed. Throws
  // std::runtime_error if the region is damaged in another way.
  Recovery recover();

  // Returns the number of rows, with those of the tier, and expired ones whose memory has not been used again.
  std::uint64_t size();
  // Returns what there is in the tier, and what requests have read and written; zeros without one.
  TierCounts tier_counts();
  // Returns the bytes of rows, last steps, index, sketch, header and marks of changes in use.
  std::uint64_t memory_bytes();
  // Returns the counters since creation.
  Counters counters();
  // For tests; not locked.
  MemoryRows& memory() { return memory_; }

 private:
  class Pipeline;
  enum class PushState { kNone, kOpen, kDuplicate };

  // Marks the region as changed by a request, for whoever attaches to it after a kill.
  void mark();
  // At the first id of a request in training that falls into this shard.
  void begin();
  // At the first gradient of a push that falls into this shard.
  void begin_push(const Push& push);
  void end_push(const Push& push);
  static void lookup_train(Shards shards, const Slice& slice, float* out, Deferred* deferred);
  static void lookup_only(Shards shards, const Slice& slice, float* out, std::uint8_t* found, Deferred* deferred);
  bool defer(const Slice& slice, std::size_t i, Deferred& deferred) const;
  void promote_all(const Slice& slice, std::size_t shards, const Push& push);
  bool apply(std::uint32_t number, const Push& push, const float* gradient, float* before);
  bool admits(std::uint64_t id);
  std::uint32_t insert(std::uint64_t id, std::uint32_t expired);
  std::uint32_t acquire(std::uint64_t id);
  void publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp);
  // Whether the stamp of a row comes last, when it is published: it marks the place as vacant until then.
  bool stamped_last(std::uint32_t number) const { return tier_ && tier_->acquired(number); }
  void import_row(const RowView& rows, std::size_t position);
  void begin_removal();
  void remove_from_memory(std::uint32_t number);
  std::uint64_t remove_from_memory(const BucketSet& buckets);
  // Returns the counters; the caller holds the lock.
  Counters count() const;

  MemoryRows memory_;
  // Each lookup reads these: they share a cache line.
  alignas(kLine) Header* header_;
  std::unique_ptr<Tier> tier_;  // nullptr without one
  // Of the request that holds the lock:
  bool begun_ = false;
  PushState begun_push_ = PushState::kNone;
  std::uint64_t skip_ = 0;     // gradients that an interrupted attempt of the push has applied
  std::vector<float> before_;  // embedding and state of a row before its update
  Sketch sketch_;
  std::mutex mutex_;
};

// Holds the locks of the shards in which a part of a request works; those in which rows change are marked, for whoever
// finds their region after a crash.
class Shard::ShardLocks {
 public:
  // Waits for each shard, in order: whoever waits for one while holding others holds earlier ones only.
  explicit ShardLocks(Shards shards) : shards_(shards) {
    for (Shard* shard : shards_) shard->mutex_.lock();
  }
  // Takes the locks if all are free; see `held`.
  ShardLocks(Shards shards, std::try_to_lock_t) : shards_(shards) {
    for (std::size_t taken = 0; taken < shards.size(); ++taken) {
      if (shards[taken]->mutex_.try_lock()) continue;
      while (taken > 0) shards[--taken]->mutex_.unlock();
      shards_ = {};
      return;
    }
  }
  ~ShardLocks() {
    for (Shard* shard : shards_) {
      shard->begun_push_ = PushState::kNone;
      if (shard->tier_) shard->tier_->end_request();
      if (shard->begun_) {
        barrier();
        shard->header_->busy = 0;
        shard->begun_ = false;
      }
      shard->mutex_.unlock();
    }
  }
  ShardLocks(const ShardLocks&) = delete;
  ShardLocks& operator=(const ShardLocks&) = delete;

  // Returns whether the locks were free.
  bool held() const { return !shards_.empty(); }
  // Returns the locked shards.
  Shards shards() const { return shards_; }

 private:
  Shards shards_;
};

}  // namespace persia
