// The rows of a shard in memory, found by id, and the steps by which a row gets its place and its recency.
#pragma once
#include <cstdint>

#include "persia/change_log.hpp"
#include "persia/eviction_queue.hpp"
#include "persia/expiry.hpp"
#include "persia/row_index.hpp"
#include "persia/row_store.hpp"
#include "persia/snapshot.hpp"
#include "persia/table_config.hpp"

namespace persia {

// Not thread-safe: guarded by the lock of its shard. The shard's calls and its tier use the parts directly; methods
// are the steps that change several of them.
struct MemoryRows {
  // Creates or opens the rows of shard number `shard`; see `RowStore`. `table` and `optimizer` must outlive them.
  MemoryRows(const TableConfig& table, const Optimizer& optimizer, std::uint32_t shard);

  const TableConfig& config;
  RowStore store;
  Header& header;
  RowIndex index;
  Expiry expiry;
  Snapshots snapshots;
  ChangeLog changes;
  EvictionQueue eviction;

  // Advances the clock whose value is the stamp of the rows that a request touches.
  void tick();
  // Returns whether a row has expired.
  bool expired(std::uint32_t number) const { return expiry.expired(store.row(number)->stamp); }
  // Returns the number of a row that is there; kNone if there is none or it has expired.
  std::uint32_t present(std::uint32_t number) const {
    return number == Index::kNone || expired(number) ? Index::kNone : number;
  }
  // Makes a row as recent as the request, and changes nothing else of it.
  void touch(std::uint32_t number) {
    snapshots.before_change(number);
    renew(number);
  }
  // Makes a row as recent as the request, whose change has been noted.
  void renew(std::uint32_t number) {
    RowHeader& r = *store.row(number);
    const std::uint32_t before = r.stamp;
    r.stamp = header.clock;
    eviction.touch(store.stamps(), header.clock, number, before);
  }
  // Returns the stamp that a new row begins with.
  std::uint32_t first_stamp() const {
    return config.eviction == Eviction::kMidpoint ? eviction.midpoint(header.clock) : header.clock;
  }
  // Returns whether the last gradient of a row counts as a use of it. With midpoint insertion the first one does not:
  // it belongs to the lookup that inserted the row, and would make it as recent as a row that was met again.
  bool makes_recent(std::uint32_t number) const {
    return config.eviction == Eviction::kLru || store.row(number)->update_count > 1;
  }

  // Prepares the expired row of an id to be written again.
  void reuse(std::uint32_t number) {
    snapshots.before_change(number);
    store.save_undo(number);
    renew(number);
  }
  // Returns the place of a new row of an id, to be written and then published: that of an expired row, the next unused
  // one, or, in a full table, that of the least recently used row, which this call evicts: its place in the index goes
  // to the new id. For tables without a tier. Throws RegionFull, or std::runtime_error if the row is damaged; then
  // nothing has changed.
  std::uint32_t acquire(std::uint64_t id);
  // Returns the next unused place, with memory. Throws RegionFull.
  std::uint32_t next_place();
  // Makes a row reachable that has been written completely, unless it has taken the place of another.
  void publish(std::uint64_t id, std::uint32_t number);
  // Notes that the row of an id, of memory or of the tier, is in the table no more.
  void note_removed(std::uint32_t number, std::uint64_t id) noexcept {
    snapshots.evict(id);
    changes.remove(store.mark_of(number), id);
  }
  // Removes a row, whose place the last row gets. For tables without a tier. The queue of rows to evict must be cleared
  // next. Throws std::runtime_error if the row is damaged.
  void remove(std::uint32_t number);
  // Builds the queue of rows to evict if there is none and the shard is nearly full.
  void prepare_eviction() noexcept;
  // Removes all rows and frees their memory.
  void clear();
};

}  // namespace persia
