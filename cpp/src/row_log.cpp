#include "persia/row_log.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "persia/checksum.hpp"
#include "persia/disk_faults.hpp"
#include "persia/memory.hpp"
#include "persia/region.hpp"

namespace persia {
namespace {

constexpr std::uint64_t kMagic = 0x3130474F4C535250u;  // "PRSLOG01" in memory order
constexpr std::uint32_t kFormat = 1;
constexpr std::size_t kWindow = 8 << 20;         // bytes of pages in memory, per call of `read`
constexpr std::size_t kLongestRead = 256 << 10;  // so that many are in flight where records neighbour each other
constexpr auto kLockRetry = std::chrono::milliseconds(5);

struct FileHeader {
  std::uint64_t magic;
  std::uint32_t format, segment_blocks;
  std::uint64_t id, row_bytes;
  std::uint32_t checksum, reserved;  // of all before it
};
static_assert(sizeof(FileHeader) == 40);

std::uint32_t checksum_of(const FileHeader& header) {
  return crc32(0, reinterpret_cast<const std::byte*>(&header), offsetof(FileHeader, checksum));
}

std::size_t page_begin(std::size_t bytes) { return bytes / RowLog::kPage * RowLog::kPage; }
std::size_t page_end(std::size_t bytes) { return align_up(bytes, RowLog::kPage); }

std::size_t record_bytes_of(std::size_t row_bytes) { return RowLog::kRecordHeader + align_up(row_bytes, 4); }

std::string mib(std::uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

std::string text(const char* what, std::uint64_t value) { return what + std::to_string(value); }

}  // namespace

RowLog::File::~File() {
  if (fd_ >= 0) close(fd_);
}

RowLog::Bytes RowLog::page_aligned(std::size_t bytes) {
  auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, page_end(bytes)));
  if (memory == nullptr) throw std::bad_alloc();
  return Bytes(memory);
}

void RowLog::fail(const std::string& what, int error) const {
  throw std::runtime_error("rows on disk " + path_ + ": " + what +
                           (error != 0 ? std::string(" (") + std::strerror(error) + ")" : ""));
}

void RowLog::fail_full(int error) const {
  struct statvfs system{};
  const bool known = fstatvfs(file_.get(), &system) == 0;
  throw RegionFull("rows on disk " + path_ + ": no room to grow beyond " + mib(disk_bytes()) + " (" +
                   std::strerror(error) + (known ? "; free there: " + mib(system.f_bavail * system.f_frsize) : "") +
                   "). Free space there, lower the capacity of the table, or spill to another directory");
}

std::size_t RowLog::block_records(std::size_t row_bytes) {
  return std::max<std::size_t>(1, kBlockBytes / record_bytes_of(row_bytes));
}

RowLog::RowLog(const Options& options, DiskReader& reader)
    : path_(options.path),
      reader_(&reader),
      row_bytes_(options.row_bytes),
      record_bytes_(record_bytes_of(options.row_bytes)),
      block_records_(block_records(options.row_bytes)),
      block_bytes_(page_end(block_records_ * record_bytes_)),
      segment_bytes_(block_bytes_ * options.segment_blocks),
      segment_records_(static_cast<std::uint32_t>(block_records_ * options.segment_blocks)),
      max_segments_(0) {
  const std::uint64_t of_segment = std::uint64_t{block_records_} * options.segment_blocks;
  if (row_bytes_ == 0 || of_segment == 0 || of_segment > kNone ||
      std::min<std::uint64_t>(options.max_records, kNone) < of_segment) {
    fail(text("Invalid max_records = ", options.max_records) + text(" with segments of ", of_segment) +
             text(" records of ", row_bytes_) + " bytes; expected one segment of a record or more at least",
         0);
  }
  max_segments_ = std::min<std::uint64_t>(options.max_records, kNone) / of_segment;
}

// --- The file ---------------------------------------------------------------------------------------------------

void RowLog::open_named(int flags) {
  flags |= O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  int fd = open(path_.c_str(), flags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) fd = open(path_.c_str(), flags, 0600);
  if (fd < 0 && errno == ENOENT && (flags & O_CREAT) == 0) {
    fail(
        "the file is gone, and with it the rows that had no place in memory. Go on from a checkpoint, with an empty "
        "table",
        0);
  }
  if (fd < 0) fail((flags & O_CREAT) != 0 ? "cannot be created" : "cannot be opened", errno);
  adopt(fd);
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("cannot be examined", errno);
  if (!S_ISREG(status.st_mode)) fail("is not a regular file; choose another directory", 0);
}

// The kernel frees a file that has no name when the process ends, however it ends.
void RowLog::open_unnamed() {
  const std::size_t slash = path_.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
  constexpr int flags = O_TMPFILE | O_RDWR | O_CLOEXEC;
  int fd = open(directory.c_str(), flags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) fd = open(directory.c_str(), flags, 0600);
  if (fd < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {  // no O_TMPFILE here
    std::string name = path_ + ".XXXXXX";
    fd = mkostemp(name.data(), O_CLOEXEC | O_DIRECT);
    if (fd < 0 && errno == EINVAL) {
      name = path_ + ".XXXXXX";
      fd = mkostemp(name.data(), O_CLOEXEC);
    }
    if (fd >= 0) unlink(name.c_str());
  }
  if (fd < 0) fail("cannot be created", errno);
  adopt(fd);
}

// Where O_DIRECT is refused, at least nothing is read ahead.
void RowLog::adopt(int fd) {
  file_ = File(fd);
  posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
}

// Some file systems accept the flag, but not what it means. Returns false if it was not set.
bool RowLog::leave_direct() const {
  const int flags = fcntl(file_.get(), F_GETFL);
  return (flags & O_DIRECT) != 0 && fcntl(file_.get(), F_SETFL, flags & ~O_DIRECT) == 0;
}

// A process that was killed gives the lock back once its last read has ended, which may take a moment.
void RowLog::lock(double seconds) const {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) fail("cannot be locked", errno);
    if (std::chrono::steady_clock::now() >= end) {
      fail("another process has it in use. End the other one (`fuser " + path_ +
               "` names it), or give each its own directory",
           0);
    }
    std::this_thread::sleep_for(kLockRetry);
  }
  struct stat here{}, there{};
  if (fstat(file_.get(), &here) != 0 || stat(path_.c_str(), &there) != 0 || here.st_ino != there.st_ino) {
    fail("the file was removed while this process waited for it; start again", 0);
  }
}

RowLog RowLog::create(const Options& options, DiskReader& reader) {
  RowLog log(options, reader);
  if (options.keep) {
    log.open_named(O_CREAT);
    log.lock(options.lock_seconds);
    if (ftruncate(log.file_.get(), 0) != 0) log.fail("cannot be emptied", errno);
  } else {
    log.open_unnamed();
  }
  log.write_header(options);
  return log;
}

RowLog RowLog::attach(const Options& options, std::uint64_t next, DiskReader& reader) {
  RowLog log(options, reader);
  log.open_named(0);
  log.lock(options.lock_seconds);
  log.check_header(options);
  if (next > log.max_segments_ * log.segment_records_) {
    log.fail(text("has ", next) + text(" records, more than max_records allows: ", options.max_records), 0);
  }
  struct stat status{};
  if (fstat(log.file_.get(), &status) != 0) log.fail("cannot be examined", errno);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  const std::uint64_t segments = size < kFileHeader ? 0 : (size - kFileHeader) / log.segment_bytes_;
  const std::uint64_t needed = (next + log.segment_records_ - 1) / log.segment_records_;
  if (segments < needed) {
    log.fail(text("has ", size) + text(" bytes, and its records need ", log.offset_of_segment(needed)) +
                 ": it was cut short. Go on from a checkpoint, with an empty table",
             0);
  }
  log.segments_.resize(std::min(segments, log.max_segments_));
  log.live_bits_.resize((log.end_record() + 63) / 64);
  for (Segment& segment : log.segments_) segment.born = log.born_++;
  log.next_ = log.head_ = next;
  if (next % log.segment_records_ != 0) {
    Segment& segment = log.segments_[log.segment_of(static_cast<std::uint32_t>(next))];
    segment.writing = true;
    segment.born = log.born_++;
  }
  log.load_last_block();
  return log;
}

void RowLog::write_header(const Options& options) {
  const Bytes bytes = page_aligned(kPage);
  std::memset(bytes.get(), 0, kPage);
  FileHeader header{kMagic, kFormat, static_cast<std::uint32_t>(options.segment_blocks), options.id, row_bytes_, 0, 0};
  header.checksum = checksum_of(header);
  std::memcpy(bytes.get(), &header, sizeof(header));
  write(bytes.get(), kPage, 0);
  if (ftruncate(file_.get(), kFileHeader) != 0) fail("cannot be written", errno);
}

void RowLog::check_header(const Options& options) {
  const Bytes bytes = page_aligned(kPage);
  ssize_t got = pread(file_.get(), bytes.get(), kPage, 0);
  if (got < 0 && errno == EINVAL && leave_direct()) got = pread(file_.get(), bytes.get(), kPage, 0);
  if (got < 0) fail("cannot be read", errno);
  FileHeader header{};
  std::memcpy(&header, bytes.get(), sizeof(header));
  const std::string remedy = ". Remove it, and go on from a checkpoint, with an empty table";
  if (got != static_cast<ssize_t>(kPage) || header.magic != kMagic) fail("is not a file of rows" + remedy, 0);
  if (header.format != kFormat) fail(text("has format ", header.format) + text("; expected ", kFormat) + remedy, 0);
  if (header.checksum != checksum_of(header)) fail("its header is damaged" + remedy, 0);
  if (header.id != options.id)
    fail("belongs to another table, or to the same one before it was created again" + remedy, 0);
  if (header.row_bytes != row_bytes_ || header.segment_blocks != options.segment_blocks) {
    fail(text("has rows of ", header.row_bytes) + text(" bytes in segments of ", header.segment_blocks) +
             text(" blocks, and a table like this has rows of ", row_bytes_) +
             text(" bytes in segments of ", options.segment_blocks) + ": it was made for another table" + remedy,
         0);
  }
}

// --- Appending --------------------------------------------------------------------------------------------------

std::uint64_t RowLog::offset_of(std::uint32_t record) const {
  const std::uint64_t block = record / block_records_;
  return kFileHeader + block * block_bytes_ + record % block_records_ * record_bytes_;
}

std::uint32_t RowLog::checksum(std::uint32_t record, const std::byte* bytes) const {
  const std::uint32_t of_number = crc32(0, reinterpret_cast<const std::byte*>(&record), sizeof(record));
  return crc32(of_number, bytes + sizeof(record), record_bytes_ - sizeof(record));
}

std::uint32_t RowLog::append(std::uint32_t last_step, const std::byte* row, For what) {
  if (blocks_.empty() || blocks_.back().records == block_records_) {
    try {
      begin_block(what);
    } catch (...) {
      drop_unflushed();
      throw;
    }
  }
  Block& block = blocks_.back();
  const auto record = static_cast<std::uint32_t>(block.first + block.records);
  std::byte* const at = block.bytes.get() + block.records * record_bytes_;
  std::memcpy(at + 4, &last_step, sizeof(last_step));
  std::memcpy(at + kRecordHeader, row, row_bytes_);
  const std::uint32_t sum = checksum(record, at);
  std::memcpy(at, &sum, sizeof(sum));
  ++block.records;
  ++head_;
  return record;
}

void RowLog::begin_block(For what) {
  blocks_.reserve(blocks_.size() + 1);
  Bytes bytes = spare_ ? std::move(spare_) : page_aligned(block_bytes_);
  std::memset(bytes.get(), 0, block_bytes_);
  if (head_ % segment_records_ == 0) begin_segment(what);
  blocks_.push_back({static_cast<std::uint32_t>(head_), 0, 0, std::move(bytes)});
}

void RowLog::flush() {
  if (blocks_.empty()) return;
  try {
    for (const Block& block : blocks_) {
      if (block.first % segment_records_ == 0 && block.flushed == 0) allocate(segment_of(block.first));
    }
    for (const Block& block : blocks_) {
      if (block.records > block.flushed) write_new(block);
    }
  } catch (...) {
    drop_unflushed();
    throw;
  }
  next_ = head_;
  for (Block& block : blocks_) {
    written_records_ += block.records - block.flushed;
    block.flushed = block.records;
    settle(segment_of(block.first));
  }
  if (blocks_.back().records == block_records_) {
    spare_ = std::move(blocks_.back().bytes);
    blocks_.clear();
  } else if (blocks_.size() > 1) {
    blocks_.erase(blocks_.begin(), blocks_.end() - 1);
  }
}

// Allocates the space of a segment, for most of its blocks are written long after.
void RowLog::allocate(std::uint32_t segment) {
  const auto offset = static_cast<off_t>(offset_of_segment(segment));
  crash_point();
  int error = disk_fault(DiskAccess::kAllocate);
  while (error == 0 && fallocate(file_.get(), 0, offset, static_cast<off_t>(segment_bytes_)) != 0) {
    if (errno == EINTR) continue;
    error = errno;
  }
  crash_point();
  if (error == EOPNOTSUPP) {  // The space is taken when it is written; the file must have its length all the same.
    struct stat status{};
    error = 0;
    const off_t end = offset + static_cast<off_t>(segment_bytes_);
    if (fstat(file_.get(), &status) != 0 || (status.st_size < end && ftruncate(file_.get(), end) != 0)) error = errno;
  }
  if (error == ENOSPC || error == EDQUOT) fail_full(error);
  if (error != 0) fail("cannot grow", error);
  segments_[segment].has_space = true;
}

void RowLog::write_new(const Block& block) const {
  const std::size_t begin = page_begin(block.flushed * record_bytes_);
  const std::size_t end = page_end(block.records * record_bytes_);
  write(block.bytes.get() + begin, end - begin, offset_of(block.first) + begin);
}

void RowLog::write(const std::byte* bytes, std::size_t count, std::uint64_t offset) const {
  while (count > 0) {
    crash_point();
    ssize_t done = -1;
    errno = disk_fault(DiskAccess::kWrite);
    if (errno == 0) done = pwrite(file_.get(), bytes, count, static_cast<off_t>(offset));
    const int error = errno;
    crash_point();
    if (done < 0 && (error == EINTR || error == EAGAIN)) continue;
    if (done < 0 && error == EINVAL && leave_direct()) continue;
    if (done < 0 && (error == ENOSPC || error == EDQUOT)) fail_full(error);
    if (done < 0) fail("cannot be written" + text(" at offset ", offset), error);
    // O_DIRECT goes on at a page only.
    const std::size_t whole =
        static_cast<std::size_t>(done) == count ? count : page_begin(static_cast<std::size_t>(done));
    if (whole == 0) fail_full(ENOSPC);
    bytes += whole;
    offset += whole;
    count -= whole;
  }
}

// Notes whether a segment is still being written to, now that no record waits for it.
void RowLog::settle(std::uint32_t segment) noexcept {
  segments_[segment].writing =
      next_ % segment_records_ != 0 && segment == segment_of(static_cast<std::uint32_t>(next_));
}

void RowLog::drop_unflushed() noexcept {
  head_ = next_;
  for (const Block& block : blocks_) settle(segment_of(block.first));
  if (!blocks_.empty() && blocks_.front().flushed > 0) {
    Block& first = blocks_.front();
    first.records = first.flushed;
    std::memset(first.bytes.get() + first.records * record_bytes_, 0, block_bytes_ - first.records * record_bytes_);
    blocks_.erase(blocks_.begin() + 1, blocks_.end());
  } else {
    blocks_.clear();
  }
}

// The pages of the last block are written again when records are added to it.
void RowLog::load_last_block() {
  const std::size_t records = next_ % block_records_;
  if (records == 0) return;
  Block block{static_cast<std::uint32_t>(next_ - records), records, records, page_aligned(block_bytes_)};
  const std::size_t bytes = records * record_bytes_;
  const DiskReader::Read read{file_.get(), offset_of(block.first), page_end(bytes), block.bytes.get()};
  try {
    reader_->read({&read, 1});
  } catch (const std::runtime_error& error) {
    fail(error.what(), 0);
  }
  std::memset(block.bytes.get() + bytes, 0, block_bytes_ - bytes);
  blocks_.push_back(std::move(block));
}

// --- Reading ----------------------------------------------------------------------------------------------------

// Pages that are read together, and the records in them.
class RowLog::Window {
 public:
  // Adds the pages of a record, which follows those of its file that were added before. Returns false if there is no
  // space for them next to others.
  bool add(int fd, std::uint64_t offset, std::size_t bytes, std::byte* to) {
    const std::uint64_t begin = page_begin(offset), end = page_end(offset + bytes);
    DiskReader::Read* const last = reads_.empty() || reads_.back().fd != fd ? nullptr : &reads_.back();
    const std::uint64_t covered = last == nullptr ? 0 : last->offset + last->bytes;
    const bool apart = last == nullptr || begin > covered || (end > covered && end - last->offset > kLongestRead);
    const std::size_t more = apart ? end - begin : end > covered ? end - covered : 0;
    if (used_ > 0 && used_ + more > kWindow) return false;
    if (apart) {
      reads_.push_back({fd, begin, more, nullptr});
    } else {
      last->bytes += more;
    }
    used_ += more;
    places_.push_back({used_ - reads_.back().bytes + (offset - reads_.back().offset), bytes, to});
    return true;
  }

  // Reads the pages, copies the records, and forgets both.
  void read(DiskReader& reader) {
    if (used_ > room_) pages_ = page_aligned(room_ = used_);
    std::byte* to = pages_.get();
    for (DiskReader::Read& read : reads_) {
      read.to = to;
      to += read.bytes;
    }
    reader.read(reads_);
    for (const Place& place : places_) std::memcpy(place.to, pages_.get() + place.at, place.bytes);
    reads_.clear();
    places_.clear();
    used_ = 0;
  }

 private:
  struct Place {
    std::size_t at, bytes;
    std::byte* to;
  };

  std::vector<DiskReader::Read> reads_;
  std::vector<Place> places_;
  Bytes pages_;
  std::size_t used_ = 0, room_ = 0;
};

void RowLog::read(std::span<const std::uint32_t> records, std::byte* out) const {
  const Wanted wanted{this, records, out};
  try {
    read({&wanted, 1});
  } catch (const std::runtime_error& error) {
    fail(error.what(), 0);
  }
}

void RowLog::read(std::span<const Wanted> wanted) {
  Window window;
  std::vector<std::uint32_t> order;
  for (const auto& [log, records, out] : wanted) {
    order.resize(records.size());
    std::iota(order.begin(), order.end(), 0u);
    // Captured by name, as older Clangs capture no structured binding.
    std::sort(order.begin(), order.end(),
              [&records = records](std::uint32_t a, std::uint32_t b) { return records[a] < records[b]; });
    for (const std::uint32_t i : order) {
      const std::size_t bytes = log->record_bytes_;
      const std::uint64_t offset = log->offset_of(records[i]);
      if (window.add(log->file_.get(), offset, bytes, out + i * bytes)) continue;
      window.read(*log->reader_);
      window.add(log->file_.get(), offset, bytes, out + i * bytes);
    }
  }
  if (!wanted.empty()) window.read(*wanted.back().log->reader_);
}

const std::byte* RowLog::row_in(std::uint32_t record, const std::byte* bytes) const {
  std::uint32_t sum = 0;
  std::memcpy(&sum, bytes, sizeof(sum));
  if (sum != checksum(record, bytes)) {
    fail(text("record ", record) + text(" at offset ", offset_of(record)) +
             " is damaged: the disk holds other bytes than were written. Go on from a checkpoint, with an empty table",
         0);
  }
  return bytes + kRecordHeader;
}

std::uint32_t RowLog::last_step_in(const std::byte* bytes) {
  std::uint32_t step = 0;
  std::memcpy(&step, bytes + 4, sizeof(step));
  return step;
}

}  // namespace persia
