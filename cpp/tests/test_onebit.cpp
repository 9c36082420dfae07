#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <vector>

#include "check.hpp"
#include "persia/isa.hpp"
#include "persia/onebit.hpp"

using namespace persia;

namespace {

// The first values of a seed. They are kept: to draw them takes longer than the tests.
std::vector<float> normal(std::size_t count, unsigned seed) {
  struct Drawn {
    std::mt19937 generator;
    std::normal_distribution<float> distribution;
    std::vector<float> values;
  };
  static std::map<unsigned, Drawn> all;
  Drawn& drawn = all.try_emplace(seed, Drawn{std::mt19937(seed), {}, {}}).first->second;
  while (drawn.values.size() < count) drawn.values.push_back(drawn.distribution(drawn.generator));
  return {drawn.values.begin(), drawn.values.begin() + static_cast<std::ptrdiff_t>(count)};
}

std::vector<Isa> isas() {
  std::vector<Isa> found;
  for (const Isa each : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (each <= widest_isa()) found.push_back(each);
  }
  return found;
}

struct Packed {
  std::vector<float> lost, arrived;
  std::vector<std::uint8_t> payload;
  bool operator==(const Packed&) const = default;
};

Packed pack(const OneBitFormat& format, const std::vector<float>& values) {
  Packed p{values, std::vector<float>(values.size(), 99.0f),
           std::vector<std::uint8_t>(format.payload_bytes(values.size()), 255)};
  onebit_pack(format, p.lost.data(), values.size(), p.payload.data());
  onebit_unpack(format, p.payload.data(), values.size(), p.arrived.data());
  return p;
}

}  // namespace

TEST(a_block_keeps_its_signs_and_its_mean_magnitude) {
  const Packed p = pack({64, false}, {1.0f, -3.0f, 0.0f, -0.0f, 2.0f});
  CHECK((p.arrived == std::vector<float>{1.2f, -1.2f, 1.2f, 1.2f, 1.2f}));
  CHECK(p.payload.size() == 5 && p.payload[4] == 0b11101);
  for (std::size_t i = 0; i < 5; ++i)
    CHECK(std::fabs(p.lost[i] + p.arrived[i] - (std::vector<float>{1, -3, 0, 0, 2})[i]) < 1e-6f);
}

TEST(the_l2_scale_keeps_the_norm) {
  const Packed p = pack({64, true}, {3.0f, -4.0f});
  CHECK(std::fabs(p.arrived[0] - std::sqrt(12.5f)) < 1e-6f && p.arrived[1] == -p.arrived[0]);
}

TEST(every_instruction_set_gives_the_same_bits) {
  for (const std::size_t count : {0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 200, 1000, 4097}) {
    for (const bool l2 : {false, true}) {
      std::vector<Packed> all;
      for (const Isa each : isas()) {
        use_isa(each);
        all.push_back(pack({128, l2}, normal(count, 7)));
      }
      for (const auto& one : all) CHECK(one == all[0]);
      for (std::size_t i = 0; i < count; ++i)
        CHECK(std::fabs(all[0].lost[i] + all[0].arrived[i] - normal(count, 7)[i]) < 1e-6f);
    }
  }
  use_isa(widest_isa());
}

namespace {

struct Bucket {
  std::size_t count, workers, chunk;
  std::vector<float> momentum, error, variance, gradient, parameter, server;
  std::vector<std::uint8_t> sent, averaged, gathered;
  std::vector<MomentumRun> runs;
};

// A step of one worker that stands for all: what it sends is what the others send.
Bucket step(std::size_t count, std::size_t workers, std::size_t threads, bool implied) {
  const OneBitFormat format{64, false};
  ThreadPool pool(threads);
  Bucket b{count,
           workers,
           (count / workers / 64 + 1) * 64,
           normal(count, 1),
           normal(count, 2),
           normal(count, 3),
           normal(count, 4),
           normal(count, 5),
           {},
           {},
           {},
           {},
           {}};
  for (float& v : b.variance) v *= v;
  const std::size_t stride = (format.payload_bytes(b.chunk) + 63) / 64 * 64;
  b.sent.assign(workers * stride, 0);
  b.gathered = b.averaged = b.sent;
  b.server.assign(count, 0.5f);
  std::size_t begin = 0, number = 0;
  for (std::size_t end = 1; begin < count; end = std::min(count, end * 3 + 1), ++number) {
    MomentumRun run;
    run.begin = begin;
    run.end = end;
    run.gradient = number == 2 ? nullptr : b.gradient.data() + begin;
    run.parameter = number == 3 ? nullptr : b.parameter.data() + begin;
    run.keep = 0.9f;
    run.take = 0.1f;
    run.rate = 0.01f;
    run.shrink = 0.99f;
    run.eps = 1e-8f;
    b.runs.push_back(run);
    begin = end;
  }
  const OneBitRows sent{b.sent.data(), stride, b.chunk}, gathered{b.gathered.data(), stride, b.chunk};
  for (int round = 0; round < 2; ++round) {
    onebit_compress(format, b.runs, b.momentum.data(), implied && round > 0 ? &gathered : nullptr, b.error.data(),
                    count, sent, pool);
    for (std::size_t k = 0; k * b.chunk < count; ++k) {
      const std::size_t length = std::min(b.chunk, count - k * b.chunk);
      std::vector<std::uint8_t> received;
      for (std::size_t w = 0; w < workers; ++w)
        received.insert(received.end(), b.sent.begin() + k * stride, b.sent.begin() + (k + 1) * stride);
      onebit_average(format, received.data(), stride, workers, b.server.data() + k * b.chunk, length,
                     b.gathered.data() + k * stride, pool);
    }
    if (!implied) {
      std::vector<MomentumRun> taken = b.runs;
      for (auto& run : taken) run.keep = 0.0f, run.take = 1.0f;
      onebit_apply(format, taken, gathered, b.momentum.data(), b.variance.data(), count, pool);
    } else {
      onebit_apply(format, b.runs, gathered, nullptr, b.variance.data(), count, pool);
    }
  }
  return b;
}

}  // namespace

TEST(a_step_is_the_same_in_every_instruction_set_on_any_number_of_threads_with_momentum_kept_or_implied) {
  for (const std::size_t count : {1, 64, 100, 5000, 300000}) {
    for (const std::size_t workers : {1, 2, 3}) {
      const Bucket expected = step(count, workers, 1, false);
      for (const Isa each : isas()) {
        use_isa(each);
        for (const std::size_t threads : {1, 3}) {
          for (const bool implied : {false, true}) {
            const Bucket found = step(count, workers, threads, implied);
            CHECK(found.error == expected.error && found.server == expected.server);
            CHECK(found.parameter == expected.parameter && found.gathered == expected.gathered);
          }
        }
      }
      use_isa(widest_isa());
    }
  }
}

TEST(a_step_is_what_the_algorithm_says) {
  const std::size_t count = 1000;
  const OneBitFormat format{64, false};
  ThreadPool pool(2);
  const Bucket b = step(count, 1, 1, false);
  std::vector<float> error = normal(count, 2), momentum = normal(count, 1), gradient = normal(count, 5), x = gradient;
  std::vector<float> server(count, 0.5f), arrived(count);
  // Parameters are updated in place, and `gradient` aliases none of them.
  gradient = normal(count, 4);
  x = normal(count, 5);
  CHECK(b.parameter.size() == count);
  for (int round = 0; round < 2; ++round) {
    std::vector<float> values(count);
    for (const auto& run : b.runs) {
      for (std::size_t i = run.begin; i < run.end; ++i) {
        values[i] = 0.9f * momentum[i] + (run.gradient == nullptr ? 0.0f : 0.1f * gradient[i]) + error[i];
      }
    }
    std::vector<std::uint8_t> payload(format.payload_bytes(count));
    onebit_pack(format, values.data(), count, payload.data());
    error = values;
    onebit_unpack(format, payload.data(), count, arrived.data());
    for (std::size_t i = 0; i < count; ++i) server[i] += arrived[i];
    onebit_pack(format, server.data(), count, payload.data());
    onebit_unpack(format, payload.data(), count, momentum.data());
    for (const auto& run : b.runs) {
      for (std::size_t i = run.begin; i < run.end && run.parameter != nullptr; ++i) {
        x[i] = 0.99f * x[i] - 0.01f * momentum[i] / (std::sqrt(b.variance[i]) + 1e-8f);
      }
    }
  }
  for (std::size_t i = 0; i < count; ++i) CHECK(std::fabs(x[i] - b.parameter[i]) <= 1e-5f * (1.0f + std::fabs(x[i])));
}

TEST(adam_is_adam) {
  for (const Isa each : isas()) {
    use_isa(each);
    ThreadPool pool(2);
    const std::size_t count = 70001;
    auto x = normal(count, 1), g = normal(count, 2), m = normal(count, 3), v = normal(count, 4);
    for (float& value : v) value *= value;
    const auto x0 = x, m0 = m, v0 = v;
    MomentumRun run;
    run.end = count;
    run.parameter = x.data();
    run.keep = 0.9f, run.take = 0.1f, run.rate = 0.01f, run.shrink = 0.5f, run.eps = 1e-8f, run.beta2 = 0.99f,
    run.rest2 = 0.01f, run.bias2 = 0.3f;
    adam_step(std::span(&run, 1), g.data(), 2.0f, m.data(), v.data(), count, pool);
    for (std::size_t i = 0; i < count; ++i) {
      const double gradient = 2.0 * g[i], mi = 0.9 * m0[i] + 0.1 * gradient,
                   vi = 0.99 * v0[i] + 0.01 * gradient * gradient;
      const double xi = 0.5 * x0[i] - 0.01 * mi / (std::sqrt(vi / 0.3) + 1e-8);
      CHECK(std::fabs(m[i] - mi) <= 1e-5 * (1 + std::fabs(mi)) && std::fabs(v[i] - vi) <= 1e-5 * (1 + vi));
      CHECK(std::fabs(x[i] - xi) <= 1e-4 * (1 + std::fabs(xi)));
    }
  }
  use_isa(widest_isa());
}

TEST(a_sum_of_squares_is_finite_if_the_values_are) {
  ThreadPool pool(2);
  std::vector<float> values(200000, 3e38f);
  CHECK(std::isfinite(sum_of_squares(values.data(), values.size(), pool)));
  std::vector<double> sums;
  for (const Isa each : isas()) {
    use_isa(each);
    const auto random = normal(100003, 3);
    sums.push_back(sum_of_squares(random.data(), random.size(), pool));
  }
  use_isa(widest_isa());
  for (const double sum : sums) CHECK(sum == sums[0]);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    values[199999] = bad;
    CHECK(!std::isfinite(sum_of_squares(values.data(), values.size(), pool)));
  }
  CHECK(sum_of_squares(nullptr, 0, pool) == 0.0);
}

MAIN
