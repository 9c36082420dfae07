#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.hpp"
#include "persia/optim.hpp"

using persia::Optimizer;
using persia::OptimizerConfig;
using persia::OptimizerKind;

namespace {

// One update of a row of equal elements; returns the first weight.
float step(const Optimizer& o, std::size_t dim, std::vector<float>& weight, std::vector<float>& state, float gradient,
           std::uint32_t count) {
  const std::vector<float> gradients(dim, gradient);
  std::vector<float> before(o.before_width(dim));
  CHECK(o.apply({weight.data(), state.data(), gradients.data(), dim, 0.1f, count, before.data()}));
  for (const float w : weight) CHECK(w == weight[0]);
  return weight[0];
}

float one_step(OptimizerConfig config, float gradient, std::size_t dim = 33) {
  const Optimizer o(config);
  std::vector<float> weight(dim, 0.5f), state(o.state_width(dim));
  o.initialize_state(state.data(), state.size());
  return step(o, dim, weight, state, gradient, 1);
}

bool near(float a, float b) { return std::fabs(a - b) < 1e-6f; }

}  // namespace

TEST(first_steps_by_hand) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kSgd;
  CHECK(near(one_step(c, 2.0f), 0.5f - 0.1f * 2.0f));
  c.weight_decay = 0.1f;
  CHECK(near(one_step(c, 2.0f), 0.5f - 0.1f * 2.05f));
  c = {};
  c.kind = OptimizerKind::kAdagrad;
  CHECK(near(one_step(c, 2.0f), 0.4f));
  c.initial_accumulator = 12.0f;
  CHECK(near(one_step(c, 2.0f), 0.5f - 0.1f * 2.0f / 4.0f));
  c.kind = OptimizerKind::kRowwiseAdagrad;
  CHECK(near(one_step(c, 2.0f), 0.5f - 0.1f * 2.0f / 4.0f));
  c = {};
  c.kind = OptimizerKind::kAdam;
  CHECK(near(one_step(c, 2.0f), 0.4f));
  c.kind = OptimizerKind::kFtrl;
  c.l1 = 100.0f;
  CHECK(one_step(c, 2.0f) == 0.0f);
}

TEST(bound_clamps) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kSgd;
  c.bound = 0.25f;
  CHECK(one_step(c, 100.0f) == -0.25f);
  CHECK(one_step(c, -100.0f) == 0.25f);
}

TEST(clipping_scales_a_gradient_down_to_the_norm) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kSgd;
  c.clip_row_norm = 3.0f;
  CHECK(near(one_step(c, 2.0f, 4), 0.5f - 0.1f * 1.5f));    // Its norm is 4.
  CHECK(near(one_step(c, -3e38f, 4), 0.5f + 0.1f * 1.5f));  // Its squares exceed float32.
  CHECK(one_step(c, 1.5f, 4) == one_step({.kind = c.kind}, 1.5f, 4));
  c.weight_decay = 2.0f;  // L2 is added to the clipped gradient.
  CHECK(near(one_step(c, 2.0f, 4), 0.5f - 0.1f * (1.5f + 1.0f)));
}

TEST(decoupled_decay_multiplies_the_row) {
  OptimizerConfig c;
  c.decoupled_weight_decay = 0.2f;
  for (const auto kind :
       {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad, OptimizerKind::kAdam}) {
    c.kind = kind;
    const float step = 0.5f - one_step({.kind = kind}, 2.0f);
    CHECK(near(one_step(c, 2.0f), 0.5f * (1.0f - 0.1f * 0.2f) - step));
  }
}

TEST(momentum_accumulates) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kSgd;
  c.momentum = 0.5f;
  const Optimizer o(c);
  std::vector<float> weight(3, 0.0f), state(3, 0.0f);
  step(o, 3, weight, state, 1.0f, 1);
  CHECK(near(step(o, 3, weight, state, 1.0f, 2), -0.1f - 0.15f));
}

TEST(adam_correction_is_continuous_past_its_table) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kAdam;
  c.beta2 = 0.99999;
  const Optimizer o(c);
  for (std::uint32_t t = (1u << 15) - 3; t < (1u << 15) + 3; ++t) {
    CHECK(o.correction(t + 1).root_scale < o.correction(t).root_scale);
    CHECK(o.correction(t).scale == 1.0f);
  }
}

TEST(a_row_stays_as_it_was_if_a_new_value_would_not_be_finite) {
  OptimizerConfig momentum;
  momentum.momentum = 0.9f;
  momentum.kind = OptimizerKind::kSgd;
  std::vector<OptimizerConfig> configs{momentum};
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowwiseAdagrad,
                          OptimizerKind::kAdam, OptimizerKind::kFtrl}) {
    configs.emplace_back().kind = kind;
    OptimizerConfig& decayed = configs.emplace_back();
    decayed.kind = kind;
    decayed.decoupled_weight_decay = 0.001f;
  }
  for (const OptimizerConfig& config : configs) {
    const Optimizer o(config);
    for (const std::size_t dim : {1u, 15u, 16u, 17u, 33u, 64u}) {
      std::vector<float> weight(dim), state(o.state_width(dim)), before(o.before_width(dim));
      for (std::size_t i = 0; i < dim; ++i) weight[i] = 0.25f * static_cast<float>(i);
      for (std::size_t i = 0; i < state.size(); ++i) state[i] = 0.5f + static_cast<float>(i);
      for (std::size_t bad = 0; bad < dim; ++bad) {
        const auto kept = std::pair(weight, state);
        std::vector<float> gradient(dim, 0.1f);
        gradient[bad] = -3e38f;  // Its square is infinite, or so is its product with the learning rate.
        CHECK(!o.apply({weight.data(), state.data(), gradient.data(), dim, 100.0f, 1, before.data()}));
        CHECK(kept == std::pair(weight, state));
        gradient[bad] = 0.2f;
        CHECK(o.apply({weight.data(), state.data(), gradient.data(), dim, 0.1f, 1, before.data()}));
        CHECK(kept.first != weight);
      }
    }
  }
}

TEST(a_state_that_would_not_be_finite_counts_though_the_weight_would_be) {
  OptimizerConfig c;
  c.kind = OptimizerKind::kAdagrad;
  const Optimizer o(c);
  float weight = 0.5f, state = 0.0f, before[2];
  const float gradient = 2e19f;
  CHECK(!o.apply({&weight, &state, &gradient, 1, 0.1f, 1, before}));
  CHECK(weight == 0.5f && state == 0.0f);
}

TEST(finite_check_finds_each_position) {
  for (std::size_t n : {1u, 16u, 257u}) {
    std::vector<float> values(n, std::numeric_limits<float>::max());
    CHECK(persia::all_finite(values.data(), n));
    for (std::size_t i = 0; i < n; ++i) {
      for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
        values[i] = bad;
        CHECK(!persia::all_finite(values.data(), n));
        values[i] = -1.0f;
      }
    }
  }
}

TEST(names) {
  CHECK(persia::optimizer_kind("ftrl") == OptimizerKind::kFtrl);
  CHECK_THROWS(persia::optimizer_kind("adamw"), std::invalid_argument);
}

MAIN
