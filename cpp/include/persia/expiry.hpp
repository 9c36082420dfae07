// The rows of a shard that expire: those that were not touched for the table's time to live.
#pragma once
#include <cstdint>
#include <vector>

#include "persia/index.hpp"
#include "persia/layout.hpp"
#include "persia/row_store.hpp"

namespace persia {

// Not thread-safe: guarded by the lock of its shard.
//
// Whether a row has expired follows from its stamp. Nothing is done for it when it does: it counts as absent, and its
// memory goes to a new row, each of which looks at a few rows for one.
class Expiry {
 public:
  // `config` and `rows` must outlive it.
  Expiry(const TableConfig& config, RowStore& rows)
      : config_(&config), rows_(&rows), state_(&rows.header().ttl), expired_before_(state_->expired_before) {}
  Expiry(const Expiry&) = delete;
  Expiry& operator=(const Expiry&) = delete;

  // Advances the clock of the time to live, by units of `TableConfig::ttl_unit`. Rows that were last touched longer
  // than `ttl` ago, or up to a sixteenth of it later, expire.
  void advance_clock(std::uint64_t by);
  // Returns the stamp below which rows have expired.
  std::uint32_t expired_before() const { return expired_before_; }
  // Returns whether a row with this stamp has expired.
  bool expired(std::uint32_t stamp) const { return stamp < expired_before_; }
  // Returns the least stamp of an imported row, which counts as touched now.
  std::uint32_t least_stamp() const;

  // Returns an expired row of memory to write to; kNone if none is found. Looks at a few rows only, so that no request
  // waits for a scan of all, and lists those that it does not need yet: expired rows lie together, and so do others.
  std::uint32_t reusable();
  // Forgets the rows that `reusable` has listed, as rows got other stamps.
  void forget();
  // Forgets them, and looks at all rows again, as rows got other places.
  void look_again();
  // Gives all rows small stamps in the same order, and the shard's clock the last of them: once in 2^32 requests. What
  // has expired stays so; after a kill in between it is back for another time to live.
  void renumber();

  // Returns whether a state is one that this class makes, at this clock of the shard.
  static bool sound(const TtlState& state, std::uint32_t clock);
  // Takes over another state, as of a checkpoint.
  void set(const TtlState& state);
  // Forgets the time: no row has expired. If a process died while it set the state, rows stay for another time to live.
  void mend();

 private:
  void set_expired_before(std::uint32_t stamp) { state_->expired_before = expired_before_ = stamp; }

  const TableConfig* config_;
  RowStore* rows_;
  TtlState* state_;
  std::uint32_t expired_before_;       // that of the state, which each lookup reads
  std::vector<std::uint32_t> listed_;  // rows that had expired when they were looked at
  std::uint64_t sweep_ = 0;            // the next row to look at ...
  std::uint64_t sweep_rows_ =
      0;  // ... and how many there are, until all have been looked at since the last ones expired
};

}  // namespace persia
