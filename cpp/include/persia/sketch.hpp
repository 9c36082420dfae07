// Count-min sketch with conservative update (Cormode, Muthukrishnan 2005; Estan, Varghese 2002).
#pragma once
#include <algorithm>
#include <cstdint>

#include "persia/layout.hpp"
#include "persia/mix.hpp"

namespace persia {

// Counts lookups of ids without a row. Memory is bounded; counts can be too high, never too low.
class Sketch {
 public:
  static constexpr std::uint32_t kMax = 65535;

  Sketch() = default;
  // A view of kSketchRows * `width` counters; `width` is a power of two.
  Sketch(std::uint16_t* counters, std::uint64_t width) : counters_(counters), mask_(width - 1), width_(width) {}

  // Counts an occurrence; returns the count including it, which saturates at 65,535.
  std::uint32_t add(std::uint64_t id) {
    const std::uint64_t hash = mix64(id ^ 0x5DEECE66D1CE4E5Bu);
    const std::uint64_t step = (hash >> 32) | 1u;
    std::uint16_t* cells[kSketchRows];
    std::uint16_t least = kMax;
    for (std::size_t i = 0; i < kSketchRows; ++i) {
      cells[i] = counters_ + i * width_ + ((hash + i * step) & mask_);
      least = std::min(least, *cells[i]);
    }
    if (least == kMax) return kMax;
    for (auto* cell : cells) *cell = std::max<std::uint16_t>(*cell, static_cast<std::uint16_t>(least + 1));
    return least + 1u;
  }

 private:
  std::uint16_t* counters_ = nullptr;
  std::uint64_t mask_ = 0;
  std::uint64_t width_ = 0;
};

}  // namespace persia
