// The layout of a region: header | undo slot | sketch | index | rows | last steps. This is format version 3.
//
// A region holds offsets, never pointers, and no locks. It holds everything that a process needs to attach to it.
//
// Reserved bytes of the header are 0 until a later version gives them a meaning; 0 then means that it is not used.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "persia/region.hpp"

namespace persia {

// Bits of a row number within a shard, and of a tag in its index. A build with 16 shows within seconds what happens in
// a shard of as many rows as it has numbers; its regions are not those of other builds.
#ifndef PERSIA_ROW_BITS
#define PERSIA_ROW_BITS 32
#endif
inline constexpr unsigned kRowBits = PERSIA_ROW_BITS;
static_assert(kRowBits == 16 || kRowBits == 32);
inline constexpr auto kRowMask = static_cast<std::uint32_t>((std::uint64_t{1} << kRowBits) - 1);
inline constexpr std::uint64_t kMaxRows = kRowMask - 1u;  // of a shard
// Stamp of a row of memory that holds none, as its row has moved to the tier (tier.hpp). No clock gets there.
inline constexpr std::uint32_t kVacant = 0xFFFFFFFFu;
inline constexpr std::uint32_t kLastClock = kVacant - 1;

inline constexpr std::uint64_t kMagic = 0x3130414953524550u;  // "PERSIA01" in memory order
inline constexpr std::uint32_t kFormat = 3;
inline constexpr std::size_t kClients = 256;
inline constexpr std::size_t kOpenPushes = 32;
inline constexpr std::size_t kNameBytes = 64;
inline constexpr std::size_t kHeaderBytes = 16384;
inline constexpr std::size_t kSketchRows = 4;
// Slots after the last home position. Runs of this length do not occur by chance (< 1e-700 at the highest load).
inline constexpr std::uint64_t kIndexTail = 4096;

// What precedes the values of a row. Rows follow each other without padding, so they are aligned to 4 bytes, and the
// key is read as bytes.
struct RowHeader {
  std::byte key_bytes[8];
  std::uint32_t update_count;
  std::uint32_t stamp;

  std::uint64_t key() const {
    std::uint64_t key = 0;
    std::memcpy(&key, key_bytes, sizeof(key));
    return key;
  }
  void set_key(std::uint64_t key) { std::memcpy(key_bytes, &key, sizeof(key)); }
};
static_assert(sizeof(RowHeader) == 16 && alignof(RowHeader) == 4);

// The pushes of one client that a shard has applied. `last` is the highest number; bit i of `recent` says whether
// last - 1 - i has been applied, too. `used` orders the entries by recency, so that the oldest is replaced.
struct ClientEntry {
  std::uint64_t client;
  std::uint64_t last;
  std::uint64_t recent;
  std::uint64_t used;
};
inline constexpr std::size_t kClientWords = 4;
static_assert(sizeof(ClientEntry) == kClientWords * 8);

// A push that a crash interrupted after `rows` rows and that has not been retried yet. Client 0: none.
struct OpenPush {
  std::uint64_t client;
  std::uint64_t sequence;
  std::uint64_t rows;
  std::uint64_t used;
};

struct Counters {
  std::uint64_t lookups;  // hits + misses, computed when read: each lookup writes one counter only
  std::uint64_t hits;
  std::uint64_t misses;
  std::uint64_t admitted;
  std::uint64_t rejected;
  std::uint64_t evicted;
  std::uint64_t applied;
  std::uint64_t absent;
  std::uint64_t nonfinite;
  std::uint64_t duplicates;
};
inline constexpr std::size_t kCounters = 10;
static_assert(sizeof(Counters) == kCounters * 8);

struct PushProgress {
  std::uint64_t client;
  std::uint64_t sequence;
  std::uint64_t rows_applied;  // in the push's own order, skipped rows included
};

// Which rows of a table with a time to live have expired. Its clock counts in the unit of that time, from the first row
// on; marks say which stamp belonged to a time.
struct TtlMark {
  std::uint64_t time;
  std::uint32_t clock;
  std::uint32_t unused;
};
inline constexpr std::size_t kTtlMarks = 32;
struct TtlState {
  std::uint64_t time;
  std::uint64_t marks_made;      // the last `kTtlMarks` of them are kept, mark i at i % kTtlMarks
  std::uint32_t expired_before;  // rows with lower stamps have expired, whether or not their memory is used again
  std::uint32_t unit;            // that of `TableConfig::ttl_unit`; 0 before the first row
  TtlMark marks[kTtlMarks];
};

// Values of `TierState::rebuilding`.
inline constexpr std::uint32_t kRebuilding = 1;  // the slots of rows of the tier are in a file of their own
inline constexpr std::uint32_t kClearing = 2;    // all rows are being removed

// The tier (tier.hpp). All 0 in tables without one.
struct TierState {
  std::uint64_t log;          // id of the file of rows; 0: none
  std::uint64_t next_record;  // number behind its last record
  std::uint64_t move_row;     // row + 1 whose place in the index is about to become, or to have been, `move_record`
  std::uint32_t move_record;
  std::uint32_t rebuilding;  // kRebuilding, kClearing or 0
  std::uint64_t demoted;     // rows that have moved to the tier ...
  std::uint64_t read;        // ... records that requests have read there ...
  std::uint64_t promoted;    // ... rows that have moved back to memory ...
  std::uint64_t compacted;   // ... and rows that were written again, to free the space of others
};

// Values of `Header::busy`, which show the state of a shard whose process was killed.
inline constexpr std::uint32_t kRowsBusy = 1;   // a request was running
inline constexpr std::uint32_t kIndexBusy = 2;  // and it was changing the index

struct Header {
  std::uint64_t magic;
  // Never changed after creation, and covered by `check`:
  std::uint32_t format;
  std::uint32_t durable;
  std::uint64_t name_hash;
  char name[kNameBytes];
  std::uint32_t dim;
  std::uint32_t optimizer;
  std::uint32_t state_width;
  std::uint32_t row_stride;
  std::uint64_t capacity;
  std::uint64_t seed;
  std::uint32_t shard;
  std::uint32_t shards;
  std::uint64_t sketch_width;
  std::uint64_t settings;  // hash of the other settings that determine the values of rows
  std::uint64_t check;
  // Changed by requests:
  std::uint64_t owner;  // process that has, or had, the region
  std::uint64_t rows_used;
  std::uint64_t rows_backed;   // there is memory for this number of rows ...
  std::uint64_t index_backed;  // ... and index slots, the tail included
  std::uint64_t index_slots;
  std::uint32_t clock;
  std::uint32_t snapshot;  // id of the last one; 1 before the first
  std::uint32_t busy;
  std::uint32_t commit_slot;  // entry + 1 of `clients` that `commit_entry` is about to replace
  std::uint64_t undo_row;     // row + 1 whose bytes the undo slot holds ...
  std::uint64_t undo_mark;    // ... unless push.rows_applied has moved on from here: then the row is complete
  std::uint64_t client_clock;
  PushProgress push;
  ClientEntry commit_entry;
  Counters counters;
  std::uint64_t index_old_slots;  // home slots of tags above the frontier; 0 unless the index grows (index.hpp)
  std::uint32_t index_frontier;
  std::uint32_t keeps_last_steps;  // 1: the section of last steps is in use
  TierState tier;
  std::uint64_t removing;  // last row << 32 | the row whose place it is taking, as that is being removed; 0: none
  std::uint8_t reserved[112 - sizeof(TierState)];
  OpenPush open[kOpenPushes];
  ClientEntry clients[kClients];
  TtlState ttl;
};
static_assert(offsetof(Header, dim) == 88);
static_assert(offsetof(Header, capacity) == 104);
static_assert(offsetof(Header, check) == 144);
static_assert(offsetof(Header, rows_used) == 160);
static_assert(offsetof(Header, clock) == 192);
static_assert(offsetof(Header, push) == 232);
static_assert(offsetof(Header, counters) == 288);
static_assert(offsetof(Header, index_old_slots) == 368);
static_assert(offsetof(Header, open) == 504);
static_assert(offsetof(Header, clients) == 1528);
static_assert(offsetof(Header, ttl) == 9720);
static_assert(sizeof(Header) <= kHeaderBytes);

// Offsets and sizes of the sections of a region. They follow from numbers in the header alone.
struct Layout {
  std::size_t undo, sketch, sketch_bytes, index, index_bytes, rows, rows_bytes, last_steps, total;
  std::uint64_t max_slots;

  // Returns the layout of a shard. The index has room for `indexed` rows, of which `capacity` are in memory.
  static Layout of(std::uint64_t capacity, std::size_t row_stride, std::uint64_t sketch_width,
                   std::uint64_t indexed = 0) {
    Layout l{};
    indexed = std::max(indexed, capacity);
    l.max_slots = align_up(indexed + indexed / 4 + 64, 8);  // whole cache lines
    l.undo = kHeaderBytes;
    l.sketch = align_up(l.undo + row_stride + sizeof(std::uint32_t), 4096);  // the undo slot: a row and its last step
    l.sketch_bytes = sketch_width * kSketchRows * sizeof(std::uint16_t);
    l.index = align_up(l.sketch + l.sketch_bytes, kHugePage);
    l.index_bytes = (l.max_slots + kIndexTail) * sizeof(std::uint64_t);
    l.rows = align_up(l.index + l.index_bytes, kHugePage);
    l.rows_bytes = capacity * row_stride;
    l.last_steps = align_up(l.rows + l.rows_bytes, 4096);
    l.total = l.last_steps + capacity * sizeof(std::uint32_t);
    return l;
  }
};

}  // namespace persia
