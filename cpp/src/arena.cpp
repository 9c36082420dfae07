#include <algorithm>
#include <bit>
#include <new>
#include <utility>

#include "persia/batch.hpp"
#include "persia/memory.hpp"

namespace persia {
namespace {

constexpr std::size_t kKept = 8;  // blocks that an arena keeps

}  // namespace

void Arena::Lease::Free::operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{kLine}); }

Arena::Lease::Lease(Arena& arena, std::size_t bytes) : arena_(arena) {
  {
    const std::lock_guard lock(arena_.mutex_);
    // The smallest block that is large enough; failing that, any block gives way to a larger one.
    auto best = arena_.free_.end();
    for (auto block = arena_.free_.begin(); block != arena_.free_.end(); ++block) {
      if (block->bytes >= bytes && (best == arena_.free_.end() || block->bytes < best->bytes)) best = block;
    }
    if (best == arena_.free_.end() && !arena_.free_.empty()) best = arena_.free_.end() - 1;
    if (best != arena_.free_.end()) {
      block_ = std::move(*best);
      arena_.free_.erase(best);
    }
  }
  if (block_.bytes < bytes || !block_.memory) {
    block_.memory.reset();
    block_.bytes = 0;
    const std::size_t rounded = std::bit_ceil(std::max<std::size_t>(bytes, 4096));
    block_.memory.reset(static_cast<std::byte*>(::operator new(rounded, std::align_val_t{kLine})));
    block_.bytes = rounded;
  }
}

Arena::Lease::~Lease() {
  const std::lock_guard lock(arena_.mutex_);
  if (arena_.free_.size() >= kKept) return;  // What a burst has borrowed is freed.
  try {
    arena_.free_.push_back(std::move(block_));
  } catch (...) {  // no memory for the list: the block is freed instead of kept
  }
}

}  // namespace persia
