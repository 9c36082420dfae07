#include "persia/thread_pool.hpp"

#include <algorithm>
#include <exception>

namespace persia {

struct ThreadPool::Loop {
  const std::function<void(std::size_t)>* body;
  std::size_t count;
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::condition_variable done;
  std::size_t ended = 0;
  std::exception_ptr error;

  // Takes iterations until none is left.
  void run() {
    std::size_t mine = 0;
    for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
      try {
        (*body)(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!error) error = std::current_exception();
      }
      ++mine;
    }
    if (mine == 0) return;
    const std::lock_guard lock(mutex);
    ended += mine;
    if (ended == count) done.notify_all();
  }
};

ThreadPool::ThreadPool(std::size_t threads) {
  for (std::size_t i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count <= 1 || workers_.empty()) {
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->body = &body;
  loop->count = count;
  {
    const std::lock_guard lock(mutex_);
    loops_.push_back(loop);
  }
  const std::size_t helpers = std::min(count - 1, workers_.size());
  for (std::size_t i = 0; i < helpers; ++i) wake_.notify_one();
  loop->run();
  {
    std::unique_lock lock(loop->mutex);
    loop->done.wait(lock, [&] { return loop->ended == loop->count; });
  }
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(loops_.begin(), loops_.end(), loop);
    if (found != loops_.end()) loops_.erase(found);
  }
  if (loop->error) std::rethrow_exception(loop->error);
}

void ThreadPool::work() {
  for (;;) {
    std::shared_ptr<Loop> loop;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !loops_.empty(); });
      if (stopping_) return;
      loop = loops_.front();
      // An exhausted loop is of no use to anybody else; its owner waits for those still running in it.
      if (loop->next.load() >= loop->count) {
        loops_.pop_front();
        continue;
      }
    }
    loop->run();
  }
}

}  // namespace persia
