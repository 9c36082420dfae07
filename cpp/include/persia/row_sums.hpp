// The running sum of the gradients of a step, of one table (GBA, arXiv 2205.11048, appendix B: "we could execute the
// weighted sum over some gradients in advance based on the tokens"): memory follows the distinct ids, not the
// gradients.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace persia {

// Not thread-safe. A sum has the order in which gradients were added, so the same calls give the same bits.
class RowSums {
 public:
  // Sums of rows of `dim` floats.
  explicit RowSums(std::size_t dim);

  // Returns the floats per row.
  std::size_t dim() const { return dim_; }

  // Adds `share` to the divisor of each id, and, where `counts` is not 0, `share` * its row of `values` to its sum.
  // Rows with count 0 are not read and may be NaN.
  void add(std::span<const std::uint64_t> ids, const float* values, const float* counts, float share);

  // Returns the number of ids that `take` writes: those with a gradient that counts.
  std::size_t counted() const;

  // Writes `counted()` ids and their sums over their own divisor, or over `total` if that is not 0, in the order of
  // first occurrence; then clears the sums. Keeps the memory for the next step.
  void take(double total, std::uint64_t* ids, float* values);

  // Returns the memory in use, in bytes.
  std::size_t bytes() const;

 private:
  struct Divisor {
    float all = 0;      // of all gradients with the id
    float counted = 0;  // of those that count
  };

  std::uint32_t place(std::uint64_t id, std::uint64_t hash);
  void grow(std::size_t count);

  std::size_t dim_;
  std::vector<std::uint64_t> ids_;
  std::vector<float> sums_;  // [ids, dim]
  std::vector<Divisor> divisors_;
  std::vector<std::uint32_t> slots_;  // open addressing: one plus the place of an id, 0 if empty
  std::vector<std::uint32_t> places_;
};

}  // namespace persia
