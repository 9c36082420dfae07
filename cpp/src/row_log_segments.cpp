// Segments of the file of rows: which records live, whose space is used again, and which one to compact.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <utility>

#include "persia/memory.hpp"
#include "persia/region.hpp"
#include "persia/row_log.hpp"

namespace persia {
namespace {

constexpr std::size_t kReserved = 1;       // segments that only compaction may begin
constexpr std::size_t kSpareSegments = 2;  // free ones that keep their space on disk

}  // namespace

// One that has space on disk is preferred, so that a full disk is met as late as possible; then the first one, so that
// the file stays short.
void RowLog::begin_segment(For what) {
  std::uint32_t chosen = kNone;
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    if (!segments_[s].is_free()) continue;
    if (chosen == kNone || segments_[s].has_space) chosen = s;
    if (segments_[s].has_space) break;
  }
  // Without a segment to write to, compaction could not free any.
  if (what == For::kCompaction ? segments_left() == 0 : exhausted()) {
    throw RegionFull("rows on disk " + path_ + ": all " + std::to_string(max_segments_ * segment_records_) +
                     " records are in use; lower the capacity of the table, or end the snapshot that is open");
  }
  if (chosen == kNone) {
    chosen = static_cast<std::uint32_t>(segments_.size());
    live_bits_.resize((end_record() + segment_records_ + 63) / 64);
    segments_.emplace_back().has_space = false;
  }
  Segment& segment = segments_[chosen];
  segment.writing = true;
  segment.aside = false;
  segment.born = born_++;
  ++segment.generation;
  head_ = std::uint64_t{chosen} * segment_records_;
}

void RowLog::revive(std::uint32_t record) {
  if (record >= end_record()) {
    fail("it ends before record " + std::to_string(record) +
             ": it was cut short. Go on from a checkpoint, with an empty table",
         0);
  }
  if (live(record)) return;
  live_bits_[record / 64] |= std::uint64_t{1} << (record % 64);
  ++segments_[segment_of(record)].live;
  ++live_records_;
}

void RowLog::forget() {
  std::fill(live_bits_.begin(), live_bits_.end(), 0);
  for (Segment& segment : segments_) segment.live = 0;
  live_records_ = 0;
}

void RowLog::release(std::uint32_t record) {
  if (!live(record)) return;
  live_bits_[record / 64] &= ~(std::uint64_t{1} << (record % 64));
  --live_records_;
  const std::uint32_t segment = segment_of(record);
  if (--segments_[segment].live == 0) trim(segment);
}

void RowLog::unpin(std::uint32_t segment) noexcept {
  if (--segments_[segment].pins == 0) trim(segment);
}

void RowLog::unpin_all() noexcept {
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    if (std::exchange(segments_[s].pins, 0) != 0) trim(s);
  }
}

std::size_t RowLog::free_segments() const {
  return static_cast<std::size_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const Segment& s) { return s.is_free(); }));
}

// Gives the space of a segment back to the disk if it is one more free segment than will soon be used again.
void RowLog::trim(std::uint32_t segment) noexcept {
  if (!segments_[segment].is_free()) return;
  const auto spare =
      std::count_if(segments_.begin(), segments_.end(), [](const Segment& s) { return s.is_free() && s.has_space; });
  if (static_cast<std::size_t>(spare) > kSpareSegments) punch(segment);
}

void RowLog::punch(std::uint32_t segment) noexcept {
  Segment& s = segments_[segment];
  ++s.generation;
  crash_point();
  // Where the file system cannot do this, the space stays with the file, to be used again.
  if (fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset_of_segment(segment)),
                static_cast<off_t>(segment_bytes_)) == 0) {
    s.has_space = false;
  }
  crash_point();
}

// Once a share d of all records is dead, the best segment has at least that share, so that its space costs at most
// (1 - d) / d writes for each record that is appended in it, 1 / d in all: at a third 3, while the file is at most
// half as large again as what lives in it. As rows that are met again leave holes where they are often met, the best
// segment is mostly far better than that.
std::uint32_t RowLog::candidate(std::uint32_t spared) const {
  const bool scarce = segments_left() <= kReserved + kSpareSegments;
  std::uint32_t best = kNone;
  std::uint64_t all = 0, alive = 0;
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.writing || segment.aside || segment.pins > 0 || segment.live == 0 || (s == spared && !scarce)) continue;
    all += segment_records_;
    alive += segment.live;
    if (best == kNone || segment.live < segments_[best].live) best = s;
  }
  if (best == kNone) return kNone;
  // Each segment that is compacted shall free an eighth of itself.
  const bool worth = 8 * (segment_records_ - segments_[best].live) >= segment_records_;
  return 3 * (all - alive) > all || (scarce && worth) ? best : kNone;
}

std::uint64_t RowLog::segments_left() const { return max_segments_ - segments_.size() + free_segments(); }

bool RowLog::exhausted() const { return segments_left() <= kReserved; }

std::uint32_t RowLog::oldest() const {
  std::uint32_t first = kNone;
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (segment.writing || segment.aside || segment.live == 0) continue;
    if (first == kNone || segment.born < segments_[first].born) first = s;
  }
  return first;
}

void RowLog::try_again() noexcept {
  for (Segment& segment : segments_) segment.aside = false;
}

std::uint64_t RowLog::set_aside_segments() const {
  return static_cast<std::uint64_t>(
      std::count_if(segments_.begin(), segments_.end(), [](const Segment& s) { return s.aside && s.live > 0; }));
}

std::uint64_t RowLog::disk_bytes() const {
  struct stat status{};
  return fstat(file_.get(), &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

// The file keeps its length: reads without the lock may be under way.
void RowLog::clear() {
  blocks_.clear();
  next_ = head_ = 0;
  live_records_ = 0;
  std::fill(live_bits_.begin(), live_bits_.end(), 0);
  for (std::uint32_t s = 0; s < segments_.size(); ++s) {
    Segment& segment = segments_[s];
    segment.writing = segment.aside = false;
    segment.live = 0;
    if (segment.pins == 0) {
      punch(s);
    } else {
      ++segment.generation;
    }
  }
}

}  // namespace persia
