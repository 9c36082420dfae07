#include "persia/optim.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "persia/isa.hpp"

namespace persia {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::uint32_t kCachedCorrections = 1u << 15;

// Before a loop whose turns touch different memory: without it each row is tested for overlaps, and with as many arrays
// as Adam has the loop does not become a vector.
#if defined(__clang__)
#define PERSIA_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define PERSIA_INDEPENDENT _Pragma("GCC ivdep")
#endif

inline float clamp(float value, float bound) { return std::min(std::max(value, -bound), bound); }

// The mean of squares, summed in 16 lanes and then pairwise: an order that every vector width can keep.
[[gnu::always_inline]] inline float mean_square(const float* gradient, const float* weight, float decay,
                                                std::size_t dim) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const float g = gradient[i + j] + decay * weight[i + j];
      lanes[j] += g * g;
    }
  }
  for (std::size_t j = 0; i + j < dim; ++j) {
    const float g = gradient[i + j] + decay * weight[i + j];
    lanes[j] += g * g;
  }
  // Halves as vectors: left to itself the compiler adds them one by one, through memory.
  using Eight [[gnu::vector_size(32)]] = float;
  using Four [[gnu::vector_size(16)]] = float;
  Eight eight[2];
  std::memcpy(eight, lanes, sizeof(lanes));
  eight[0] += eight[1];
  Four four[2];
  std::memcpy(four, eight, sizeof(four));
  four[0] += four[1];
  return ((four[0][0] + four[0][2]) + (four[0][1] + four[0][3])) / static_cast<float>(dim);
}

// Writes a new value, and keeps the one before.
[[gnu::always_inline]] inline void replace(float& value, float& before, float updated, Finite& finite) {
  before = value;
  value = updated;
  finite.add(updated);
}

// A step updates a row in place, and returns whether all of its new values are finite.
template <OptimizerKind>
struct Step;

template <>
struct Step<OptimizerKind::kSgd> {
  [[gnu::always_inline]] static inline bool run(const Optimizer& o, const Optimizer::Row& r) {
    const auto& c = o.config();
    const float momentum = c.momentum, decay = c.weight_decay, bound = o.bound(), lr = r.lr;
    float* __restrict weight = r.weight;
    float* __restrict buffer = r.state;
    float* __restrict old_weight = r.before;
    float* __restrict old_buffer = r.before + r.dim;
    const float* __restrict gradient = r.gradient;
    Finite finite;
    if (momentum == 0.0f) {
      PERSIA_INDEPENDENT
      for (std::size_t i = 0; i < r.dim; ++i) {
        const float g = gradient[i] + decay * weight[i];
        replace(weight[i], old_weight[i], clamp(weight[i] - lr * g, bound), finite);
      }
      return finite.all();
    }
    PERSIA_INDEPENDENT
    for (std::size_t i = 0; i < r.dim; ++i) {
      const float g = gradient[i] + decay * weight[i];
      const float moved = momentum * buffer[i] + g;
      replace(buffer[i], old_buffer[i], moved, finite);
      replace(weight[i], old_weight[i], clamp(weight[i] - lr * moved, bound), finite);
    }
    return finite.all();
  }
};

// Duchi, Hazan, Singer 2011, diagonal form.
template <>
struct Step<OptimizerKind::kAdagrad> {
  [[gnu::always_inline]] static inline bool run(const Optimizer& o, const Optimizer::Row& r) {
    const auto& c = o.config();
    const float decay = c.weight_decay, eps = c.eps, bound = o.bound(), lr = r.lr;
    float* __restrict weight = r.weight;
    float* __restrict sum = r.state;
    float* __restrict old_weight = r.before;
    float* __restrict old_sum = r.before + r.dim;
    const float* __restrict gradient = r.gradient;
    Finite finite;
    PERSIA_INDEPENDENT
    for (std::size_t i = 0; i < r.dim; ++i) {
      const float g = gradient[i] + decay * weight[i];
      const float squares = sum[i] + g * g;
      replace(sum[i], old_sum[i], squares, finite);
      replace(weight[i], old_weight[i], clamp(weight[i] - lr * g / (std::sqrt(squares) + eps), bound), finite);
    }
    return finite.all();
  }
};

template <>
struct Step<OptimizerKind::kRowwiseAdagrad> {
  [[gnu::always_inline]] static inline bool run(const Optimizer& o, const Optimizer::Row& r) {
    const auto& c = o.config();
    const float decay = c.weight_decay, bound = o.bound();
    float* __restrict weight = r.weight;
    float* __restrict old_weight = r.before;
    const float* __restrict gradient = r.gradient;
    Finite finite;
    const float squares = r.state[0] + mean_square(gradient, weight, decay, r.dim);
    replace(r.state[0], r.before[r.dim], squares, finite);
    const float lr = r.lr / (std::sqrt(squares) + c.eps);
    PERSIA_INDEPENDENT
    for (std::size_t i = 0; i < r.dim; ++i) {
      const float g = gradient[i] + decay * weight[i];
      replace(weight[i], old_weight[i], clamp(weight[i] - lr * g, bound), finite);
    }
    return finite.all();
  }
};

// Kingma, Ba 2015, on the steps in which the row takes part only ("lazy"), corrected by the row's own count.
template <>
struct Step<OptimizerKind::kAdam> {
  [[gnu::always_inline]] static inline bool run(const Optimizer& o, const Optimizer::Row& r) {
    const auto& c = o.config();
    const auto beta1 = static_cast<float>(c.beta1), beta2 = static_cast<float>(c.beta2);
    const auto rest1 = static_cast<float>(1.0 - c.beta1), rest2 = static_cast<float>(1.0 - c.beta2);
    const float decay = c.weight_decay, eps = c.eps, bound = o.bound();
    const auto correction = o.correction(r.count);
    const float lr = r.lr * correction.scale, root_scale = correction.root_scale;
    float* __restrict weight = r.weight;
    float* __restrict first = r.state;
    float* __restrict second = r.state + r.dim;
    float* __restrict old_weight = r.before;
    float* __restrict old_first = r.before + r.dim;
    float* __restrict old_second = r.before + 2 * r.dim;
    const float* __restrict gradient = r.gradient;
    Finite finite;
    PERSIA_INDEPENDENT
    for (std::size_t i = 0; i < r.dim; ++i) {
      const float g = gradient[i] + decay * weight[i];
      const float mean = beta1 * first[i] + rest1 * g;
      const float squares = beta2 * second[i] + rest2 * (g * g);
      const float updated = weight[i] - lr * mean / (std::sqrt(squares) * root_scale + eps);
      replace(first[i], old_first[i], mean, finite);
      replace(second[i], old_second[i], squares, finite);
      replace(weight[i], old_weight[i], clamp(updated, bound), finite);
    }
    return finite.all();
  }
};

// McMahan et al. 2013, Algorithm 1; alpha is the learning rate.
template <>
struct Step<OptimizerKind::kFtrl> {
  [[gnu::always_inline]] static inline bool run(const Optimizer& o, const Optimizer::Row& r) {
    const auto& c = o.config();
    const float beta = c.beta, l1 = c.l1, l2 = c.l2, bound = o.bound(), alpha = r.lr;
    float* __restrict weight = r.weight;
    float* __restrict z = r.state;
    float* __restrict n = r.state + r.dim;
    float* __restrict old_weight = r.before;
    float* __restrict old_z = r.before + r.dim;
    float* __restrict old_n = r.before + 2 * r.dim;
    const float* __restrict gradient = r.gradient;
    Finite finite;
    PERSIA_INDEPENDENT
    for (std::size_t i = 0; i < r.dim; ++i) {
      const float g = gradient[i];
      const float squares = n[i] + g * g;
      const float root = std::sqrt(squares);
      const float sigma = (root - std::sqrt(n[i])) / alpha;
      const float moved = z[i] + (g - sigma * weight[i]);
      const float shrunk = moved - std::copysign(l1, moved);
      const float solved = -shrunk / ((beta + root) / alpha + l2);
      replace(z[i], old_z[i], moved, finite);
      replace(n[i], old_n[i], squares, finite);
      replace(weight[i], old_weight[i], clamp(std::fabs(moved) <= l1 ? 0.0f : solved, bound), finite);
    }
    return finite.all();
  }
};

template <OptimizerKind K>
bool step_base(const Optimizer& o, const Optimizer::Row& r) {
  return Step<K>::run(o, r);
}

#if defined(__x86_64__)
template <OptimizerKind K>
[[gnu::target("avx2")]] bool step_avx2(const Optimizer& o, const Optimizer::Row& r) {
  return Step<K>::run(o, r);
}
template <OptimizerKind K>
PERSIA_AVX512 bool step_avx512(const Optimizer& o, const Optimizer::Row& r) {
  return Step<K>::run(o, r);
}
#endif

template <OptimizerKind K>
Optimizer::Kernel choose() {
#if defined(__x86_64__)
  if (isa() == Isa::kAvx512) return step_avx512<K>;
  if (isa() == Isa::kAvx2) return step_avx2<K>;
#endif
  return step_base<K>;
}

Optimizer::Kernel choose(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kSgd:
      return choose<OptimizerKind::kSgd>();
    case OptimizerKind::kAdagrad:
      return choose<OptimizerKind::kAdagrad>();
    case OptimizerKind::kRowwiseAdagrad:
      return choose<OptimizerKind::kRowwiseAdagrad>();
    case OptimizerKind::kAdam:
      return choose<OptimizerKind::kAdam>();
    case OptimizerKind::kFtrl:
      return choose<OptimizerKind::kFtrl>();
  }
  throw std::invalid_argument("unknown optimizer");
}

// Clipping and decoupled decay are a kernel of their own, so that rules without them are not slower.
bool step_adjusted(const Optimizer& o, const Optimizer::Row& r) { return o.adjust(r); }

// In double, in which no square of a float overflows, and in 16 lanes: an order that every vector width can keep.
double norm_of(const float* gradient, std::size_t dim) {
  double lanes[kLanes] = {};
  for (std::size_t i = 0; i < dim; ++i) {
    const double g = gradient[i];
    lanes[i % kLanes] += g * g;
  }
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return std::sqrt(lanes[0]);
}

// By squaring, not std::pow: multiplications round alike everywhere.
double power(double base, std::uint32_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1, base *= base) {
    if (exponent & 1u) result *= base;
  }
  return result;
}

}  // namespace

OptimizerKind optimizer_kind(const std::string& name) {
  if (name == "sgd") return OptimizerKind::kSgd;
  if (name == "adagrad") return OptimizerKind::kAdagrad;
  if (name == "rowwise_adagrad") return OptimizerKind::kRowwiseAdagrad;
  if (name == "adam") return OptimizerKind::kAdam;
  if (name == "ftrl") return OptimizerKind::kFtrl;
  throw std::invalid_argument("unknown optimizer '" + name + "': use sgd, adagrad, rowwise_adagrad, adam or ftrl");
}

Optimizer::Optimizer(const OptimizerConfig& config)
    : config_(config),
      bound_(config.bound > 0.0f ? config.bound : std::numeric_limits<float>::infinity()),
      rule_(choose(config.kind)),
      kernel_(adjusts() ? step_adjusted : rule_) {
  if (config.kind != OptimizerKind::kAdam) return;
  corrections_.reserve(kCachedCorrections);
  for (std::uint32_t t = 0; t < kCachedCorrections; ++t) corrections_.push_back(compute_correction(t));
}

std::size_t Optimizer::state_width(std::size_t dim) const {
  switch (config_.kind) {
    case OptimizerKind::kSgd:
      return config_.momentum != 0.0f ? dim : 0;
    case OptimizerKind::kAdagrad:
      return dim;
    case OptimizerKind::kRowwiseAdagrad:
      return 1;
    case OptimizerKind::kAdam:
    case OptimizerKind::kFtrl:
      return 2 * dim;
  }
  return 0;
}

bool Optimizer::adjust(const Row& row) const {
  Row adjusted = row;
  float* const gradient = row.before + row.dim + state_width(row.dim);
  float* const weight = gradient + row.dim;
  if (config_.clip_row_norm > 0.0f) {
    const double limit = config_.clip_row_norm;
    if (const double norm = norm_of(row.gradient, row.dim); norm > limit) {
      const double factor = limit / norm;
      for (std::size_t i = 0; i < row.dim; ++i) gradient[i] = static_cast<float>(row.gradient[i] * factor);
      adjusted.gradient = gradient;
    }
  }
  if (config_.decoupled_weight_decay == 0.0f) return rule_(*this, adjusted);
  const auto rest = static_cast<float>(1.0 - static_cast<double>(row.lr) * config_.decoupled_weight_decay);
  std::copy_n(row.weight, row.dim, weight);
  for (std::size_t i = 0; i < row.dim; ++i) row.weight[i] *= rest;
  const bool finite = rule_(*this, adjusted);
  std::copy_n(weight, row.dim, row.before);  // The rule has kept the decayed row.
  return finite;
}

void Optimizer::restore(const Row& row) const {
  std::copy_n(row.before, row.dim, row.weight);
  std::copy_n(row.before + row.dim, state_width(row.dim), row.state);
}

void Optimizer::initialize_state(float* state, std::size_t width) const {
  const bool sums = config_.kind == OptimizerKind::kAdagrad || config_.kind == OptimizerKind::kRowwiseAdagrad;
  const std::size_t zeros = sums ? 0 : config_.kind == OptimizerKind::kFtrl ? width / 2 : width;
  std::fill(state, state + zeros, 0.0f);
  std::fill(state + zeros, state + width, config_.initial_accumulator);
}

Optimizer::Correction Optimizer::compute_correction(std::uint32_t count) const {
  const double t1 = 1.0 - power(config_.beta1, count);
  const double t2 = 1.0 - power(config_.beta2, count);
  return {static_cast<float>(1.0 / t1), static_cast<float>(1.0 / std::sqrt(t2))};
}

}  // namespace persia
