#include "persia/snapshot.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "persia/shard.hpp"

namespace persia {
namespace {

constexpr std::size_t kReadBytes = std::size_t{16} << 10;
constexpr std::size_t kWriteBytes = std::size_t{64} << 10;

[[noreturn]] void fail_io(const std::string& what, const std::string& directory) {
  throw std::runtime_error("cannot " + what + " the file of old rows in " + directory + ": " + std::strerror(errno));
}

Spill::Tag tag_of(const std::byte* record) {
  Spill::Tag tag{};
  std::memcpy(&tag, record, sizeof(tag));
  return tag;
}

}  // namespace

Spill::Spill(std::string directory, std::size_t stride, std::size_t buffer_bytes)
    : directory_(std::move(directory)),
      stride_(stride),
      record_(sizeof(Tag) + stride),
      buffer_records_(std::max<std::size_t>(buffer_bytes / record_, 1)) {}

Spill::~Spill() {
  if (file_ >= 0) close(file_);
}

void Spill::add(Tag tag, const std::byte* row) {
  if (tags_.size() == buffer_records_) flush();
  if (!buffer_) {
    tags_.reserve(buffer_records_);
    buffer_ = std::make_unique_for_overwrite<std::byte[]>(buffer_records_ * stride_);
  }
  std::memcpy(buffer_.get() + tags_.size() * stride_, row, stride_);
  tags_.push_back(tag);
}

void Spill::open_file() {
  file_ = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ >= 0) return;
  std::string name = directory_ + "/persia-spill-XXXXXX";  // not every file system has O_TMPFILE
  file_ = mkostemp(name.data(), O_CLOEXEC);
  if (file_ < 0) fail_io("make", directory_);
  unlink(name.c_str());
}

void Spill::flush() {
  if (file_ < 0) open_file();
  std::vector<std::uint64_t> order(tags_.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = std::uint64_t{tags_[i].number} << 32 | i;
  std::sort(order.begin(), order.end());
  const std::size_t most = std::max<std::size_t>(kWriteBytes / record_, 1);
  const auto piece = std::make_unique_for_overwrite<std::byte[]>(most * record_);
  const std::uint64_t begin = file_bytes_;
  for (std::size_t i = 0; i < order.size();) {
    const std::size_t end = std::min(i + most, order.size());
    std::byte* to = piece.get();
    for (; i < end; ++i, to += record_) copy_record(static_cast<std::uint32_t>(order[i]), to);
    write_all(piece.get(), static_cast<std::size_t>(to - piece.get()));
  }
  runs_.push_back({begin, order.size(), static_cast<std::uint32_t>(order[0] >> 32)});
  tags_.clear();
}

void Spill::copy_record(std::size_t i, std::byte* to) const {
  std::memcpy(to, &tags_[i], sizeof(Tag));
  std::memcpy(to + sizeof(Tag), buffer_.get() + i * stride_, stride_);
}

const std::vector<Spill::Old>& Spill::take(std::uint64_t end) {
  taken_.clear();
  old_.clear();
  for (std::size_t i = 0; i < tags_.size();) {
    if (tags_[i].number >= end) {
      ++i;
      continue;
    }
    taken_.resize(taken_.size() + record_);
    copy_record(i, taken_.data() + taken_.size() - record_);
    const std::size_t last = tags_.size() - 1;
    if (i != last) std::memcpy(buffer_.get() + i * stride_, buffer_.get() + last * stride_, stride_);
    tags_[i] = tags_[last];
    tags_.pop_back();
  }
  for (Run& run : runs_) read_run(run, end);
  std::erase_if(runs_, [](const Run& run) { return run.left == 0; });
  for (std::size_t at = 0; at < taken_.size(); at += record_) {
    const std::byte* record = taken_.data() + at;
    old_.push_back({tag_of(record), record + sizeof(Tag)});
  }
  std::sort(old_.begin(), old_.end(), [](const Old& a, const Old& b) { return a.tag.number < b.tag.number; });
  return old_;
}

void Spill::read_run(Run& run, std::uint64_t end) {
  const std::size_t most = std::max<std::size_t>(kReadBytes / record_, 2);
  while (run.left > 0 && run.next < end) {
    const std::size_t count = std::min<std::uint64_t>(most, run.left);
    const std::size_t before = taken_.size();
    taken_.resize(before + count * record_);
    read_all(run.at, taken_.data() + before, count * record_);
    std::size_t below = 0;
    while (below < count && tag_of(taken_.data() + before + below * record_).number < end) ++below;
    if (below < count) run.next = tag_of(taken_.data() + before + below * record_).number;
    taken_.resize(before + below * record_);
    run.at += below * record_;
    run.left -= below;
    if (below < count) return;
  }
}

void Spill::write_all(const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = pwrite(file_, data, bytes, static_cast<off_t>(file_bytes_));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_io("write", directory_);
    data += done;
    bytes -= static_cast<std::size_t>(done);
    file_bytes_ += static_cast<std::uint64_t>(done);
  }
}

void Spill::read_all(std::uint64_t at, std::byte* data, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t done = pread(file_, data, bytes, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_io("read", directory_);
    data += done;
    bytes -= static_cast<std::size_t>(done);
    at += static_cast<std::uint64_t>(done);
  }
}

Cut::Cut(const CutOptions& options, std::uint64_t rows, std::size_t stride, Changes& before)
    : epoch_(options.epoch),
      all_(options.since == 0),
      live_(options.live),
      expired_before_(options.expired_before),
      rows_(rows),
      spill_(options.directory, stride, options.buffer_bytes),
      before_(std::move(before)) {}

void ChangedRows::set(std::uint32_t row, bool changed) noexcept {
  try {
    if (row / 64 >= words_.size()) words_.resize(row / 64 + 1, ~std::uint64_t{0});
  } catch (const std::bad_alloc&) {
    return;  // then it counts as changed
  }
  const std::uint64_t bit = std::uint64_t{1} << (row % 64);
  words_[row / 64] = changed ? words_[row / 64] | bit : words_[row / 64] & ~bit;
}

void Cut::spill_row(Spill::Tag tag, const std::byte* row) noexcept {
  try {
    spill_.add(tag, row);
  } catch (const std::exception& error) {
    fail(error.what());
  }
}

void Cut::fail(const std::string& why) noexcept {
  try {
    failure_ = why;
  } catch (...) {
    failure_ = "lost";  // short enough to need no memory
  }
}

const std::vector<Spill::Old>& Cut::pass(std::uint64_t end) {
  if (!failure_.empty()) throw std::runtime_error(failure_);
  next_ = end;
  try {
    return spill_.take(end);
  } catch (const std::exception& error) {
    fail(error.what());  // What has been taken off the spill is in nobody's hands.
    throw;
  }
}

void Shard::begin_cut(const CutOptions& options) {
  const std::lock_guard lock(mutex_);
  check_no_cut();
  if (options.epoch <= header_->epoch) throw std::invalid_argument("the epoch of a snapshot must be a new one");
  if (options.since != 0 && options.since != changes_.since) {
    throw std::invalid_argument("what has changed since epoch " + std::to_string(options.since) + " is not known");
  }
  Changes after{options.epoch,
                options.evicted_limit,
                {},
                ChangedRows(header_->rows_used),
                ChangedRows(tier_ ? tier_->log.end_record() : 0)};
  CutOptions now = options;
  now.expired_before = expiry_.expired_before();
  now.live = options.live && !tier_;  // rows that move to disk and back would be missed, or read twice
  if (tier_) prepare_cold_cut();
  cut_ = std::make_unique<Cut>(now, header_->rows_used, rows_.stride(), changes_);
  changes_ = std::move(after);
  if (tier_) begin_cold_cut();
  header_->epoch = options.epoch;
}

Cut& Shard::cut_of(std::uint32_t epoch) const {
  if (!cut_ || cut_->epoch() != epoch)
    throw std::runtime_error("there is no such snapshot of this shard: it was ended");
  return *cut_;
}

bool Shard::export_cut(std::uint32_t epoch, std::uint64_t max_rows, RowBatch& rows) {
  for (const std::size_t before = rows.ids.size(); rows.ids.size() - before < max_rows;) {
    const std::lock_guard lock(mutex_);
    Cut& cut = cut_of(epoch);
    const std::uint64_t begin = cut.next();
    const std::uint64_t end = std::min(begin + kRowsPerLock, cut.rows());
    const auto& old = cut.pass(end);
    auto spilled = old.begin();
    for (std::uint64_t number = begin; number < end; ++number) {
      if (spilled != old.end() && spilled->tag.number == number) {
        const auto& old_row = *reinterpret_cast<const RowHeader*>(spilled->row);
        if (!cut.had_expired(old_row.stamp)) rows_.append(spilled->row, spilled->tag.last_step, rows);
        // A row that was about to change, and did not as there was no room, is there twice, with the same bytes.
        while (spilled != old.end() && spilled->tag.number == number) ++spilled;
      } else if (const auto n = static_cast<std::uint32_t>(number); cut.wanted(n, changes_.rows)) {
        if (!cut.had_expired(rows_.row(n)->stamp)) rows_.append(n, rows);
      }
    }
    if (end < cut.rows()) continue;
    if (!tier_ || !export_cold_cut(cut, rows)) return false;
  }
  return true;
}

std::vector<std::uint64_t> Shard::cut_evicted(std::uint32_t epoch) {
  const std::lock_guard lock(mutex_);
  return cut_of(epoch).evicted();
}

std::uint32_t Shard::changes_since() {
  const std::lock_guard lock(mutex_);
  return changes_.since;
}

void Shard::end_cut() {
  const std::lock_guard lock(mutex_);
  end_cold_cut();
  cut_.reset();
}

void Shard::check_no_cut() const {
  if (cut_) throw std::runtime_error("a checkpoint is being read from these rows: wait for its end");
}

}  // namespace persia
