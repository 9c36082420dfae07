// Chooses the row to evict, that with the smallest (stamp, row number), without maintaining an ordered list.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace persia {

// Access to the stamps of a shard's rows.
struct Stamps {
  std::byte* rows;
  std::size_t stride;
  std::uint64_t count;

  std::uint32_t& operator[](std::uint64_t row) const;
};

// Queues the oldest eighth of the rows in order, and skips rows touched since. When half of them remain, a scan begins
// for a queue that has another eighth. It proceeds by a few rows with each row that leaves the queue, whether evicted
// or touched, so that no caller waits for all of it. The rows that were evicted meanwhile are skipped, also by a
// few at a time, before its queue is used. The order is exact since stamps only rise: whatever is as old as the
// threshold of a scan when it ends was so at any moment of it. The queue is derived from the stamps, so dropping it
// only causes an immediate scan.
class EvictionQueue {
 public:
  static constexpr std::size_t kRun = 1024;

  // Sorts `run` rows at a time.
  explicit EvictionQueue(std::size_t run = kRun) : run_(run) {}

  // Returns the least recently used row. `clock` is the stamp of the current batch. If all rows have it, returns row 0.
  std::uint32_t front(const Stamps& stamps, std::uint32_t clock);
  // Removes the row that `front` returned; the caller evicts it.
  void pop(const Stamps& stamps, std::uint32_t clock) noexcept;
  // Prepares the first queue by a few rows. To be called with each row added while there is space for `space` more.
  void prepare(const Stamps& stamps, std::uint32_t clock, std::uint64_t space) noexcept;
  // Builds the queue immediately, if there is none and the space for more rows is at most a sixteenth of the rows that
  // there are, so that the first request after a restart does not wait for a scan.
  void make_ready(const Stamps& stamps, std::uint32_t clock, std::uint64_t space) noexcept;
  // Notes that a row with the stamp `before` has got that of the current batch.
  void touch(const Stamps& stamps, std::uint32_t clock, std::uint32_t row, std::uint32_t before) noexcept {
    if (before < next_.end) leave(stamps, clock, row, before);
  }
  // Drops the queue.
  void clear();
  // Returns a stamp that is more recent than about three eighths of the rows, for a row that is to leave soon unless it
  // is touched: `clock` before the first scan. It is never below what a scan looks for, so the order stays exact.
  std::uint32_t midpoint(std::uint32_t clock) const { return midpoint_ == 0 ? clock : midpoint_; }

  // Returns the number of rows that scans and their samples have read.
  std::uint64_t read() const { return read_; }
  // Returns the number of rows that have been skipped, as they had been touched or evicted.
  std::uint64_t skipped() const { return skipped_; }

 private:
  // Rows in order, of which those before `at` have left.
  struct Run {
    std::unique_ptr<std::uint32_t[]> rows;
    std::size_t at;
    std::size_t size;
  };
  // The first row of a run: stamp << 32 | row.
  struct Head {
    std::uint64_t entry;
    std::size_t run;

    bool operator>(const Head& other) const { return entry > other.entry; }
  };
  struct Queue {
    std::uint32_t end = 0;   // above the stamps of its rows
    std::uint64_t live = 0;  // rows that have not been touched since
    std::vector<Run> runs;
    std::vector<Head> heads;  // a heap, the oldest first
  };

  bool scanning() const { return next_.end > current_.end; }
  void leave(const Stamps& stamps, std::uint32_t clock, std::uint32_t row, std::uint32_t before) noexcept;
  static bool first_has_left(const Queue& queue, const Stamps& stamps);
  void skip(Queue& queue, const Stamps& stamps, std::size_t most);
  bool refill(const Stamps& stamps, std::uint32_t clock);
  void advance(const Stamps& stamps, std::uint32_t clock) noexcept;
  void begin(const Stamps& stamps, std::uint32_t clock);
  void collect(const Stamps& stamps, std::uint64_t count);
  void end_run();
  void finish(const Stamps& stamps);
  void change();

  std::size_t run_;
  Queue current_;
  Queue next_;                           // that of a scan, until it is used; without one `end` is that of `current_`
  std::uint64_t cursor_ = 0;             // the scan has read the rows before it ...
  std::uint64_t rows_ = 0;               // ... and ends here
  std::uint64_t pace_ = 0;               // rows that it reads for each one that leaves the queue
  std::uint64_t space_ = 0;              // rows that fit without an eviction
  bool used_ = false;                    // rows have been added or evicted since the last scan began
  std::vector<std::uint64_t> unsorted_;  // stamp << 32 | row, of the next run
  std::uint32_t exhausted_ = 0;          // a clock at which no row was older
  std::uint32_t midpoint_ = 0;           // of the stamps when the last scan began; 0: unknown
  std::uint64_t read_ = 0;
  std::uint64_t skipped_ = 0;
};

// Replaces stamps by their ranks 0, 1, ...; returns the largest. This keeps the order of eviction, even if a kill
// interrupts it: no rank exceeds its stamp, and rows change from the oldest on. With `vacancies`, rows with the stamp
// kVacant hold none, and keep it.
std::uint32_t renumber(const Stamps& stamps, bool vacancies = false);

}  // namespace persia
