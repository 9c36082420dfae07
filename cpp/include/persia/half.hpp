// 16-bit floats: how tables of dtype bfloat16 or float16 keep their values. Arithmetic is in float32 throughout.
//
// Rows are made of 32-bit words. Two 16-bit values share a word, the first one in its low half; of an odd number of
// values the last half is zero. So whatever moves rows moves words, and only these functions know what is in them.
//
// Rounding keeps what is finite finite: values beyond the largest number become that number. Infinities and NaN stay
// such. Results are the same bits on every machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "persia/mix.hpp"

namespace persia {

enum class Dtype : std::uint32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// Returns the dtype of this name. Throws std::invalid_argument for an unknown one.
Dtype dtype_of(const std::string& name);

// Returns the 32-bit words that `count` values occupy.
inline constexpr std::size_t words_of(Dtype dtype, std::size_t count) {
  return dtype == Dtype::kFloat32 ? count : (count + 1) / 2;
}

// The random numbers that round a row. They depend on what an update changes and on nothing of where or how often it is
// tried, so results are the same for any number of threads, shards and PSs, and for a push that is repeated.
struct Rounding {
  std::uint64_t key;    // of the update's sequence
  std::uint64_t first;  // place of the first number in it

  // Returns the key of an update of the row of (seed, table, id) at a step, where `words` are its embedding as stored
  // before. Rows are loaded without their number of updates, and steps begin again in another run: each alone would
  // meet the same numbers again.
  static std::uint64_t key_of(std::uint64_t seed, std::uint64_t name_hash, std::uint64_t id, std::uint32_t step,
                              const void* words, std::size_t count) {
    constexpr std::uint64_t kApart = 0x726F756E64696E67u;  // from initial values and admission
    std::uint64_t hash = mix64(step + kGolden);            // else its bits would pass for changes of the first word
    for (std::size_t i = 0; i < count; i += 2) {
      std::uint64_t pair = 0;
      std::memcpy(&pair, static_cast<const std::byte*>(words) + 4 * i, i + 1 < count ? 8 : 4);
      hash = (hash ^ pair) * kGolden;
      hash ^= hash >> 32;
    }
    return mix64(row_key(seed ^ kApart, name_hash, id) ^ hash);
  }

  // Returns the numbers of a row's `update`-th update. Part 0: the embedding; 1: the optimizer's state.
  static Rounding of(std::uint64_t key, std::uint32_t update, std::uint32_t part) {
    return {key, std::uint64_t{update} << 17 | std::uint64_t{part} << 16};
  }
};

// Returns the largest magnitude of the finite ones among `count` values; 0 without any.
float largest_finite(const float* values, std::size_t count);

// Converts values of a dtype. Kernels are compiled for several instruction sets and chosen once.
class ValueCodec {
 public:
  // Words have any alignment that float has, and any type: regions are bytes.
  using Load = void (*)(const void* words, float* values, std::size_t count);
  using Nearest = void (*)(const float* values, void* words, std::size_t count);
  using Stochastic = void (*)(const float* values, void* words, std::size_t count, std::uint64_t key,
                              std::uint64_t first);

  explicit ValueCodec(Dtype dtype);

  // Returns the dtype.
  Dtype dtype() const { return dtype_; }
  // Whether a value has 16 bits.
  bool narrow() const { return dtype_ != Dtype::kFloat32; }
  // Returns the words that `count` values occupy.
  std::size_t words(std::size_t count) const { return words_of(dtype_, count); }
  // Reads values, exactly.
  void load(const void* words, float* values, std::size_t count) const { load_(words, values, count); }
  // Writes values, each rounded to the nearest, ties to even.
  void store_nearest(const float* values, void* words, std::size_t count) const { nearest_(values, words, count); }
  // Writes values, each rounded up or down at random, so that it is right on average (stochastic rounding; Gupta et al.
  // 2015). Element i uses 16 bits of the (i / 4)-th number. A value that the dtype has stays as it
  // is. float16 has multiples of 2^-24 below 2^-14; what is below 2^-40 there is lost.
  void store_stochastic(const float* values, void* words, std::size_t count, const Rounding& random) const {
    stochastic_(values, words, count, random.key, random.first);
  }

 private:
  Dtype dtype_;
  Load load_;
  Nearest nearest_;
  Stochastic stochastic_;
};

}  // namespace persia
