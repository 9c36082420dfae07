#include "persia/served_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "persia/checksum.hpp"

namespace persia {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian, and mapped as it is");

constexpr std::array<char, 8> kMagic{'P', 'E', 'R', 'S', 'I', 'A', 'S', 'R'};
constexpr std::uint32_t kVersion = 1;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kRowsPerBucket = 4;
constexpr std::uint64_t kMaxBuckets = std::uint64_t{1} << 32;
constexpr std::uint64_t kScan = 32;  // rows of a range that are compared one by one; longer ones are bisected
constexpr std::size_t kBuffer = std::size_t{1} << 20;

struct Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t dim;
  std::uint64_t rows;
  std::uint64_t buckets;
  std::uint64_t file_bytes;
  std::uint32_t body_checksum;
  std::uint32_t name_bytes;
  std::array<char, 1024> name;
  std::array<std::byte, kPage - 1024 - 52> zeros;
  std::uint32_t checksum;  // of all bytes before it
};
static_assert(sizeof(Header) == kPage && offsetof(Header, checksum) == kPage - 4);

std::uint32_t checksum_of(const Header& header) {
  return crc32(0, reinterpret_cast<const std::byte*>(&header), offsetof(Header, checksum));
}

// Where the parts of a file are, each at a page; none if the counts fit no file.
struct Parts {
  std::uint64_t ids;
  std::uint64_t values;
  std::uint64_t end;

  static std::optional<Parts> of(std::uint64_t dim, std::uint64_t rows, std::uint64_t buckets) {
    Parts parts{};
    std::uint64_t starts = 0, ids = 0, values = 0;
    bool over = __builtin_mul_overflow(buckets + 1, sizeof(std::uint64_t), &starts);
    over |= __builtin_mul_overflow(rows, sizeof(std::uint64_t), &ids);
    over |= __builtin_mul_overflow(rows, dim * sizeof(float), &values);
    over |= __builtin_add_overflow(kPage, starts, &parts.ids) || align(parts.ids);
    over |= __builtin_add_overflow(parts.ids, ids, &parts.values) || align(parts.values);
    over |= __builtin_add_overflow(parts.values, values, &parts.end);
    if (over) return std::nullopt;
    return parts;
  }

 private:
  static bool align(std::uint64_t& offset) {
    if (__builtin_add_overflow(offset, kPage - 1, &offset)) return true;
    offset -= offset % kPage;
    return false;
  }
};

std::string with_reason(const std::string& what, int error) { return what + " (" + std::strerror(error) + ")"; }

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) close(number);
  }
};

// A file that is written in order, with the checksum of what has been written.
class Output {
 public:
  Output(const std::string& path, std::string temporary)
      : path_(path), temporary_(std::move(temporary)), buffer_(kBuffer) {
    file_ = open(temporary_.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0644);
    if (file_ < 0) fail("cannot be created");
  }
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() {
    if (file_ >= 0) close(file_);
    if (!complete_) unlink(temporary_.c_str());
  }

  std::uint32_t checksum() const { return checksum_; }

  void append(const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    while (bytes != 0) {
      const std::size_t part = std::min(bytes, buffer_.size() - used_);
      std::memcpy(buffer_.data() + used_, from, part);
      used_ += part, from += part, bytes -= part;
      if (used_ == buffer_.size()) flush();
    }
  }
  void pad_to(std::uint64_t offset) {
    static constexpr std::array<std::byte, kPage> kZeros{};
    append(kZeros.data(), static_cast<std::size_t>(offset - at_ - used_));
  }
  void flush() {
    checksum_ = crc32(checksum_, buffer_.data(), used_);
    write_at(at_, buffer_.data(), used_);
    at_ += used_;
    used_ = 0;
  }
  void write_at(std::uint64_t offset, const std::byte* data, std::size_t bytes) {
    while (bytes != 0) {
      const ssize_t done = pwrite(file_, data, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail("cannot be written");
      data += done, offset += static_cast<std::uint64_t>(done), bytes -= static_cast<std::size_t>(done);
    }
  }
  // Gives the file its name.
  void complete() {
    if (fsync(file_) != 0) fail("cannot be written");
    if (rename(temporary_.c_str(), path_.c_str()) != 0) fail("cannot be renamed");
    complete_ = true;
    const std::size_t slash = path_.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const Descriptor parent{open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (parent.number >= 0) fsync(parent.number);  // Best effort: some file systems refuse it.
  }

  static constexpr std::uint64_t kBody = kPage;  // where the first byte goes that is appended

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(with_reason(path_ + ": the file of rows " + what, errno));
  }

  const std::string& path_;
  std::string temporary_;
  std::vector<std::byte> buffer_;
  std::size_t used_ = 0;
  std::uint64_t at_ = kBody;
  std::uint32_t checksum_ = 0;
  int file_ = -1;
  bool complete_ = false;
};

std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> count{0};
  return path + ".tmp-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

}  // namespace

void ServedFile::fail(const std::string& what) const { throw std::runtime_error(path_ + ": " + what); }

void ServedFile::damaged(std::uint64_t bucket) const {
  fail("the directory is damaged at place " + std::to_string(bucket) + "; write or copy the file again");
}

ServedFile::ServedFile(const std::string& path) : path_(path) {
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  struct stat status{};
  if (file.number < 0 || fstat(file.number, &status) != 0) fail(with_reason("the file cannot be opened", errno));
  if (!S_ISREG(status.st_mode)) fail("this is not a file");
  const auto size = static_cast<std::uint64_t>(status.st_size);
  Header header{};
  const ssize_t got = pread(file.number, &header, sizeof header, 0);
  if (got < 0) fail(with_reason("the file cannot be read", errno));
  if (static_cast<std::size_t>(got) < sizeof header.magic || header.magic != kMagic) {
    fail("this is not a file of served rows; pass one that write_snapshot has written");
  }
  if (static_cast<std::size_t>(got) < sizeof header) fail("the file is truncated; write or copy it again");
  if (header.version != kVersion) {
    fail("the file has version " + std::to_string(header.version) + ", and this persia reads version " +
         std::to_string(kVersion) + "; write it again with this persia");
  }
  if (header.checksum != checksum_of(header)) fail("the header is damaged; write or copy the file again");
  const auto parts = Parts::of(header.dim, header.rows, header.buckets);
  if (header.dim < 1 || header.dim > kMaxServedDim || header.buckets < 1 || header.buckets > kMaxBuckets ||
      header.name_bytes > header.name.size() || !parts || parts->end != header.file_bytes) {
    fail("the header contradicts itself; write the file again");
  }
  if (size != header.file_bytes) {
    fail("the file has " + std::to_string(size) + " bytes instead of " + std::to_string(header.file_bytes) +
         "; write or copy it again");
  }
  dim_ = header.dim;
  rows_ = header.rows;
  buckets_ = header.buckets;
  checksum_ = header.body_checksum;
  name_.assign(header.name.data(), header.name_bytes);
  bytes_ = static_cast<std::size_t>(size);
  void* const mapping = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.number, 0);
  if (mapping == MAP_FAILED) fail(with_reason("the file cannot be mapped", errno));
  mapping_ = static_cast<const std::byte*>(mapping);
  starts_ = reinterpret_cast<const std::uint64_t*>(mapping_ + kPage);
  ids_ = reinterpret_cast<const std::uint64_t*>(mapping_ + parts->ids);
  values_ = reinterpret_cast<const float*>(mapping_ + parts->values);
}

ServedFile::~ServedFile() { munmap(const_cast<std::byte*>(mapping_), bytes_); }

std::uint64_t ServedFile::find(std::uint64_t id, std::uint64_t hash, Range range) const {
  while (range.end - range.begin > kScan) {
    const std::uint64_t middle = range.begin + (range.end - range.begin) / 2;
    if (hash_id(ids_[middle]) <= hash) {
      range.begin = middle;
    } else {
      range.end = middle;
    }
  }
  for (std::uint64_t row = range.begin; row < range.end; ++row) {
    if (ids_[row] == id) return row;
  }
  return kNone;
}

void ServedFile::verify() const {
  if (crc32(0, mapping_ + kPage, bytes_ - kPage) != checksum_) {
    fail("the checksum of the rows is wrong; write or copy the file again");
  }
}

void ServedFile::write(const std::string& path, const std::string& name, std::size_t dim, const Source& source) {
  Header header{};
  if (name.size() > header.name.size()) {
    throw std::runtime_error("the name of the table has " + std::to_string(name.size()) + " bytes; at most " +
                             std::to_string(header.name.size()) + " are allowed");
  }
  source([&](Row) { ++header.rows; });
  header.magic = kMagic;
  header.version = kVersion;
  header.dim = static_cast<std::uint32_t>(dim);
  header.buckets = std::clamp<std::uint64_t>(header.rows / kRowsPerBucket, 1, kMaxBuckets);
  const auto parts = Parts::of(dim, header.rows, header.buckets);
  if (!parts) throw std::runtime_error(path + ": there are too many rows for one file");
  header.file_bytes = parts->end;
  header.name_bytes = static_cast<std::uint32_t>(name.size());
  std::copy(name.begin(), name.end(), header.name.begin());

  Output output(path, temporary_name(path));
  std::uint64_t rows = 0, starts = 0;
  source([&](Row row) {
    const std::uint64_t bucket = ((hash_id(row.id) >> 32) * header.buckets) >> 32;
    for (; starts <= bucket; ++starts) output.append(&rows, sizeof rows);
    ++rows;
  });
  for (; starts <= header.buckets; ++starts) output.append(&rows, sizeof rows);
  output.pad_to(parts->ids);
  source([&](Row row) { output.append(&row.id, sizeof row.id); });
  output.pad_to(parts->values);
  source([&](Row row) { output.append(row.values, dim * sizeof(float)); });
  output.flush();
  header.body_checksum = output.checksum();
  header.checksum = checksum_of(header);
  output.write_at(0, reinterpret_cast<const std::byte*>(&header), sizeof header);
  output.complete();
}

}  // namespace persia
