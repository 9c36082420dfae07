// Batched reads, by io_uring where this machine has it, and by threads.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "persia/disk_reader.hpp"

using persia::DiskReader;
using Bytes = std::vector<std::byte>;

namespace {

constexpr std::size_t kFileBytes = 1 << 20;
constexpr DiskReader::Kind kKinds[] = {DiskReader::Kind::kUring, DiskReader::Kind::kThreads};

struct File {
  File() {
    char name[] = "/tmp/persia-test-XXXXXX";
    fd = mkstemp(name);
    CHECK(fd >= 0);
    unlink(name);
    std::mt19937 random(1);
    for (auto& byte : contents) byte = static_cast<std::byte>(random());
    CHECK(pwrite(fd, contents.data(), contents.size(), 0) == static_cast<ssize_t>(contents.size()));
  }
  ~File() { close(fd); }
  int fd;
  Bytes contents = Bytes(kFileBytes);
};

struct Batch {
  // Reads of up to 10,000 bytes, some of none, anywhere.
  Batch(const File& file, std::size_t count, unsigned seed) : buffers(count) {
    std::mt19937 random(seed);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = random() % 4 == 0 ? random() % 3 : random() % 10000;
      buffers[i].resize(bytes);
      reads.push_back({file.fd, random() % (kFileBytes - bytes), bytes, buffers[i].data()});
    }
  }
  bool right(const File& file) const {
    for (std::size_t i = 0; i < reads.size(); ++i) {
      if (!std::equal(buffers[i].begin(), buffers[i].end(), file.contents.begin() + reads[i].offset)) return false;
    }
    return true;
  }
  std::vector<Bytes> buffers;
  std::vector<DiskReader::Read> reads;
};

std::string message_of(DiskReader& reader, std::span<const DiskReader::Read> reads) {
  try {
    reader.read(reads);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// As containers do.
void forbid_rings() {
  constexpr std::uint32_t setup = 425;
  sock_filter program[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),  // number of the system call
                           BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, setup, 0, 1),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                           BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{4, program};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

template <class Work>
void in_child(Work&& work) {
  const pid_t child = fork();
  if (child == 0) {
    work();
    _exit(0);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace

TEST(reads_batches_of_any_size) {
  const File file;
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    unsigned seed = 0;
    for (const std::size_t count : {0, 1, 2, 127, 128, 129, 3000, 1, 500}) {
      const Batch batch(file, count, ++seed);
      reader.read(batch.reads);
      CHECK(batch.right(file));
    }
  }
  DiskReader threads(DiskReader::Kind::kThreads), rings;
  CHECK(threads.kind() == DiskReader::Kind::kThreads);
  std::printf("  io_uring: %s\n", rings.kind() == DiskReader::Kind::kUring ? "yes" : "no");
}

TEST(threads_read_beside_each_other) {
  const File file;
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (unsigned i = 0; i < 20; ++i) {
          const Batch batch(file, 200, 100 * t + i);
          reader.read(batch.reads);
          right += batch.right(file);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(right == 80);
  }
}

TEST(a_file_that_is_too_short_is_an_error) {
  const File file;
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    for (const std::size_t count : {1, 2, 300}) {
      for (const std::uint64_t offset : {kFileBytes - 100, kFileBytes, kFileBytes + 5000}) {
        Batch batch(file, count, 1);
        Bytes buffer(101);
        batch.reads[count / 2] = {file.fd, offset, 101, buffer.data()};
        const std::string message = message_of(reader, batch.reads);
        CHECK(contains(message, "too short"));
        CHECK(contains(message, "at offset " + std::to_string(std::max(offset, std::uint64_t{kFileBytes}))));
      }
      const Batch after(file, count, 2);
      reader.read(after.reads);
      CHECK(after.right(file));
    }
  }
}

TEST(an_error_of_the_disk_is_named) {
  const File file;
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    for (const std::size_t count : {1, 2, 300}) {
      Batch batch(file, count, 1);
      Bytes buffer(10);
      batch.reads[count - 1] = {1 << 20, 77, 10, buffer.data()};
      CHECK(message_of(reader, batch.reads) == "cannot read 10 bytes at offset 77 (Bad file descriptor)");
      batch.reads[count - 1].fd = file.fd;
      reader.read(batch.reads);
      CHECK(std::equal(buffer.begin(), buffer.end(), file.contents.begin() + 77));
    }
  }
}

TEST(signals_do_not_disturb) {
  const File file;
  struct sigaction action{};
  action.sa_handler = [](int) {};  // without SA_RESTART
  CHECK(sigaction(SIGALRM, &action, nullptr) == 0);
  const itimerval often{{0, 500}, {0, 500}};
  CHECK(setitimer(ITIMER_REAL, &often, nullptr) == 0);
  for (const auto kind : kKinds) {
    DiskReader reader(kind);
    for (unsigned i = 0; i < 30; ++i) {
      const Batch batch(file, 300, i);
      reader.read(batch.reads);
      CHECK(batch.right(file));
    }
  }
  const itimerval never{};
  CHECK(setitimer(ITIMER_REAL, &never, nullptr) == 0);
}

TEST(reads_that_take_longer_than_the_patience_are_waited_for) {
  DiskReader reader;
  if (reader.kind() != DiskReader::Kind::kUring) return;  // Threads cannot read a pipe at an offset.
  int pipes[2][2];
  for (auto& ends : pipes) CHECK(pipe(ends) == 0);
  Bytes first(4), second(4);
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2300));
    for (const auto& ends : pipes) CHECK(write(ends[1], "read", 4) == 4);
  });
  reader.read(std::vector<DiskReader::Read>{{pipes[0][0], 0, 4, first.data()}, {pipes[1][0], 0, 4, second.data()}});
  writer.join();
  CHECK(std::memcmp(first.data(), "read", 4) == 0 && second == first);
  for (const auto& ends : pipes) close(ends[0]), close(ends[1]);
  const File file;  // What reminds the kernel leaves nothing behind.
  for (unsigned seed = 0; seed < 5; ++seed) {
    const Batch batch(file, 300, seed);
    reader.read(batch.reads);
    CHECK(batch.right(file));
  }
}

TEST(a_forked_child_is_refused_and_lets_go) {
  const File file;
  for (const auto kind : kKinds) {
    auto* reader = new DiskReader(kind);
    const Batch batch(file, 200, 1);
    reader->read(batch.reads);
    in_child([&] {
      CHECK(contains(message_of(*reader, batch.reads), "forked child"));
      delete reader;
    });
    reader->read(batch.reads);
    CHECK(batch.right(file));
    delete reader;
  }
}

TEST(without_a_ring_threads_read) {
  const File file;
  in_child([&] {
    forbid_rings();
    DiskReader reader;
    CHECK(reader.kind() == DiskReader::Kind::kThreads);
    const Batch batch(file, 500, 1);
    reader.read(batch.reads);
    CHECK(batch.right(file));
  });
}

TEST(without_enough_rings_threads_wait_for_each_other) {
  const File file;
  in_child([&] {
    DiskReader reader;
    const bool has_ring = reader.kind() == DiskReader::Kind::kUring;
    const auto work = [&](unsigned t) {
      for (unsigned i = 0; i < 50; ++i) {
        const Batch batch(file, 200, 100 * t + i);
        reader.read(batch.reads);
        CHECK(batch.right(file));
      }
    };
    forbid_rings();
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t) threads.emplace_back(work, t);
    for (auto& thread : threads) thread.join();
    CHECK((reader.kind() == DiskReader::Kind::kUring) == has_ring);
  });
}

MAIN
