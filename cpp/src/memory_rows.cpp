#include "persia/memory_rows.hpp"

#include "persia/memory.hpp"

namespace persia {

MemoryRows::MemoryRows(const TableConfig& table, const Optimizer& optimizer, std::uint32_t shard)
    : config(table),
      store(table, optimizer, shard),
      header(store.header()),
      index(store, table),
      expiry(table, store),
      snapshots(store) {}

void MemoryRows::tick() {
  if (header.clock >= kLastClock) {
    snapshots.fail("the recency of all rows was renumbered (once in 2^32 requests); save again");
    changes.lose();
    expiry.renumber();
    eviction.clear();
  }
  ++header.clock;
}

// Evicts: in a full table, the new row gets the place of the least recently used one (`eviction.front`, then
// `eviction.pop`), unless a row has expired. Everything that may fail comes first.
std::uint32_t MemoryRows::acquire(std::uint64_t id) {
  const std::uint32_t reused = expiry.reusable();
  if (reused == Index::kNone && header.rows_used < header.capacity) return next_place();
  const std::uint32_t number = reused == Index::kNone ? eviction.front(store.stamps(), header.clock) : reused;
  snapshots.before_change(number);
  index.insert(id, number);
  store.save_undo(number);
  const std::uint64_t before = store.row(number)->key();
  if (!index.erase(before, number)) {
    index.erase(id, number);
    store.drop_undo();
    throw store.damaged(number);
  }
  if (reused == Index::kNone) {
    eviction.pop(store.stamps(), header.clock);
    ++header.counters.evicted;
  } else {
    renew(number);
  }
  note_removed(number, before);
  return number;
}

std::uint32_t MemoryRows::next_place() {
  store.back_next_row();
  eviction.prepare(store.stamps(), header.clock, header.capacity - header.rows_used);
  return static_cast<std::uint32_t>(header.rows_used);
}

void MemoryRows::publish(std::uint64_t id, std::uint32_t number) {
  if (number != header.rows_used) return;
  const std::uint64_t rows = std::uint64_t{number} + 1;
  index.make_room(rows);
  index.insert(id, number);
  barrier();
  header.rows_used = rows;
}

// An expired row does not move: whoever lists expired rows may have passed its new place. It is removed as well.
void MemoryRows::remove(std::uint32_t number) {
  const auto take_out = [&](std::uint32_t row) {
    const std::uint64_t id = store.row(row)->key();
    if (!index.erase(id, row)) throw store.damaged(row);
    note_removed(row, id);
  };
  const auto drop_last = [&] {
    barrier();
    --header.rows_used;
    barrier();
  };
  const auto last = [&] { return static_cast<std::uint32_t>(header.rows_used - 1); };
  take_out(number);
  while (last() > number && expired(last())) {
    take_out(last());
    drop_last();
  }
  if (last() == number) return drop_last();
  const std::uint32_t from = last();
  if (!index.replace(store.row(from)->key(), from, number)) throw store.damaged(from);
  store.move_last_to(number);
  changes.move(from, number);
}

void MemoryRows::prepare_eviction() noexcept {
  eviction.make_ready(store.stamps(), header.clock, header.capacity - header.rows_used);
}

void MemoryRows::clear() {
  store.clear();
  index.clear();
  expiry.set({});
  barrier();
  header.clock = 0;
  header.counters = {};
  eviction.clear();
}

}  // namespace persia
