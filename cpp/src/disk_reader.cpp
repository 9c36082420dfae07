#include "persia/disk_reader.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "persia/disk_faults.hpp"
#include "persia/thread_pool.hpp"

namespace persia {
namespace {

// The part of <linux/io_uring.h> (Linux 5.6) that is needed: systems on which wheels are built have older headers.
constexpr long kSetup = 425, kEnter = 426;  // numbers of the system calls, the same on all architectures
constexpr std::uint8_t kOpNothing = 0, kOpRead = 22;
constexpr std::uint8_t kAsync = 1u << 4;                       // of a submission: by a thread of the kernel
constexpr unsigned kGetEvents = 1u << 0, kExtended = 1u << 3;  // of kEnter
constexpr std::uint32_t kSingleMapping = 1u << 0, kNoDrop = 1u << 1, kReadWrite56 = 1u << 3;  // features
constexpr std::uint32_t kTimeouts = 1u << 8;  // a feature that is not needed (Linux 5.11)
constexpr off_t kRingOffset = 0, kEntriesOffset = 0x10000000;

struct SubmissionOffsets {
  std::uint32_t head, tail, mask, entries, flags, dropped, array, reserved;
  std::uint64_t address;
};
struct CompletionOffsets {
  std::uint32_t head, tail, mask, entries, overflow, completions, flags, reserved;
  std::uint64_t address;
};
struct Parameters {
  std::uint32_t submission_entries, completion_entries, flags, cpu, idle, features, queue, reserved[3];
  SubmissionOffsets submission;
  CompletionOffsets completion;
};
struct Submission {
  std::uint8_t operation, flags;
  std::uint16_t priority;
  std::int32_t fd;
  std::uint64_t offset, address;
  std::uint32_t bytes, operation_flags;
  std::uint64_t user_data, rest[3];
};
struct Completion {
  std::uint64_t user_data;
  std::int32_t result;
  std::uint32_t flags;
};
struct Timespec {
  std::int64_t seconds, nanoseconds;
};
struct Extension {
  std::uint64_t signals;
  std::uint32_t signals_bytes, reserved;
  std::uint64_t timeout;
};
static_assert(sizeof(Parameters) == 120 && sizeof(Submission) == 64 && sizeof(Completion) == 16);

// Seconds without a completion, after which the kernel is reminded of its reads.
constexpr std::int64_t kPatience = 1;

constexpr std::size_t kLongestRead = std::size_t{1} << 30;  // The kernel takes a little less than 2 GiB.

using Read = DiskReader::Read;

// The first failure of a call.
struct Failure {
  int error = 0;  // 0: the file ended
  Read read{};
  bool set = false;

  void note(int why, const Read& what) {
    if (!std::exchange(set, true)) error = why, read = what;
  }
  void raise() const {
    if (!set) return;
    const std::string what = std::to_string(read.bytes) + " bytes at offset " + std::to_string(read.offset);
    if (error == 0) throw std::runtime_error("cannot read " + what + ": the file is too short");
    throw std::runtime_error("cannot read " + what + " (" + std::strerror(error) + ")");
  }
};

// What the kernel said of a read.
enum class Outcome { kDone, kAgain, kFailed };

// Advances `rest` by a result of the kernel, which is -errno if negative.
Outcome advance(Read& rest, bool& partial, std::int64_t result, Failure& failure) {
  if (result == -EINTR || result == -EAGAIN) return Outcome::kAgain;
  if (result <= 0) {
    // What follows a partial read may be at an offset that O_DIRECT refuses: that is the end of the file too.
    const bool ended = result == 0 || (partial && result == -EINVAL);
    failure.note(ended ? 0 : static_cast<int>(-result), rest);
    return Outcome::kFailed;
  }
  const auto got = static_cast<std::size_t>(result);
  rest.offset += got;
  rest.to += got;
  rest.bytes -= got;
  partial = true;
  return rest.bytes == 0 ? Outcome::kDone : Outcome::kAgain;
}

// Reads one range by a system call that blocks.
void read_now(Read rest) {
  Failure failure;
  bool partial = false;
  Outcome outcome = rest.bytes == 0 ? Outcome::kDone : Outcome::kAgain;
  while (outcome == Outcome::kAgain) {
    const ssize_t got = pread(rest.fd, rest.to, std::min(rest.bytes, kLongestRead), static_cast<off_t>(rest.offset));
    outcome = advance(rest, partial, got < 0 ? -errno : got, failure);
  }
  failure.raise();
}

}  // namespace

// An io_uring: two queues in memory that is shared with the kernel. Used by one thread at a time.
class DiskReader::Ring {
 public:
  // Returns nullptr if it cannot be had.
  static std::unique_ptr<Ring> create() {
    std::unique_ptr<Ring> ring(new Ring);
    return ring->open() ? std::move(ring) : nullptr;
  }

  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (queues_ != nullptr) munmap(queues_, queues_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  // Whether the kernel has refused it, so that it must not be used again.
  bool broken() const { return broken_; }

  void read(std::span<const Read> reads) {
    Failure failure;
    std::size_t next = 0;
    unsigned in_flight = 0;
    std::array<std::uint8_t, kDepth> idle;
    for (unsigned i = 0; i < kDepth; ++i) idle[i] = static_cast<std::uint8_t>(i);
    for (;;) {
      while (next < reads.size() && in_flight < kDepth && !failure.set) {
        const Read& read = reads[next++];
        if (read.bytes == 0) continue;
        const unsigned slot = idle[kDepth - 1 - in_flight++];
        slots_[slot] = {read, false};
        submit(slot);
      }
      if (in_flight == 0) break;
      if (const int error = enter(); error != 0) {
        // The kernel does not take what has not been submitted, but writes to the buffers of what has.
        broken_ = true;
        failure.note(error, {-1, 0, 0, nullptr});
        in_flight -= unsubmitted_reads();
        while (in_flight > 0) {
          sched_yield();
          for (Completion done; complete(done);) --in_flight;
        }
        break;
      }
      for (Completion done; complete(done);) {
        Slot& slot = slots_[done.user_data];
        if (advance(slot.rest, slot.partial, done.result, failure) == Outcome::kAgain) {
          submit(static_cast<unsigned>(done.user_data));
        } else {
          idle[kDepth - in_flight--] = static_cast<std::uint8_t>(done.user_data);
        }
      }
    }
    failure.raise();
  }

 private:
  struct Slot {
    Read rest;
    bool partial;
  };
  using Word = std::atomic_ref<std::uint32_t>;

  Ring() = default;

  bool open() {
    Parameters parameters{};
    fd_ = static_cast<int>(syscall(kSetup, kDepth, &parameters));  // close-on-exec
    constexpr std::uint32_t needed = kSingleMapping | kNoDrop | kReadWrite56;
    if (fd_ < 0 || (parameters.features & needed) != needed) return false;
    times_out_ = (parameters.features & kTimeouts) != 0;
    const SubmissionOffsets& s = parameters.submission;
    const CompletionOffsets& c = parameters.completion;
    queues_bytes_ = std::max(s.array + parameters.submission_entries * sizeof(std::uint32_t),
                             c.completions + parameters.completion_entries * sizeof(Completion));
    entries_bytes_ = parameters.submission_entries * sizeof(Submission);
    queues_ = map(queues_bytes_, kRingOffset);
    entries_ = map(entries_bytes_, kEntriesOffset);
    if (queues_ == nullptr || entries_ == nullptr) return false;
    const auto word = [this](std::uint32_t offset) {
      return reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(queues_) + offset);
    };
    submission_head_ = word(s.head);
    submission_tail_ = word(s.tail);
    submission_mask_ = *word(s.mask);
    order_ = word(s.array);
    submissions_ = static_cast<Submission*>(entries_);
    completion_head_ = word(c.head);
    completion_tail_ = word(c.tail);
    completion_mask_ = *word(c.mask);
    completions_ = reinterpret_cast<Completion*>(word(c.completions));
    return true;
  }

  void* map(std::size_t bytes, off_t offset) const {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, offset);
    if (at == MAP_FAILED) return nullptr;
    madvise(at, bytes, MADV_DONTFORK);  // A child that wrote here would confuse the parent's reads.
    return at;
  }

  void submit(unsigned slot) {
    const Read& rest = slots_[slot].rest;
    Submission entry{};
    entry.operation = kOpRead;
    entry.fd = rest.fd;
    entry.offset = rest.offset;
    entry.address = reinterpret_cast<std::uint64_t>(rest.to);
    entry.bytes = static_cast<std::uint32_t>(std::min(rest.bytes, kLongestRead));
    entry.user_data = slot;
    submit(entry);
  }

  // At most kDepth reads are in flight, and reminders are sent when all of these are submitted: there is a free entry.
  void submit(const Submission& entry) {
    const std::uint32_t tail = *submission_tail_;  // Only this side writes it.
    const std::uint32_t at = tail & submission_mask_;
    submissions_[at] = entry;
    order_[at] = at;
    Word(*submission_tail_).store(tail + 1, std::memory_order_release);
  }

  // Linux 6.18 was seen to never begin the first reads of a ring, whose thread in the kernel it had failed to start:
  // for work that has to be done by such a thread it starts one.
  void remind() {
    Submission entry{};
    entry.operation = kOpNothing;
    entry.flags = kAsync;
    entry.fd = -1;
    entry.user_data = kReminder;
    submit(entry);
  }

  std::uint32_t unsubmitted() const {
    return *submission_tail_ - Word(*submission_head_).load(std::memory_order_acquire);
  }

  // Without a reminder, which nobody waits for.
  std::uint32_t unsubmitted_reads() const {
    std::uint32_t reads = 0;
    for (std::uint32_t left = unsubmitted(), at = *submission_tail_; left > 0; --left) {
      reads += submissions_[--at & submission_mask_].operation == kOpRead;
    }
    return reads;
  }

  // Hands over what has been submitted and waits for a completion. Returns an errno if the kernel refuses the ring.
  int enter() {
    const Timespec patience{kPatience, 0};
    Extension extension{};
    extension.timeout = reinterpret_cast<std::uint64_t>(&patience);
    const unsigned flags = times_out_ ? kGetEvents | kExtended : kGetEvents;
    void* const argument = times_out_ ? &extension : nullptr;
    if (syscall(kEnter, fd_, unsubmitted(), 1u, flags, argument, times_out_ ? sizeof(extension) : 0) >= 0) return 0;
    if (errno == EINTR) return 0;
    if (errno == ETIME) {
      if (unsubmitted() == 0) remind();
      return 0;
    }
    if (errno != EAGAIN && errno != EBUSY) return errno;
    sched_yield();  // It lacks memory for the moment, or wants completions to be taken first.
    return 0;
  }

  // Takes the next completion of a read, if there is one.
  bool complete(Completion& done) {
    for (;;) {
      const std::uint32_t head = *completion_head_;  // Only this side writes it.
      if (head == Word(*completion_tail_).load(std::memory_order_acquire)) return false;
      done = completions_[head & completion_mask_];
      Word(*completion_head_).store(head + 1, std::memory_order_release);
      if (done.user_data != kReminder) return true;
    }
  }

  static constexpr std::uint64_t kReminder = kDepth;  // Reads have the numbers of their slots.

  int fd_ = -1;
  bool broken_ = false;
  bool times_out_ = false;
  void *queues_ = nullptr, *entries_ = nullptr;
  std::size_t queues_bytes_ = 0, entries_bytes_ = 0;
  std::uint32_t *submission_head_ = nullptr, *submission_tail_ = nullptr, *order_ = nullptr;
  std::uint32_t *completion_head_ = nullptr, *completion_tail_ = nullptr;
  std::uint32_t submission_mask_ = 0, completion_mask_ = 0;
  Submission* submissions_ = nullptr;
  Completion* completions_ = nullptr;
  std::array<Slot, kDepth> slots_{};
};

struct DiskReader::State {
  std::mutex mutex;
  std::condition_variable returned;
  std::vector<std::unique_ptr<Ring>> idle;
  std::size_t rings = 0;  // with those in use
  bool use_threads = false;
  std::unique_ptr<ThreadPool> threads;
};

// A ring for the time of a call; none if threads are to read.
class DiskReader::RingLease {
 public:
  explicit RingLease(State& state) : state_(state) {
    std::unique_lock lock(state.mutex);
    while (!state.use_threads && ring_ == nullptr) {
      if (!state.idle.empty()) {
        ring_ = std::move(state.idle.back());
        state.idle.pop_back();
        return;
      }
      state.idle.reserve(state.rings + 1);  // so that giving it back cannot fail
      ring_ = Ring::create();
      if (ring_ != nullptr) {
        ++state.rings;
      } else if (state.rings == 0) {
        state.use_threads = true;
      } else {
        // Too many for the limits of this process. Those in use come back when their reads have ended.
        state.returned.wait(lock, [&] { return !state.idle.empty() || state.rings == 0; });
      }
    }
  }
  ~RingLease() {
    if (ring_ == nullptr) return;
    {
      const std::lock_guard lock(state_.mutex);
      if (ring_->broken()) {
        --state_.rings;
      } else {
        state_.idle.push_back(std::move(ring_));
      }
    }
    state_.returned.notify_all();
  }
  RingLease(const RingLease&) = delete;
  RingLease& operator=(const RingLease&) = delete;

  Ring* operator->() const { return ring_.get(); }
  explicit operator bool() const { return ring_ != nullptr; }

 private:
  State& state_;
  std::unique_ptr<Ring> ring_;
};

DiskReader::DiskReader(Kind kind) : state_(std::make_unique<State>()), process_(getpid()) {
  state_->use_threads = kind == Kind::kThreads;
}

DiskReader::~DiskReader() {
  // In a forked child the rings are not mapped and the threads do not exist; a lock may be held forever.
  if (getpid() != process_) static_cast<void>(state_.release());
}

DiskReader::Kind DiskReader::kind() { return RingLease(*state_) ? Kind::kUring : Kind::kThreads; }

void DiskReader::read(std::span<const Read> reads) {
  if (getpid() != process_) {
    throw std::runtime_error(
        "this disk reader belongs to the process that created it: a forked child must not use it. Start processes "
        "with `spawn`");
  }
  if (reads.empty()) return;
  if (const int error = disk_fault(DiskAccess::kRead); error != 0) {
    Failure failure;
    failure.note(error, reads.front());
    failure.raise();
  }
  if (reads.size() == 1) return read_now(reads.front());  // Nothing to do meanwhile.
  if (const RingLease ring(*state_); ring) return ring->read(reads);
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->threads == nullptr) state_->threads = std::make_unique<ThreadPool>(kThreadCount + 1);
  }
  state_->threads->parallel_for(reads.size(), [&](std::size_t i) { read_now(reads[i]); });
}

}  // namespace persia
