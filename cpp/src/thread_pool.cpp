#include "persia/thread_pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

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

ThreadPool::ThreadPool(std::size_t threads) : state_(std::make_unique<State>()), process_(getpid()) {
  try {
    for (std::size_t i = 1; i < threads; ++i) state_->workers.emplace_back([state = state_.get()] { work(*state); });
  } catch (const std::exception& error) {
    stop();
    throw std::runtime_error("only " + std::to_string(state_->workers.size()) + " of " + std::to_string(threads) +
                             " threads could be started: " + error.what() +
                             ". Ask for fewer, or raise the limit (`ulimit -u`; in a container: `--pids-limit`)");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() != process_) {
    // In a forked child the threads do not exist: joining them, or destroying what they wait on, would hang.
    static_cast<void>(state_.release());
    return;
  }
  stop();
}

void ThreadPool::stop() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->wake.notify_all();
  for (auto& worker : state_->workers) worker.join();
}

void ThreadPool::parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  if (count <= 1 || state_->workers.empty() || getpid() != process_) {
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
  auto& loops = state_->loops;
  auto loop = std::make_shared<Loop>();
  loop->body = &body;
  loop->count = count;
  {
    const std::lock_guard lock(state_->mutex);
    loops.push_back(loop);
  }
  const std::size_t helpers = std::min(count - 1, state_->workers.size());
  for (std::size_t i = 0; i < helpers; ++i) state_->wake.notify_one();
  loop->run();
  {
    std::unique_lock lock(loop->mutex);
    loop->done.wait(lock, [&] { return loop->ended == loop->count; });
  }
  {
    const std::lock_guard lock(state_->mutex);
    const auto found = std::find(loops.begin(), loops.end(), loop);
    if (found != loops.end()) loops.erase(found);
  }
  // Taken out: a worker that still holds the loop must not be the one to free the error that the caller reads.
  if (auto error = std::exchange(loop->error, nullptr)) std::rethrow_exception(std::move(error));
}

void ThreadPool::work(State& state) {
  for (;;) {
    std::shared_ptr<Loop> loop;
    {
      std::unique_lock lock(state.mutex);
      state.wake.wait(lock, [&] { return state.stopping || !state.loops.empty(); });
      if (state.stopping) return;
      loop = state.loops.front();
      // An exhausted loop is of no use to anybody else; its owner waits for those still running in it.
      if (loop->next.load() >= loop->count) {
        state.loops.pop_front();
        continue;
      }
    }
    loop->run();
  }
}

}  // namespace persia
