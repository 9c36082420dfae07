// What bounds a lookup: the store next to the memory accesses that its layout needs, and next to a plain array.
//
//   lookup [million rows]       nanoseconds per row, median of 9 alternating rounds, one thread, dim 16, Adagrad
//
//   array     64 bytes copied from a random row of an array (what torch.index_select does), small pages
//   accesses  the same cache lines as a lookup, in the same distance ahead, by addresses known before: a line of the
//             index, header and embedding of a row, a stamp written
//   store     a training lookup of existing rows
//   in cache  the same of 2,048 rows: what the instructions of a lookup cost
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "persia/store.hpp"

using namespace persia;

namespace {

constexpr std::size_t kBatch = 65536, kBatches = 20, kDim = 16, kRounds = 9, kAhead = 8;
constexpr std::size_t kStride = sizeof(RowHeader) + 2 * kDim * sizeof(float);  // Adagrad
constexpr std::size_t kRead = sizeof(RowHeader) + kDim * sizeof(float);

std::uint64_t id_of(std::uint64_t row) { return row * kGolden; }

double seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void look(Store& store, const std::vector<std::uint64_t>& ids, std::size_t start, std::size_t count, float* out) {
  const LookupRequest request{0, ids.data() + start, count, out};
  store.lookup(std::span(&request, 1), true);
}

void fill(Store& store, std::size_t rows, std::vector<float>& out) {
  TableConfig config;
  config.name = "table";
  store.create_table(config);
  std::vector<std::uint64_t> ids;
  for (std::size_t row = 0; row < rows; ++row) ids.push_back(id_of(row));
  for (std::size_t start = 0; start < rows; start += kBatch) {
    look(store, ids, start, std::min(kBatch, rows - start), out.data());
  }
}

std::byte* huge(Region& region, std::size_t bytes) {
  region = Region::anonymous(bytes);
  region.advise_huge(0, bytes);
  std::memset(region.base(), 1, bytes);
  return region.base();
}

}  // namespace

int main(int count, char** arguments) {
  const std::size_t rows = (count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 12) * 1'000'000;
  std::mt19937_64 random(0);
  std::vector<std::uint64_t> wanted(kBatch * kBatches), ids, few;
  for (auto& row : wanted) row = random() % rows;
  for (const auto row : wanted) ids.push_back(id_of(row));
  for (std::size_t i = 0; i < 2048; ++i) few.push_back(id_of(i));
  std::vector<float> out(kBatch * kDim), array(rows * kDim, 1.0f);

  ThreadPool pool(1);
  Store store(pool), small(pool);
  fill(store, rows, out);
  fill(small, few.size(), out);

  Region row_region, index_region;
  const std::size_t lines = rows / 5;  // 8 slots a line at a load of 0.625
  std::byte* const row_base = huge(row_region, rows * kStride);
  std::byte* const line_base = huge(index_region, lines * 64);
  std::vector<std::byte*> row_at, line_at;
  for (const auto row : wanted) {
    row_at.push_back(row_base + row * kStride);
    line_at.push_back(line_base + hash_id(row) % lines * 64);
  }

  volatile std::uint64_t sink = 0;
  const auto accesses = [&] {
    std::uint64_t sum = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      if (i + 2 * kAhead < wanted.size()) __builtin_prefetch(line_at[i + 2 * kAhead]);
      if (i + kAhead < wanted.size()) {
        std::uint64_t slot;
        std::memcpy(&slot, line_at[i + kAhead], sizeof(slot));
        sum += slot;
        for (std::size_t at = 0; at < kRead; at += 64) __builtin_prefetch(row_at[i + kAhead] + at, 0, 0);
        __builtin_prefetch(row_at[i + kAhead] + kRead - 1, 0, 0);
      }
      reinterpret_cast<RowHeader*>(row_at[i])->stamp = static_cast<std::uint32_t>(i);
      std::memcpy(out.data() + i % kBatch * kDim, row_at[i] + sizeof(RowHeader), kDim * sizeof(float));
    }
    sink = sum;
  };
  const std::vector<std::pair<const char*, std::function<void()>>> variants = {
      {"array",
       [&] {
         for (std::size_t i = 0; i < wanted.size(); ++i) {
           std::memcpy(out.data() + i % kBatch * kDim, array.data() + wanted[i] * kDim, kDim * sizeof(float));
         }
       }},
      {"accesses", accesses},
      {"store",
       [&] {
         for (std::size_t b = 0; b < kBatches; ++b) look(store, ids, b * kBatch, kBatch, out.data());
       }},
      {"in cache",
       [&] {
         for (std::size_t b = 0; b < wanted.size() / few.size(); ++b) look(small, few, 0, few.size(), out.data());
       }},
  };
  std::vector<std::vector<double>> times(variants.size());
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::size_t v = 0; v < variants.size(); ++v) times[v].push_back(seconds(variants[v].second));
  }
  for (std::size_t v = 0; v < variants.size(); ++v) {
    std::sort(times[v].begin(), times[v].end());
    const double scale = 1e9 / static_cast<double>(wanted.size());
    std::printf("%-9s %6.1f ns/row  (%.1f ... %.1f)\n", variants[v].first, times[v][kRounds / 2] * scale,
                times[v].front() * scale, times[v].back() * scale);
  }
}
