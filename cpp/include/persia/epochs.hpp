// Epoch-based reclamation (Fraser, "Practical lock-freedom", 2004): lets a writer free memory that readers may still
// use, while neither waits for the other.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "persia/memory.hpp"

namespace persia {

// A writer unlinks an object, notes `current()` with it, and calls `advance()`. Once `oldest()` is above the noted
// epoch, no reader can hold the object. Any number of readers; calls of one writer at a time.
class Epochs {
 public:
  Epochs() = default;
  Epochs(const Epochs&) = delete;
  Epochs& operator=(const Epochs&) = delete;
  ~Epochs();

  // While it lives, nothing is freed that its thread finds. Does not block.
  class Reader {
   public:
    // Throws std::bad_alloc if there are more readers at a time than ever before, and no memory to note them.
    explicit Reader(Epochs& epochs) : slot_(epochs.enter()) {}
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    ~Reader() { slot_->store(0, std::memory_order_release); }

   private:
    std::atomic<std::uint64_t>* slot_;
  };

  // Returns the epoch to note with what has just been unlinked.
  std::uint64_t current() const { return epoch_.load(std::memory_order_relaxed); }
  // Begins another epoch.
  void advance() { epoch_.store(current() + 1); }
  // Returns the epoch in which the oldest reader began; the current one if there is none.
  std::uint64_t oldest() const;

 private:
  struct alignas(kLine) Slot {
    std::atomic<std::uint64_t> epoch{0};  // in which its reader began; 0 while it is free
  };
  struct Block {
    std::array<Slot, 32> slots;
    std::atomic<Block*> next{nullptr};
  };

  std::atomic<std::uint64_t>* enter();

  std::atomic<std::uint64_t> epoch_{1};
  Block first_;
};

}  // namespace persia
