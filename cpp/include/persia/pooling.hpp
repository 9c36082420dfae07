// The loops of pooling share these: bags, and operations on rows whose dim the compiler knows.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "persia/batch.hpp"

namespace persia {

enum class Fault : std::uint8_t { none, inverse, offsets };

struct Bag {
  std::size_t begin;
  std::size_t length;  // after truncation
};

// Contents are checked where they are used, not in a pass before: that costs less, and an array that somebody changes
// meanwhile cannot lead outside of its neighbours either.
inline bool find_bag(const FeaturePlan& plan, std::size_t sample, Bag& bag) {
  if (plan.offsets == nullptr) {
    bag = {sample, 1};
    return true;
  }
  const std::int64_t begin = plan.offsets[sample];
  const std::int64_t end = plan.offsets[sample + 1];
  if (begin < 0 || end < begin || end > static_cast<std::int64_t>(plan.positions)) return false;
  bag = {static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)};
  if (plan.max_length != 0 && bag.length > plan.max_length) bag.length = plan.max_length;
  return true;
}

inline float divisor(Pooling pooling, std::size_t length) {
  if (pooling == Pooling::mean) return static_cast<float>(length);
  if (pooling == Pooling::sqrtn) return std::sqrt(static_cast<float>(length));
  return 1.0F;
}

// Rows are short: with the usual dims known to the compiler, a row costs a few instructions instead of a call.
template <std::size_t kDim>
struct Row {
  static std::size_t size(std::size_t dim) { return kDim == 0 ? dim : kDim; }
  static void copy(float* __restrict to, const float* __restrict from, std::size_t dim) {
    std::memcpy(to, from, size(dim) * sizeof(float));
  }
  static void add(float* to, const float* from, std::size_t dim) {
    each(to, to, from, dim, [](auto a, auto b) { return a + b; });
  }
  static void scale(float* to, const float* from, float by, std::size_t dim) {
    each(to, from, from, dim, [by](auto a, auto) { return a * by; });
  }
  static void add_scaled(float* to, const float* from, float by, std::size_t dim) {
    each(to, to, from, dim, [by](auto a, auto b) { return a + b * by; });
  }
  static void divide(float* to, const float* from, float by, std::size_t dim) {
    each(to, from, from, dim, [by](auto a, auto) { return a / by; });
  }

 private:
  // Four at a time, spelled out: compilers unroll the short loop first and then find nothing to vectorise. All `to`
  // of a step are written after its `a` and `b` are read, so that they may be the same.
  template <class Operation>
  static void each(float* to, const float* a, const float* b, std::size_t dim, Operation operation) {
    using Four = float __attribute__((vector_size(4 * sizeof(float))));
    std::size_t d = 0;
    for (; d + 4 <= size(dim); d += 4) {
      Four x;
      Four y;
      std::memcpy(&x, a + d, sizeof(x));
      std::memcpy(&y, b + d, sizeof(y));
      x = operation(x, y);
      std::memcpy(to + d, &x, sizeof(x));
    }
    for (; d < size(dim); ++d) to[d] = operation(a[d], b[d]);
  }
};

// Calls body(Inverse{}, Row<dim>{}).
template <class Inverse, class Body>
auto with_row(std::size_t dim, Body&& body) {
  switch (dim) {
    case 4:
      return body(Inverse{}, Row<4>{});
    case 8:
      return body(Inverse{}, Row<8>{});
    case 16:
      return body(Inverse{}, Row<16>{});
    case 32:
      return body(Inverse{}, Row<32>{});
    case 64:
      return body(Inverse{}, Row<64>{});
    default:
      return body(Inverse{}, Row<0>{});
  }
}

template <class Body>
auto with_types(bool wide, std::size_t dim, Body&& body) {
  return wide ? with_row<std::uint32_t>(dim, body) : with_row<std::uint16_t>(dim, body);
}

constexpr std::size_t kAhead = 12;  // positions to prefetch

// Some columns of the gradient of a table. Nothing but the order of the batch decides the order of a sum.
struct Columns {
  std::size_t table, first, width;
};

// Pools some samples of a feature with weights.
Fault pool_weighted(const PoolFeature& feature, std::size_t first, std::size_t last);

// Adds the gradient of a feature with weights. `scaled` is scratch memory of one row.
Fault add_weighted_gradient(const GradientFeature& feature, const GradientTable& table, const Columns& columns,
                            float* scaled);

}  // namespace persia
