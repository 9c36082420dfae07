#include "persia/old_rows.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace persia {
namespace {

constexpr std::size_t kReadBytes = std::size_t{16} << 10;
constexpr std::size_t kWriteBytes = std::size_t{64} << 10;

[[noreturn]] void fail_io(const std::string& what, const std::string& directory) {
  throw std::runtime_error("cannot " + what + " the file of old rows in " + directory + ": " + std::strerror(errno));
}

OldRows::Tag tag_of(const std::byte* record) {
  OldRows::Tag tag{};
  std::memcpy(&tag, record, sizeof(tag));
  return tag;
}

}  // namespace

OldRows::OldRows(std::string directory, std::size_t stride, std::size_t buffer_bytes)
    : directory_(std::move(directory)),
      stride_(stride),
      record_(sizeof(Tag) + stride),
      buffer_records_(std::max<std::size_t>(buffer_bytes / record_, 1)) {}

OldRows::~OldRows() {
  if (file_ >= 0) close(file_);
}

void OldRows::add(Tag tag, const std::byte* row) {
  if (tags_.size() == buffer_records_) flush();
  if (!buffer_) {
    tags_.reserve(buffer_records_);
    buffer_ = std::make_unique_for_overwrite<std::byte[]>(buffer_records_ * stride_);
  }
  std::memcpy(buffer_.get() + tags_.size() * stride_, row, stride_);
  tags_.push_back(tag);
}

void OldRows::open_file() {
  file_ = open(directory_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file_ >= 0) return;
  std::string name = directory_ + "/persia-old-rows-XXXXXX";  // not every file system has O_TMPFILE
  file_ = mkostemp(name.data(), O_CLOEXEC);
  if (file_ < 0) fail_io("make", directory_);
  unlink(name.c_str());
}

void OldRows::flush() {
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

void OldRows::copy_record(std::size_t i, std::byte* to) const {
  std::memcpy(to, &tags_[i], sizeof(Tag));
  std::memcpy(to + sizeof(Tag), buffer_.get() + i * stride_, stride_);
}

const std::vector<OldRows::Old>& OldRows::take(std::uint64_t end) {
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

void OldRows::read_run(Run& run, std::uint64_t end) {
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

void OldRows::write_all(const std::byte* data, std::size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = pwrite(file_, data, bytes, static_cast<off_t>(file_bytes_));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_io("write", directory_);
    data += done;
    bytes -= static_cast<std::size_t>(done);
    file_bytes_ += static_cast<std::uint64_t>(done);
  }
}

void OldRows::read_all(std::uint64_t at, std::byte* data, std::size_t bytes) const {
  while (bytes > 0) {
    const ssize_t done = pread(file_, data, bytes, static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) fail_io("read", directory_);
    data += done;
    bytes -= static_cast<std::size_t>(done);
    at += static_cast<std::uint64_t>(done);
  }
}

}  // namespace persia
