// A fixed set of threads that run the iterations of a loop, together with the calling thread.
#pragma once
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace persia {

// Thread-safe. Each call helps with its own loop only, so calls cannot deadlock one another. A pool of one thread runs
// everything on the caller.
class ThreadPool {
 public:
  // Starts `threads` - 1 threads. Throws std::runtime_error if one cannot be started.
  explicit ThreadPool(std::size_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Returns the number of threads, including the caller.
  std::size_t threads() const { return state_->workers.size() + 1; }

  // Runs body(0) ... body(count - 1) in any order and returns when all have ended. The first exception is rethrown.
  void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body);

 private:
  struct Loop;
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<std::shared_ptr<Loop>> loops;
    bool stopping = false;
    std::vector<std::thread> workers;
  };
  static void work(State& state);
  void stop();

  std::unique_ptr<State> state_;
  pid_t process_;
};

}  // namespace persia
