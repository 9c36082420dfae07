// One shard of a table: index, rows, recency and counters in one region, guarded by one lock.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "persia/changefeed.hpp"
#include "persia/eviction_queue.hpp"
#include "persia/expiry.hpp"
#include "persia/layout.hpp"
#include "persia/push_log.hpp"
#include "persia/row_index.hpp"
#include "persia/row_store.hpp"
#include "persia/sketch.hpp"
#include "persia/snapshot.hpp"
#include "persia/tier.hpp"

namespace persia {

// Ids of a batch: all of `ids`, or those at `positions`.
struct Slice {
  const std::uint64_t* ids;
  const std::uint32_t* positions;  // nullptr: 0 ... count - 1
  std::size_t count;

  // Returns the position in the batch of the i-th id of the slice.
  std::size_t position(std::size_t i) const { return positions == nullptr ? i : positions[i]; }
};

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

// Rows on disk.
struct TierCounts {
  std::uint64_t rows = 0;        // now
  std::uint64_t disk_bytes = 0;  // of the files now
  std::uint64_t spilled = 0;     // rows that have left memory
  std::uint64_t read = 0;        // records that requests have read
  std::uint64_t promoted = 0;    // rows that have come back
  std::uint64_t compacted = 0;   // rows written again, to free the space of others
  // Segments of the files with rows that cannot be read now, and requests that have failed on a damaged record.
  std::uint64_t unreadable = 0;

  TierCounts& operator+=(const TierCounts& other);
};

// Thread-safe: all methods lock unless noted.
class Shard {
 public:
  // The shards that may hold the ids of a slice: one, or all of a table in order.
  using Shards = std::span<Shard* const>;

  // Creates the region of shard number `shard`, or attaches to its file. Throws as `Store::create_table` does.
  // `reader` reads the rows on disk of a table that has some; it must outlive the shard.
  Shard(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard, DiskReader* reader = nullptr);

  // What `lookup` has not written: ids whose rows are on disk, or may be.
  struct Deferred {
    Shards shards;
    const std::uint64_t* ids;
    float* out;
    std::vector<std::uint32_t> positions;
    std::vector<FetchedRecords> fetched;  // by shard
  };

  // Writes one embedding per position, as stored: the words of its dtype (half.hpp). Training admits missing ids and
  // touches rows; otherwise nothing changes. What is deferred goes to `fetch`, with that of other tables, since a disk
  // is fast only with many reads in flight, and then to `lookup_deferred`; `slice.ids` must stay until then.
  static Deferred lookup(Shards shards, const Slice& slice, float* out, bool train);
  // Reads the rows from disk, without locks, which others need meanwhile.
  static void fetch(std::span<Deferred> deferred);
  // Writes what was deferred.
  static void lookup_deferred(const Deferred& deferred, bool train);
  // Applies a push, in the order of the slice. A tracked push is applied exactly once.
  static PushCounts update(Shards shards, const Slice& slice, const Push& push);

  // Advances the clock of the time to live. Rows that were last touched longer than `ttl` ago, or up to a sixteenth of
  // it later, expire: they are absent from then on, and their memory goes to new rows.
  void advance_clock(std::uint64_t by);
  // Keeps the step of each row's last change from now on; until then it is 0. Throws RegionFull.
  void keep_last_steps();
  // Writes the step of the last change of each row; 0 for a new or absent row. Changes nothing.
  static void last_steps(Shards shards, const Slice& slice, std::uint32_t* out);
  // Sets found[position] and, if it is 1, the row at the same position of `rows`. Changes nothing.
  void peek(const Slice& slice, std::uint8_t* found, RowBatch& rows);
  // Appends up to `max_rows` rows from row number `start` on to `rows`; those on disk come last. Returns the row number
  // to continue with; kNoRow at the end.
  static constexpr std::uint64_t kNoRow = ~std::uint64_t{0};
  std::uint64_t export_rows(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows);
  // Takes a snapshot. `export_snapshot` then returns the rows of this moment. One at a time.
  void begin_snapshot(const SnapshotOptions& options);
  // Appends the next `max_rows` or more rows of the snapshot of this id, in row order, to `rows`, and locks for a
  // few of them at a time. Returns whether there may be more. Throws std::runtime_error if the snapshot is lost or
  // ended.
  bool export_snapshot(std::uint32_t id, std::uint64_t max_rows, RowBatch& rows);
  // Returns the ids of rows that were evicted between `SnapshotOptions::since` and the snapshot.
  std::vector<std::uint64_t> snapshot_evicted(std::uint32_t id);
  // Returns the id of the snapshot since which changes and evicted ids are known; 0 if they are unknown.
  std::uint32_t changes_since();
  // Ends the snapshot, read or not.
  void end_snapshot();
  // Begins a pass over the rows that have changed since the last pass, or over all. `take_changes` then returns them.
  // From the first pass over all rows on changes are marked, and the ids of removed rows are listed, so many at most.
  // Returns false, and begins none, if what has changed is not known: there were too many removed rows, the last pass
  // was not read to its end, the shard was cleared or got another state.
  bool begin_changes(bool all, std::size_t removed_limit);
  // Appends what the pass has next: about `max_rows`, and up to `kRowsPerLock` more; ids of removed rows come first.
  // Locks for a few of them at a time. Returns whether there may be more. Values are as of now; a row of which they are
  // newer than the pass is not marked any more. Throws std::runtime_error if there is no pass, or it is lost.
  bool take_changes(std::uint64_t max_rows, RowChanges& changes);
  // Marks no more changes, and frees the memory of marks.
  void end_changes();
  // Overwrites or appends rows. A full shard without rows on disk keeps the more recent of the incoming and its oldest
  // row. The oldest rows are determined once per call, so rows of the same call replace each other only approximately
  // in that order.
  void import_rows(const Slice& slice, const RowView& rows);
  // Returns the state besides rows.
  ShardState export_state();
  // Restores the state of `export_state`.
  void import_state(const ShardState& state);
  // Builds the queue of rows to evict if there is none and the shard is nearly full, so that the first request after an
  // import does not.
  void end_import();

  // Removes all rows and frees their memory.
  void clear();
  // Recovers from a crash: rolls back a partly written row, completes a commit, rebuilds the index if needed. Throws
  // std::runtime_error if the region is damaged in another way.
  Recovery recover();

  // Returns the number of rows, with those on disk, and expired ones whose memory has not been used again.
  std::uint64_t size();
  // Returns what there is on disk, and what requests have read and written there.
  TierCounts tier_counts();
  // Returns the bytes of rows, last steps, index, sketch, header and marks of changes in use.
  std::uint64_t memory_bytes();
  // Returns the counters since creation.
  Counters counters();
  // For tests; not locked.
  Header& header() { return *header_; }
  // For tests; not locked.
  const EvictionQueue& eviction() const { return eviction_; }
  // Returns the first byte of a row; not locked.
  std::byte* row_bytes(std::uint32_t row) const { return rows_.row_bytes(row); }

 private:
  struct Group;
  struct Fetch;
  class ShardLocks;
  enum class PushState { kNone, kOpen, kDuplicate };

  bool expired(std::uint32_t number) const { return expiry_.expired(rows_.row(number)->stamp); }
  // The same row number, or none if the row has expired.
  std::uint32_t present(std::uint32_t number) const {
    return number == Index::kNone || expired(number) ? Index::kNone : number;
  }

  void mark();
  void begin();
  void begin_push(const Push& push);
  void end_push(const Push& push);
  static void fetch_slots(Shards shards, const Slice& slice, std::size_t start, Group& group);
  static void fetch_rows(Group& group, const Fetch& fetch);
  // Calls use(i, group, lane) for i = 0 ... slice.count - 1, in order.
  template <class Use>
  static void pipeline(Shards shards, const Slice& slice, const Fetch& fetch, Use&& use);
  void prefetch_output(const Slice& slice, std::size_t i, const float* out) const;
  std::uint32_t resolve(const Group& group, std::size_t lane) const;
  static void lookup_train(Shards shards, const Slice& slice, float* out, Deferred* deferred);
  static void lookup_only(Shards shards, const Slice& slice, float* out, Deferred* deferred);
  std::uint32_t admit(std::uint64_t id, std::uint32_t expired);
  std::uint32_t insert(std::uint64_t id, std::uint32_t expired);
  // Returns the stamp that a new row begins with.
  std::uint32_t first_stamp() const {
    return config_->eviction == Eviction::kMidpoint ? eviction_.midpoint(header_->clock) : header_->clock;
  }
  // Whether the last gradient of a row counts as a use of it. With midpoint insertion the first one does not: it
  // belongs to the lookup that inserted the row, and would make it as recent as a row that was met again.
  bool makes_recent(std::uint32_t number) const {
    return config_->eviction == Eviction::kLru || rows_.row(number)->update_count > 1;
  }
  std::uint32_t acquire(std::uint64_t id);
  void publish(std::uint64_t id, std::uint32_t number, std::uint32_t stamp);
  void import_row(const RowView& rows, std::size_t position);
  // Builds the queue of rows to evict if there is none and the shard is nearly full.
  void make_eviction_ready() noexcept;
  bool apply(std::uint32_t number, const Push& push, const float* gradient, float* before);
  void tick();
  // Its recency changes, and nothing else.
  void touch(std::uint32_t number) {
    snapshots_.before_change(number);
    renew(number);
  }
  void renew(std::uint32_t number) {
    RowHeader& r = *rows_.row(number);
    const std::uint32_t before = r.stamp;
    r.stamp = header_->clock;
    eviction_.touch(rows_.stamps(), header_->clock, number, before);
  }
  // Rows on disk (tier.cpp).
  void open_tier(DiskReader* reader);
  // Whether a row of memory that `acquire` has returned holds none.
  bool taken_vacant(std::uint32_t number) const {
    return tier_ && !tier_->vacant.empty() && tier_->vacant.back() == number;
  }
  std::uint64_t rows_total() const {
    return header_->rows_used + (tier_ ? tier_->log.live_records() - tier_->vacant.size() : 0);
  }
  struct ColdRow {
    std::uint32_t record = RowLog::kNone;
    const std::byte* row = nullptr;  // valid until the next record is read
    std::uint32_t last_step = 0;
  };
  ColdRow find_cold(std::uint64_t id);
  const std::byte* row_of_request(std::uint32_t record, const std::byte* bytes);
  bool want_cold(std::uint64_t id, FetchedRecords& wanted) const;
  void fetch_cold(const Slice& slice, std::size_t from, std::size_t shards);
  bool defer(const Slice& slice, std::size_t i, Deferred& deferred) const;
  const float* cold_values(std::uint64_t id);
  bool present(const ColdRow& cold) const;
  std::uint32_t promote(std::uint64_t id);
  void drop_cold(std::uint32_t record, std::uint64_t id);
  void make_vacant();
  void make_room();
  void spill_rows();
  void compact();
  void set_compacting_aside();
  bool compact_block();
  std::uint32_t expired_segment();
  std::uint32_t append_to_log(const std::byte* row, std::uint32_t last_step, std::uint32_t stamp,
                              RowLog::For what = RowLog::For::kRows);
  void evict_cold();
  bool evict_from(std::uint32_t segment);
  void read_live(std::uint32_t from, std::uint32_t end);
  void read_records();
  ColdRow cold_row(std::size_t i) const;
  std::uint32_t stamp_of(const ColdRow& cold) const;
  void append_cold(const ColdRow& cold, RowBatch& rows) const;
  std::uint64_t export_cold(std::uint64_t start, std::uint64_t max_rows, RowBatch& rows);
  void clear_rows();
  void clear_tier();
  void promote_all(const Slice& slice, std::size_t shards, const Push& push);
  void prepare_cold_snapshot();
  void begin_cold_snapshot() noexcept;
  bool export_cold_snapshot(Snapshot& snapshot, RowBatch& rows);
  void end_cold_snapshot();
  void finish_move();
  bool recover_tier();
  bool revive_rows();
  void rebuild_with_tier(std::vector<std::uint64_t> slots);
  std::string slots_path() const;
  void write_slots(const std::vector<std::uint64_t>& slots) const;
  std::vector<std::uint64_t> read_slots() const;

  bool search_left(RowChanges& changes);
  void take_marked(RowChanges& changes);

  const TableConfig* config_;
  RowStore rows_;
  Header* header_;
  RowIndex index_;
  EvictionQueue eviction_;
  Expiry expiry_;
  Snapshots snapshots_;
  Sketch sketch_;
  Changefeed changefeed_;
  std::unique_ptr<Tier> tier_;  // of a table with rows on disk
  std::mutex mutex_;
  // Of the request that holds the lock:
  std::vector<float> before_;  // embedding and state of a row before its update
  bool begun_ = false;
  PushState begun_push_ = PushState::kNone;
  std::uint64_t skip_ = 0;  // gradients that an interrupted attempt of the push has applied
};

// Holds the locks of all shards of a request; those in which rows change are marked, for whoever finds their region
// after a crash.
class Shard::ShardLocks {
 public:
  explicit ShardLocks(Shards shards) : shards_(shards) {
    // All callers lock in this order, or only one shard.
    for (Shard* shard : shards_) shard->mutex_.lock();
  }
  ~ShardLocks() {
    for (Shard* shard : shards_) {
      shard->begun_push_ = PushState::kNone;
      if (shard->tier_) shard->tier_->fetched = nullptr;
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

 private:
  Shards shards_;
};

}  // namespace persia
