// Which rows of a batch an NN worker has copies of on its device, and which it has to look up
// (docs/decisions/0009-device-cache.md).
//
// Copies are direct-mapped: an id has one slot of its table, and the row that was looked up last has it. Only ids and
// ages are here; the rows are on the device.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "persia/thread_pool.hpp"

namespace persia {

// The slots of a table, and its ids in a batch.
struct CopiedTable {
  std::span<const std::uint64_t> ids;  // distinct
  std::span<std::uint64_t> slot_ids;   // by slot the id that has it; there is one slot or more, and up to 2^31 - 2
  std::span<std::int64_t> slot_steps;  // by slot the number of steps that its row contains, and 1; 0 if empty
  bool* wanted = nullptr;              // result: by id, whether to look it up
  std::uint32_t first_row = 0;         // added to places among the rows of the batch
  std::uint32_t first_slot = 0;        // added to slots
  std::uint32_t spare = 0;             // instead of the slot of a row that has lost it to another of this batch
  std::size_t hits = 0;                // result
};

// A copy may serve step `step` if it lacks at most `limit` of the steps before. Rows that are looked up now contain
// `applied` steps.
struct CopyTime {
  std::int64_t step = 0;
  std::int64_t applied = 0;
  std::int64_t limit = 0;
};

// Takes slots for the rows to look up. `places` has two entries per id, and gets for the tables one after another: the
// places of the hits in the batch; then the slots of the hits; the places of the other rows; and the slots that those
// take. Returns how many steps the oldest copy lacks, 0 if none serves. Tables run in parallel; blocks until done.
// Throws std::invalid_argument, before anything changes, if the sizes do not fit.
std::int64_t plan_copies(std::span<CopiedTable> tables, const CopyTime& at, std::span<std::int32_t> places,
                         ThreadPool& pool);

}  // namespace persia
