// Random rows read from disk, compared with plain reads of the same pages.
//
//   row_log [directory] [MiB] [row bytes]      thousands of rows per second, median of 5 alternating rounds
//
//   io_uring  RowLog::read of batches of 8,192 random records, checksums verified
//   threads   the same, where the kernel has no io_uring
//   preads    a loop of pread in each of 128 threads (the depth of a ring): one page of 4 KiB of each record, O_DIRECT
//
// The file is written by RowLog and never in the page cache.
#include "persia/row_log.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "persia/disk_rate.hpp"

using namespace persia;

namespace {

constexpr std::size_t kBatch = 8192, kBatches = 4, kRounds = 5;

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void read_rows(const RowLog& log, const std::vector<std::uint32_t>& records, std::vector<std::byte>& out) {
  for (std::size_t start = 0; start < records.size(); start += kBatch) {
    const std::span batch(records.data() + start, kBatch);
    log.read(batch, out.data());
    for (std::size_t i = 0; i < kBatch; ++i) log.row_in(batch[i], out.data() + i * log.record_bytes());
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  RowLog::Options options;
  options.path = std::string(argc > 1 ? argv[1] : ".") + "/persia-bench-rows";
  const std::uint64_t bytes = (argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1024) << 20;
  options.row_bytes = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 80;
  options.max_records = RowLog::kNone;
  options.keep = true;
  DiskReader ring, threads(DiskReader::Kind::kThreads);
  RowLog log = RowLog::create(options, ring);
  const std::uint64_t blocks = bytes / RowLog::kBlockBytes;
  const std::vector<std::byte> row(options.row_bytes, std::byte{7});
  const std::size_t of_block = RowLog::block_records(options.row_bytes);
  std::vector<std::uint32_t> records(of_block);
  const double writing = seconds([&] {
    for (std::uint64_t b = 0; b < blocks; ++b) {
      for (auto& record : records) record = log.append(1, row.data());
      log.flush();
      for (const std::uint32_t record : records) log.revive(record);
    }
  });
  const std::uint64_t next = log.next();
  {
    const RowLog closed = std::move(log);
  }
  std::vector<double> by_ring, by_threads, by_preads;
  std::mt19937_64 random(1);
  std::vector<std::byte> out;
  const auto rate_of = [&](DiskReader& reader) {
    const RowLog attached = RowLog::attach(options, next, reader);
    out.resize(kBatch * attached.record_bytes());
    records.resize(kBatch * kBatches);
    for (auto& record : records) record = static_cast<std::uint32_t>(random() % next);
    return static_cast<double>(records.size()) / seconds([&] { read_rows(attached, records, out); }) / 1e3;
  };
  for (unsigned round = 0; round < kRounds; ++round) {
    by_ring.push_back(rate_of(ring));
    by_threads.push_back(rate_of(threads));
    const std::size_t count = kBatch * kBatches;
    const RandomReads pages{
        options.path, RowLog::kFileHeader, blocks * RowLog::kBlockBytes / RowLog::kPage, RowLog::kPage, count, round};
    by_preads.push_back(static_cast<double>(count) / read_by_threads(pages, DiskReader::kDepth) / 1e3);
  }
  unlink(options.path.c_str());
  std::printf("%llu rows of %zu bytes, written at %.0f MiB/s\n", static_cast<unsigned long long>(next),
              options.row_bytes, static_cast<double>(bytes >> 20) / writing);
  std::printf("io_uring %.1f  threads %.1f  preads %.1f  thousand rows/s\n", median(by_ring), median(by_threads),
              median(by_preads));
}
