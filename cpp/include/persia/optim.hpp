// Sparse optimizers: one update of one row. The state directly follows the embedding in the row:
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
  float beta = 1.0f;                    // ftrl
  float l1 = 0.0f;                      // ftrl
  float l2 = 0.0f;                      // ftrl
  float bound = 0.0f;                   // embeddings stay within [-bound, bound]; 0: no bound
  float clip_row_norm = 0.0f;           // a gradient is scaled down to at most this L2 norm; 0: no clipping
  float decoupled_weight_decay = 0.0f;  // a row is multiplied by 1 - lr * decay before its update; not used by ftrl
};

// Returns the optimizer of this name. Throws std::invalid_argument for an unknown one.
OptimizerKind optimizer_kind(const std::string& name);

class Optimizer {
 public:
  // Bias corrections of Adam.
  struct Correction {
    float scale;       // 1 / (1 - beta1^t)
    float root_scale;  // 1 / sqrt(1 - beta2^t)
  };
  // A row to update, with its gradient.
  struct Row {
    float* weight;
    float* state;
    const float* gradient;
    std::size_t dim;
    float lr;
    std::uint32_t count;  // updates of this row including this one
    float* before;        // gets the row as it was, [dim + state width], in memory of `before_width`
  };
  // Updates a row in place, and returns whether all of its new values are finite.
  using Kernel = bool (*)(const Optimizer&, const Row&);

  // Chooses the kernel of the optimizer and computes Adam's first bias corrections.
  explicit Optimizer(const OptimizerConfig& config);

  // Returns the configuration.
  const OptimizerConfig& config() const { return config_; }
  // Returns the bound of embeddings; infinity if there is none.
  float bound() const { return bound_; }
  // Returns the floats of state per row.
  std::size_t state_width(std::size_t dim) const;
  // Returns the floats that `Row::before` needs.
  std::size_t before_width(std::size_t dim) const { return dim + state_width(dim) + (adjusts() ? 2 * dim : 0); }
  // Writes the state of a new row.
  void initialize_state(float* state, std::size_t width) const;
  // Updates a row in place, and returns whether it has: if a new value would not be finite, the row stays as it was.
  // The result is bit-identical on every machine: each kernel is compiled for several instruction sets, and none
  // reorders a sum.
  bool apply(const Row& row) const {
    if (kernel_(*this, row)) [[likely]]
      return true;
    restore(row);
    return false;
  }
  // Clips the gradient and decays the row as configured, and then runs the kernel of the update rule.
  bool adjust(const Row& row) const;
  // Returns Adam's bias corrections after `count` updates of a row.
  Correction correction(std::uint32_t count) const {
    return count < corrections_.size() ? corrections_[count] : compute_correction(count);
  }

 private:
  Correction compute_correction(std::uint32_t count) const;
  void restore(const Row& row) const;
  bool adjusts() const { return config_.clip_row_norm > 0.0f || config_.decoupled_weight_decay > 0.0f; }

  OptimizerConfig config_;
  float bound_;
  Kernel rule_;    // of the update rule
  Kernel kernel_;  // `rule_`, or `adjust`, which runs it
  std::vector<Correction> corrections_;
};

// Whether all of some values are finite, without a branch: the exponent of those that are not is all ones, which the
// addition carries into the sign.
class Finite {
 public:
  // Adds a value.
  void add(float value) { carried_ |= (std::bit_cast<std::uint32_t>(value) & 0x7F800000u) + 0x00800000u; }
  // Returns whether all values so far are finite.
  bool all() const { return (carried_ & 0x80000000u) == 0; }

 private:
  std::uint32_t carried_ = 0;
};

// Returns whether no element is NaN or infinite.
inline bool all_finite(const float* values, std::size_t count) {
  Finite finite;
  for (std::size_t i = 0; i < count; ++i) finite.add(values[i]);
  return finite.all();
}

}  // namespace persia
