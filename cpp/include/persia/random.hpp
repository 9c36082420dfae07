// Initial values of a row, which depend on the key of its id only.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>

#include "persia/mix.hpp"

namespace persia {

enum class Initializer : std::uint32_t { kZeros = 0, kUniform = 1, kNormal = 2 };

// uniform: [a, b); normal: mean a, standard deviation b.
struct InitializerConfig {
  Initializer kind = Initializer::kUniform;
  float a = -0.01f;
  float b = 0.01f;
};

namespace detail {
// Uses 24 bits, which float represents exactly, so the value does not depend on the width of the vector unit.
inline float unit(std::uint32_t bits) { return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f; }

inline void fill_uniform(float* out, std::size_t dim, std::uint64_t key, float low, float range) {
  std::size_t i = 0;
  for (; i + 1 < dim; i += 2) {
    const std::uint64_t bits = random_bits(key, i / 2);
    out[i] = low + range * unit(static_cast<std::uint32_t>(bits));
    out[i + 1] = low + range * unit(static_cast<std::uint32_t>(bits >> 32));
  }
  if (i < dim) out[i] = low + range * unit(static_cast<std::uint32_t>(random_bits(key, i / 2)));
}

// Box and Muller 1958.
inline void fill_normal(float* out, std::size_t dim, std::uint64_t key, float mean, float deviation) {
  for (std::size_t i = 0; i < dim; i += 2) {
    const std::uint64_t bits = random_bits(key, i / 2);
    const double u = (static_cast<double>(static_cast<std::uint32_t>(bits) >> 8) + 1.0) * 0x1p-24;
    const double v = static_cast<double>(static_cast<std::uint32_t>(bits >> 32) >> 8) * 0x1p-24;
    const double radius = std::sqrt(-2.0 * std::log(u));
    const double angle = 2.0 * std::numbers::pi * v;
    out[i] = static_cast<float>(mean + deviation * (radius * std::cos(angle)));
    if (i + 1 < dim) out[i + 1] = static_cast<float>(mean + deviation * (radius * std::sin(angle)));
  }
}
}  // namespace detail

// Fills the embedding of a new row.
inline void initialize(const InitializerConfig& config, float* out, std::size_t dim, std::uint64_t key) {
  switch (config.kind) {
    case Initializer::kUniform:
      return detail::fill_uniform(out, dim, key, config.a, config.b - config.a);
    case Initializer::kNormal:
      return detail::fill_normal(out, dim, key, config.a, config.b);
    case Initializer::kZeros:
      for (std::size_t i = 0; i < dim; ++i) out[i] = 0.0f;
  }
}

}  // namespace persia
