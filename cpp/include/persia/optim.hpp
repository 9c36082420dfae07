// Sparse optimizers: one step of one row. State lies right behind the embedding in the row:
//   sgd              momentum buffer [dim], absent while momentum is 0
//   adagrad          sum of squared gradients [dim]
//   rowwise_adagrad  sum of mean squared gradients [1]
//   adam             first moment [dim], second moment [dim]
//   ftrl             z [dim], n [dim]
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace persia {

enum class OptimizerKind : std::uint32_t { kSgd = 0, kAdagrad = 1, kRowwiseAdagrad = 2, kAdam = 3, kFtrl = 4 };

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kAdagrad;
  float momentum = 0.0f;
  float weight_decay = 0.0f;  // L2, added to the gradient; not used by ftrl
  float initial_accumulator = 0.0f;
  float eps = 1e-10f;
  double beta1 = 0.9;
  double beta2 = 0.999;
  float beta = 1.0f;   // ftrl
  float l1 = 0.0f;     // ftrl
  float l2 = 0.0f;     // ftrl
  float bound = 0.0f;  // embeddings stay within [-bound, bound]; 0: no bound
};

// Throws std::invalid_argument for an unknown name.
OptimizerKind optimizer_kind(const std::string& name);

class Optimizer {
 public:
  struct Correction {
    float scale;       // 1 / (1 - beta1^t)
    float root_scale;  // 1 / sqrt(1 - beta2^t)
  };
  struct Row {
    float* weight;
    float* state;
    const float* gradient;
    std::size_t dim;
    float lr;
    std::uint32_t count;  // updates of this row including this one
  };
  using Kernel = void (*)(const Optimizer&, const Row&);

  explicit Optimizer(const OptimizerConfig& config);

  const OptimizerConfig& config() const { return config_; }
  float bound() const { return bound_; }
  std::size_t state_width(std::size_t dim) const;
  void initialize_state(float* state, std::size_t width) const;
  // Bit-identical on every machine: each kernel is compiled for several instruction sets, none reorders a sum.
  void apply(const Row& row) const { kernel_(*this, row); }
  Correction correction(std::uint32_t count) const {
    return count < corrections_.size() ? corrections_[count] : compute_correction(count);
  }

 private:
  Correction compute_correction(std::uint32_t count) const;

  OptimizerConfig config_;
  float bound_;
  Kernel kernel_;
  std::vector<Correction> corrections_;
};

// Whether no element is NaN or infinite: none has an exponent of ones only, which the addition carries into the sign.
inline bool all_finite(const float* values, std::size_t count) {
  std::uint32_t carried = 0;
  for (std::size_t i = 0; i < count; ++i) {
    carried |= (std::bit_cast<std::uint32_t>(values[i]) & 0x7F800000u) + 0x00800000u;
  }
  return (carried & 0x80000000u) == 0;
}

}  // namespace persia
