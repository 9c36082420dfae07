#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"
#include "persia/thread_pool.hpp"

using persia::ThreadPool;

TEST(runs_every_iteration_once) {
  for (const std::size_t threads : {1u, 2u, 4u}) {
    ThreadPool pool(threads);
    CHECK(pool.threads() == threads);
    for (const std::size_t count : {0u, 1u, 3u, 1000u}) {
      std::vector<std::atomic<int>> runs(count);
      pool.parallel_for(count, [&](std::size_t i) { ++runs[i]; });
      for (const auto& r : runs) CHECK(r == 1);
    }
  }
}

TEST(rethrows_and_stays_usable) {
  ThreadPool pool(3);
  CHECK_THROWS(pool.parallel_for(100,
                                 [](std::size_t i) {
                                   if (i == 50) throw std::runtime_error("50");
                                 }),
               std::runtime_error);
  std::atomic<int> runs = 0;
  pool.parallel_for(10, [&](std::size_t) { ++runs; });
  CHECK(runs == 10);
}

TEST(several_callers_and_nested_loops) {
  ThreadPool pool(3);
  std::atomic<int> runs = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.parallel_for(8, [&](std::size_t) { pool.parallel_for(4, [&](std::size_t) { ++runs; }); });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(runs == 4 * 50 * 8 * 4);
}

MAIN
