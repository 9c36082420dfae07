// Every instruction set gives the bits of the baseline. What one of them computes is tested elsewhere.
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <vector>

#include "check.hpp"
#include "one_table.hpp"
#include "persia/checksum.hpp"
#include "persia/codec.hpp"
#include "persia/half.hpp"
#include "persia/isa.hpp"
#include "persia/optim.hpp"
#include "persia/random.hpp"

using namespace persia;

namespace {

constexpr Isa kAll[] = {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512};

std::uint32_t all_results = 0;  // the checksum of them

// Calls `compute` with each instruction set of this machine and compares what it returns with the first result.
template <class Compute>
void same_bits(Compute&& compute) {
  const auto bits = [](const auto& values) {
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    return std::vector<std::byte>(begin, begin + values.size() * sizeof(values[0]));
  };
  std::vector<std::byte> expected;
  for (const Isa each : kAll) {
    if (each > widest_isa()) break;
    use_isa(each);
    if (each == Isa::kBaseline) {
      expected = bits(compute());
      CHECK(!expected.empty());
      all_results = crc32(all_results, expected.data(), expected.size());
    } else {
      CHECK(bits(compute()) == expected);
    }
  }
  use_isa(widest_isa());
}

// Numbers of all magnitudes from 2^-lowest on, of both signs; none of them NaN or infinite.
std::vector<float> numbers(std::size_t count, std::uint64_t seed, int lowest = 149) {
  std::vector<float> found(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t random = random_bits(seed, i);
    const int exponent = static_cast<int>(random >> 32) % (lowest + 40);
    const float value =
        std::ldexp(1.0f + static_cast<float>(random & 0x7FFFFFu) * 0x1p-23f, std::abs(exponent) - lowest);
    found[i] = (random >> 63) != 0 ? -value : value;
  }
  return found;
}

std::vector<float> squares(std::vector<float> values) {
  for (float& value : values) value *= value;
  return values;
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// Returns rows and states after updates, at each length of a rest behind whole vectors.
std::vector<float> updated(const OptimizerConfig& config) {
  const Optimizer optimizer(config);
  std::vector<float> all;
  for (std::size_t dim = 1; dim < 70; ++dim) {
    std::vector<float> weight = numbers(dim, dim, 20), state = squares(numbers(2 * dim, dim + 1000, 20));
    for (std::uint32_t count = 1; count < 4; ++count) {
      const std::vector<float> gradient = numbers(dim, dim + 2000 + count, 20);
      std::vector<float> before(optimizer.before_width(dim));
      CHECK(optimizer.apply({weight.data(), state.data(), gradient.data(), dim, 0.07f, count, before.data()}));
    }
    append(all, weight);
    append(all, state);
  }
  return all;
}

}  // namespace

TEST(names) {
  for (const Isa each : kAll) CHECK(isa_of(isa_name(each)) == each);
  CHECK_THROWS(isa_of("sse2"), std::invalid_argument);
}

TEST(the_widest_is_the_default_and_none_wider_can_be_used) {
  if (std::getenv("PERSIA_MAX_ISA") == nullptr) CHECK(isa() == widest_isa());
  for (const Isa each : kAll) {
    if (each <= widest_isa()) {
      use_isa(each);
      CHECK(isa() == each);
    } else {
      CHECK_THROWS(use_isa(each), std::invalid_argument);
    }
  }
  use_isa(widest_isa());
}

// Each optimizer with each option that adds an operation.
TEST(updates_of_rows) {
  std::vector<OptimizerConfig> configs;
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad,
                          OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
    OptimizerConfig plain;
    plain.kind = kind;
    OptimizerConfig all = plain;
    all.momentum = 0.9f;
    all.weight_decay = 0.013f;
    all.bound = 100.0f;
    all.l1 = 0.7f;
    all.l2 = 0.3f;
    configs.insert(configs.end(), {plain, all});
  }
  for (const OptimizerConfig& config : configs) same_bits([&] { return updated(config); });
}

TEST(values_of_16_bits) {
  for (const Dtype dtype : {Dtype::kBfloat16, Dtype::kFloat16}) {
    same_bits([&] {
      const ValueCodec codec(dtype);
      std::vector<std::uint16_t> all;
      for (std::size_t count = 1; count < 70; ++count) {
        const std::vector<float> values = numbers(count, count);
        std::vector<std::uint16_t> halves(2 * codec.words(count));
        codec.store_nearest(values.data(), halves.data(), count);
        append(all, halves);
        codec.store_stochastic(values.data(), halves.data(), count, {count, 3});
        append(all, halves);
      }
      return all;
    });
    same_bits([&] {
      const ValueCodec codec(dtype);
      std::vector<std::uint16_t> halves(1 << 16);
      for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
      std::vector<float> all;
      for (const std::size_t count : {std::size_t{1}, std::size_t{13}, halves.size()}) {
        std::vector<float> values(count);
        codec.load(halves.data(), values.data(), count);
        append(all, values);
      }
      return all;
    });
  }
}

// A scale for each row: the fp16 of messages.
TEST(values_of_messages) {
  for (std::size_t dim = 1; dim < 70; ++dim) {
    const std::size_t count = 5;
    std::vector<float> rows = numbers(count * dim, dim, 60);
    std::vector<std::uint16_t> halves(count * dim);
    std::vector<float> scales(count);
    same_bits([&] {
      encode_fp16(rows.data(), count, dim, halves.data(), scales.data());
      return halves;
    });
    same_bits([&] {
      encode_fp16(rows.data(), count, dim, halves.data(), scales.data());
      return scales;
    });
    same_bits([&] {
      std::vector<float> decoded(count * dim);
      decode_fp16(halves.data(), scales.data(), count, dim, decoded.data());
      return decoded;
    });
  }
}

TEST(checksums) {
  const std::vector<float> data = numbers(1000, 5);
  const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
  same_bits([&] {
    std::vector<std::uint32_t> found;
    for (std::size_t length = 0; length < 600; ++length) found.push_back(crc32(7, bytes + length % 13, length));
    return found;
  });
}

// All of it together: rows are found, made, updated, evicted and read.
TEST(tables) {
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kFloat16}) {
    row_shape = {19, dtype, OptimizerKind::kAdam, 0};
    same_bits([&] {
      ThreadPool pool(2);
      Store store(pool);
      store.create_table(config_of(3000, 4));
      std::vector<float> all;
      for (std::uint64_t step = 1; step < 8; ++step) {
        Keys keys = range(step * 500, step * 500 + 1000);
        for (std::uint64_t& key : keys) key *= kGolden;
        append(all, look(store, keys));
        push(store, keys, numbers(keys.size() * row_shape.dim, step, 20), {static_cast<std::uint32_t>(step), 1, step});
        append(all, look(store, keys, false));
      }
      return all;
    });
  }
  row_shape = {};
}

// Those of x86-64, which a processor of another architecture has to reach, too. A change of this number is a change of
// what every table will hold.
TEST(any_architecture) { CHECK(all_results == 0x09458267u); }

TEST(clipped_gradients_and_decayed_rows) {
  all_results = 0;
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad,
                          OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
    OptimizerConfig config;
    config.kind = kind;
    config.clip_row_norm = 5.0f;
    config.decoupled_weight_decay = 0.5f;
    same_bits([&] { return updated(config); });
  }
  CHECK(all_results == 0x46bd1d8au);
}

MAIN
