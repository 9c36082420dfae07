#include "persia/epochs.hpp"

#include <algorithm>
#include <memory>

#include "persia/mix.hpp"

namespace persia {
namespace {

// Threads begin their search for a free slot at different ones, so that they do not share a cache line.
std::size_t thread_place() {
  thread_local const char marker = 0;
  return static_cast<std::size_t>(mix64(reinterpret_cast<std::uintptr_t>(&marker)));
}

}  // namespace

Epochs::~Epochs() {
  for (Block* block = first_.next.load(); block != nullptr;) {
    const std::unique_ptr<Block> owned(block);
    block = owned->next.load();
  }
}

// All accesses of `epoch_` and the slots are sequentially consistent. If `oldest` misses a reader, its scan precedes
// the reader's store, so the reader's second load sees the epoch that the writer had begun before the scan, and with it
// all that was unlinked before.
std::atomic<std::uint64_t>* Epochs::enter() {
  const std::size_t place = thread_place();
  for (Block* block = &first_;;) {
    for (std::size_t i = 0; i < block->slots.size(); ++i) {
      std::atomic<std::uint64_t>& slot = block->slots[(place + i) % block->slots.size()].epoch;
      std::uint64_t free = 0;
      if (slot.load(std::memory_order_relaxed) == 0 && slot.compare_exchange_strong(free, epoch_.load())) {
        static_cast<void>(epoch_.load());
        return &slot;
      }
    }
    Block* next = block->next.load();
    if (next == nullptr) {
      auto fresh = std::make_unique<Block>();
      if (block->next.compare_exchange_strong(next, fresh.get())) next = fresh.release();
    }
    block = next;
  }
}

std::uint64_t Epochs::oldest() const {
  std::uint64_t oldest = epoch_.load();
  for (const Block* block = &first_; block != nullptr; block = block->next.load()) {
    for (const Slot& slot : block->slots) {
      const std::uint64_t epoch = slot.epoch.load();
      if (epoch != 0) oldest = std::min(oldest, epoch);
    }
  }
  return oldest;
}

}  // namespace persia
