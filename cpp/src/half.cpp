#include "persia/half.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "persia/isa.hpp"
#include "persia/memory.hpp"

namespace persia {
namespace {

// Regions are read as words and as halves.
using Half [[gnu::may_alias]] = std::uint16_t;

constexpr std::uint32_t kInfinity = 0x7F800000u;  // of float32, as bits

// Each format: from magnitudes to its bits, where the addend decides what rounds up. No branches, so that loops become
// vectors.
template <Dtype>
struct Format;

template <>
struct Format<Dtype::kBfloat16> {
  static constexpr std::uint32_t kLargest = 0x7F7Fu, kInf = 0x7F80u, kNan = 0x7FC0u;

  [[gnu::always_inline]] static inline float widen(std::uint32_t half) { return std::bit_cast<float>(half << 16); }
  [[gnu::always_inline]] static inline std::uint32_t nearest(std::uint32_t magnitude) {
    return (magnitude + 0x7FFFu + (magnitude >> 16 & 1u)) >> 16;
  }
  [[gnu::always_inline]] static inline std::uint32_t stochastic(std::uint32_t magnitude, std::uint32_t random) {
    return (magnitude + random) >> 16;
  }
};

template <>
struct Format<Dtype::kFloat16> {
  static constexpr std::uint32_t kLargest = 0x7BFFu, kInf = 0x7C00u, kNan = 0x7E00u;
  static constexpr std::uint32_t kNormal = 0x38800000u;  // 2^-14: multiples of 2^-24 below it

  // After Fabian Giesen, "Half-precision float <-> float conversion"; no operand is a subnormal float32, as threads may
  // take those for zeros (torch.set_flush_denormal).
  [[gnu::always_inline]] static inline float widen(std::uint32_t half) {
    const std::uint32_t moved = (half & 0x7FFFu) << 13;
    const bool small = (half & 0x7C00u) == 0;  // 2^-14 + the number, less 2^-14
    const float raised = std::bit_cast<float>(moved + (small ? 0x38800000u : 0x38000000u));
    const std::uint32_t finite = std::bit_cast<std::uint32_t>(raised - (small ? 0x1p-14f : 0.0f));
    const std::uint32_t magnitude = (half & 0x7C00u) == 0x7C00u ? moved | kInfinity : finite;
    return std::bit_cast<float>(magnitude | (half & 0x8000u) << 16);
  }
  [[gnu::always_inline]] static inline std::uint32_t nearest(std::uint32_t magnitude) {
    // The addition of 0.5 rounds as the target does.
    const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3F000000u;
    const std::uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
    return magnitude < kNormal ? small : normal;
  }
  [[gnu::always_inline]] static inline std::uint32_t stochastic(std::uint32_t magnitude, std::uint32_t random) {
    const std::uint32_t below = magnitude < kNormal ? magnitude : 0u;
    // In units of 2^-40: exact but for what is below one.
    const auto fixed = static_cast<std::uint32_t>(static_cast<std::int32_t>(std::bit_cast<float>(below) * 0x1p40f));
    const std::uint32_t normal = (magnitude - 0x38000000u + (random >> 3)) >> 13;
    return magnitude < kNormal ? (fixed + random) >> 16 : normal;
  }
};

// The bits of a value, rounded by `round` if it is finite.
template <Dtype D, class Round>
[[gnu::always_inline]] inline Half narrowed(float value, Round&& round) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t finite = std::min(round(magnitude), Format<D>::kLargest);
  const std::uint32_t other = magnitude == kInfinity ? Format<D>::kInf : Format<D>::kNan;
  return static_cast<Half>((magnitude < kInfinity ? finite : other) | (bits >> 16 & 0x8000u));
}

// The random numbers of N values, as a vector.
template <std::size_t N>
struct Numbers;
template <>
struct Numbers<16> {
  using Type [[gnu::vector_size(32)]] = std::uint64_t;
};
template <>
struct Numbers<8> {
  using Type [[gnu::vector_size(16)]] = std::uint64_t;
};

template <Dtype D>
struct Narrow {
  [[gnu::always_inline]] static inline void load(const void* words, float* __restrict values, std::size_t count) {
    const auto* halves = static_cast<const Half*>(words);
    for (std::size_t i = 0; i < count; ++i) values[i] = Format<D>::widen(halves[i]);
  }

  [[gnu::always_inline]] static inline void nearest(const float* __restrict values, void* words, std::size_t count) {
    auto* halves = static_cast<Half*>(words);
    for (std::size_t i = 0; i < count; ++i) {
      halves[i] = narrowed<D>(values[i], [](std::uint32_t magnitude) { return Format<D>::nearest(magnitude); });
    }
    if (count % 2 != 0) halves[count] = 0;
  }

  [[gnu::always_inline]] static inline void stochastic(const float* __restrict values, void* words, std::size_t count,
                                                       std::uint64_t key, std::uint64_t first) {
    auto* halves = static_cast<Half*>(words);
    std::size_t i = 0;
    for (; i + 16 <= count; i += 16) random_block<16>(values + i, halves + i, key, first + i / 4);
    if (i + 8 <= count) {
      random_block<8>(values + i, halves + i, key, first + i / 4);
      i += 8;
    }
    if (i < count) {
      float some[8] = {};
      Half rounded[8];
      for (std::size_t j = 0; i + j < count; ++j) some[j] = values[i + j];
      random_block<8>(some, rounded, key, first + i / 4);
      for (std::size_t j = 0; i + j < count; ++j) halves[i + j] = rounded[j];
    }
    if (count % 2 != 0) halves[count] = 0;
  }

 private:
  // N values with numbers of the sequence from `first` on; a vector of them, not an array: vectors that are read where
  // words were just written have to wait.
  template <std::size_t N>
  [[gnu::always_inline]] static inline void random_block(const float* __restrict values, Half* __restrict halves,
                                                         std::uint64_t key, std::uint64_t first) {
    typename Numbers<N>::Type numbers{};
    for (std::size_t i = 0; i < N / 4; ++i) numbers[i] = random_bits(key, first + i);
    std::uint16_t random[N];
    std::memcpy(random, &numbers, sizeof(random));
    for (std::size_t i = 0; i < N; ++i) {
      const std::uint32_t mine = random[i];
      halves[i] =
          narrowed<D>(values[i], [=](std::uint32_t magnitude) { return Format<D>::stochastic(magnitude, mine); });
    }
  }
};

// Nothing is rounded.
template <>
struct Narrow<Dtype::kFloat32> {
  static void load(const void* words, float* values, std::size_t count) {
    copy_floats(values, static_cast<const float*>(words), count);
  }
  static void nearest(const float* values, void* words, std::size_t count) {
    copy_floats(static_cast<float*>(words), values, count);
  }
  static void stochastic(const float* values, void* words, std::size_t count, std::uint64_t, std::uint64_t) {
    nearest(values, words, count);
  }
};

struct Kernels {
  ValueCodec::Load load;
  ValueCodec::Nearest nearest;
  ValueCodec::Stochastic stochastic;
};

#define PERSIA_KERNELS(name, target)                                                                      \
  template <Dtype D>                                                                                      \
  struct name {                                                                                           \
    target static void load(const void* words, float* values, std::size_t count) {                        \
      Narrow<D>::load(words, values, count);                                                              \
    }                                                                                                     \
    target static void nearest(const float* values, void* words, std::size_t count) {                     \
      Narrow<D>::nearest(values, words, count);                                                           \
    }                                                                                                     \
    target static void stochastic(const float* values, void* words, std::size_t count, std::uint64_t key, \
                                  std::uint64_t first) {                                                  \
      Narrow<D>::stochastic(values, words, count, key, first);                                            \
    }                                                                                                     \
    static constexpr Kernels kAll{load, nearest, stochastic};                                             \
  }

PERSIA_KERNELS(Base, );
#if defined(__x86_64__)
PERSIA_KERNELS(Avx2, [[gnu::target("avx2")]]);
PERSIA_KERNELS(Avx512, PERSIA_AVX512);
#endif
#undef PERSIA_KERNELS

template <Dtype D>
Kernels choose() {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return Avx512<D>::kAll;
  if (isa() == Isa::kAvx2) return Avx2<D>::kAll;
#endif
  return Base<D>::kAll;
}

Kernels choose(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return choose<Dtype::kFloat32>();
    case Dtype::kBfloat16:
      return choose<Dtype::kBfloat16>();
    case Dtype::kFloat16:
      return choose<Dtype::kFloat16>();
  }
  throw std::invalid_argument("unknown dtype");
}

}  // namespace

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  throw std::invalid_argument("unknown dtype '" + name + "': use float32, bfloat16 or float16");
}

float largest_finite(const float* values, std::size_t count) {
  std::int32_t largest = 0;  // as bits, which are in the same order
  for (std::size_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(values[i]) & 0x7FFFFFFFu);
    largest = std::max(largest, magnitude < static_cast<std::int32_t>(kInfinity) ? magnitude : 0);
  }
  return std::bit_cast<float>(largest);
}

ValueCodec::ValueCodec(Dtype dtype) : dtype_(dtype) {
  const Kernels kernels = choose(dtype);
  load_ = kernels.load;
  nearest_ = kernels.nearest;
  stochastic_ = kernels.stochastic;
}

}  // namespace persia
