// How the tier of a region is repaired after a kill.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "persia/checksum.hpp"
#include "persia/disk_faults.hpp"
#include "persia/memory.hpp"
#include "persia/tier.hpp"

namespace persia {
namespace {

class File {
 public:
  File(const std::string& path, int flags) : file_(open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600)) {}
  ~File() {
    if (file_ >= 0) close(file_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int get() const { return file_; }

 private:
  int file_;
};

// What a file of slots begins with; the slots follow.
struct SlotsHeader {
  std::uint32_t magic;
  std::uint32_t crc;  // of the slots
  std::uint64_t count;
};
constexpr std::uint32_t kSlotsMagic = 0x31544C53;  // "SLT1" in memory order
constexpr std::size_t kMostAtOnce = 1 << 20;       // bytes of a write

// Returns 0, or errno.
int write_all(int file, const std::byte* bytes, std::size_t count) {
  while (count > 0) {
    crash_point();
    ssize_t done = -1;
    errno = disk_fault(DiskAccess::kWrite);
    if (errno == 0) done = write(file, bytes, std::min(count, kMostAtOnce));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done == 0 ? ENOSPC : errno;
    bytes += done;
    count -= static_cast<std::size_t>(done);
  }
  crash_point();
  return 0;
}

// Returns 0, errno, or -1 if the file ends before.
int read_all(int file, std::byte* bytes, std::size_t count) {
  while (count > 0) {
    ssize_t done = -1;
    errno = disk_fault(DiskAccess::kRead);
    if (errno == 0) done = ::read(file, bytes, count);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done == 0 ? -1 : errno;
    bytes += done;
    count -= static_cast<std::size_t>(done);
  }
  return 0;
}

}  // namespace

void Tier::clear() {
  header_->tier.rebuilding = kClearing;
  barrier();
  finish_clear();
}

void Tier::finish_clear() {
  memory_->clear();
  TierState& tier = header_->tier;
  tier.move_row = 0;
  tier.next_record = 0;
  barrier();
  log_.clear();
  vacant_.clear();
  compacting_ = RowLog::kNone;
  newest_.clear();
  oldest_.clear();
  looked_for_ = 0;
  damaged_ = 0;
  tier.demoted = tier.read = tier.promoted = tier.compacted = 0;
  barrier();
  tier.rebuilding = 0;
  barrier();
}

// A process died while a row moved. The bytes of its new place are complete, so the slot says where it is.
void Tier::finish_move() {
  TierState& tier = header_->tier;
  if (tier.move_row == 0) return;
  RowHeader& r = *store().row(static_cast<std::uint32_t>(tier.move_row - 1));
  const std::uint64_t slot = std::uint64_t{Index::tag_of(hash_id(r.key()))} << 32 | store().number_of(tier.move_record);
  bool on_disk = false;
  memory_->index.slots().for_each([&](std::uint64_t other) { on_disk |= other == slot; });
  if (on_disk) {
    r.stamp = kVacant;
  } else if (r.stamp == kVacant) {
    r.stamp = header_->clock;
  }
  barrier();
  tier.move_row = 0;
  barrier();
}

// Finds out which rows are where. Returns whether the index was rebuilt.
bool Tier::recover() {
  if (header_->tier.rebuilding == kClearing) {
    finish_clear();
    return true;
  }
  finish_move();
  std::vector<std::uint64_t> slots;
  if (header_->tier.rebuilding != 0) {
    slots = read_slots();
  } else if ((header_->busy & kIndexBusy) != 0 || !revive_rows()) {
    // As often as a slot was copied; that of a row of memory says nothing, as the row may be vacant.
    memory_->index.slots().for_each([&](std::uint64_t slot) {
      if (const auto number = static_cast<std::uint32_t>(slot) & kRowMask; !store().in_memory(number))
        slots.push_back(slot);
    });
    std::sort(slots.begin(), slots.end());
    slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
    write_slots(slots);
    barrier();
    header_->tier.rebuilding = kRebuilding;
    barrier();
  }
  if (header_->tier.rebuilding == 0) return false;
  rebuild_index(std::move(slots));
  log_.forget();
  vacant_.clear();
  if (!revive_rows()) {
    throw std::runtime_error(store().where() +
                             ": its index is damaged: it names rows twice. Remove it with `persia cluster "
                             "regions --clean`, and go on from a checkpoint");
  }
  return true;
}

// Notes which records are in use and which rows of memory are vacant. Returns whether each row of memory and only
// records that may be there are in the index, once each. One pass: a process that restarts waits for it.
bool Tier::revive_rows() {
  std::vector<bool> rows(header_->rows_used);
  std::uint64_t found = 0, expected = 0;
  const bool sound = memory_->index.slots().sound_if([&](std::uint32_t number) {
    if (store().in_memory(number)) {
      if (number >= rows.size() || rows[number] || store().vacant(number)) return false;
      ++found;
      rows[number] = true;
      return true;
    }
    const std::uint32_t record = store().record_of(number);
    if (record >= log_.end_record() || log_.live(record)) return false;
    log_.revive(record);
    return true;
  });
  for (std::uint64_t number = 0; number < header_->rows_used; ++number) {
    const auto n = static_cast<std::uint32_t>(number);
    if (store().vacant(n)) {
      vacant_.push_back(n);
    } else {
      ++expected;
    }
  }
  return sound && found == expected;
}

void Tier::rebuild_index(std::vector<std::uint64_t> slots) {
  for (const std::uint64_t slot : slots) {
    if (store().record_of(static_cast<std::uint32_t>(slot) & kRowMask) >= log_.end_record()) {
      throw std::runtime_error(store().where() + ": its index is damaged: it names rows behind the end of " +
                               log_.path() +
                               ". Remove both with `persia cluster regions --clean`, and go on from a checkpoint");
    }
  }
  for (std::uint64_t number = 0; number < header_->rows_used; ++number) {
    const auto n = static_cast<std::uint32_t>(number);
    if (!store().vacant(n)) slots.push_back(std::uint64_t{memory_->index.tag_of_row(n)} << 32 | n);
  }
  memory_->index.rebuild(slots);
  barrier();
  header_->tier.rebuilding = 0;
  barrier();
  unlink(slots_path().c_str());
}

std::string Tier::slots_path() const {
  return memory_->config.tier.path + "." + std::to_string(header_->shard) + ".slots";
}

// The only copy while the index is being rebuilt: a process may die during that, too. Before it is complete, the next
// process collects the slots again.
void Tier::write_slots(const std::vector<std::uint64_t>& slots) const {
  const std::string path = slots_path();
  const std::size_t all = slots.size() * sizeof(slots[0]);
  const auto* bytes = reinterpret_cast<const std::byte*>(slots.data());
  const SlotsHeader header{kSlotsMagic, crc32(0, bytes, all), slots.size()};
  crash_point();
  const File file(path, O_WRONLY | O_CREAT | O_TRUNC);
  int error = file.get() < 0 ? errno : 0;
  if (error == 0) error = write_all(file.get(), reinterpret_cast<const std::byte*>(&header), sizeof(header));
  if (error == 0) error = write_all(file.get(), bytes, all);
  if (error == 0) return;
  unlink(path.c_str());  // Half of it is of no use, and takes space.
  if (error != ENOSPC && error != EDQUOT) {
    throw std::runtime_error(store().where() + ": " + path +
                             " cannot be written, for the index that a crash has left to " + "rebuild (" +
                             std::strerror(error) + "). Mend that, and start the process again");
  }
  throw RegionFull(store().where() + ": no room for the index of " + path + ", which a crash has left to rebuild (" +
                   std::strerror(error) + "). Free " + std::to_string((all >> 20) + 1) +
                   " MiB there, and start the process again");
}

std::vector<std::uint64_t> Tier::read_slots() const {
  const std::string path = slots_path();
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error(store().where() + ": " + path + " " + what +
                             ", which has what a crash left of its index. Put it back, or remove the region with "
                             "`persia cluster regions --clean`, and go on from a checkpoint");
  };
  const File file(path, O_RDONLY);
  struct stat status{};
  if (file.get() < 0 || fstat(file.get(), &status) != 0) {
    refuse(std::string("cannot be opened (") + std::strerror(errno) + ")");
  }
  SlotsHeader header{};
  if (const int error = read_all(file.get(), reinterpret_cast<std::byte*>(&header), sizeof(header)); error > 0) {
    refuse(std::string("cannot be read (") + std::strerror(error) + ")");
  }
  // Checked before memory is taken for them.
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (header.magic != kSlotsMagic || size < sizeof(header) ||
      header.count != (size - sizeof(header)) / sizeof(std::uint64_t) || size % sizeof(std::uint64_t) != 0) {
    refuse("is damaged or cut short");
  }
  std::vector<std::uint64_t> slots(header.count);
  auto* const bytes = reinterpret_cast<std::byte*>(slots.data());
  const std::size_t all = slots.size() * sizeof(slots[0]);
  const int error = read_all(file.get(), bytes, all);
  if (error > 0) refuse(std::string("cannot be read (") + std::strerror(error) + ")");
  if (error < 0 || crc32(0, bytes, all) != header.crc) refuse("is damaged or cut short");
  return slots;
}

}  // namespace persia
