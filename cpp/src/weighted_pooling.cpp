// Pooling of ids with weights. Apart from the loops without, so that compilers make of those what they did before.
#include <cmath>
#include <cstring>

#include "persia/pooling.hpp"

namespace persia {

namespace {

// Sums in float64, where a sum of squares neither underflows nor overflows. With weights of 1 it is `divisor`.
inline float weighted_divisor(Pooling pooling, const float* weights, std::size_t length) {
  if (pooling == Pooling::sum) return 1.0F;
  double sum = 0;
  for (std::size_t p = 0; p < length; ++p) {
    const double weight = weights[p];
    sum += pooling == Pooling::mean ? weight : weight * weight;
  }
  return static_cast<float>(pooling == Pooling::mean ? sum : std::sqrt(sum));
}

template <class Inverse, class RowOps>
Fault pool_bags(const PoolFeature& feature, std::size_t first, std::size_t last) {
  const auto [rows, count, dim] = feature.table;
  const auto* inverse = static_cast<const Inverse*>(feature.plan.inverse);
  float* out = feature.out + static_cast<std::ptrdiff_t>(first) * feature.sample_stride;
  for (std::size_t sample = first; sample < last; ++sample, out += feature.sample_stride) {
    Bag bag;
    if (!find_bag(feature.plan, sample, bag)) return Fault::offsets;
    const float* weights = feature.plan.weights + bag.begin;
    for (std::size_t p = 0; p < bag.length; ++p) {
      const std::size_t row = inverse[bag.begin + p];
      if (row >= count) return Fault::inverse;
      if (p == 0) {
        RowOps::scale(out, rows + row * dim, weights[p], dim);
      } else {
        RowOps::add_scaled(out, rows + row * dim, weights[p], dim);
      }
    }
    const float by = weighted_divisor(feature.plan.pooling, weights, bag.length);
    if (bag.length == 0 || by == 0) {
      std::memset(out, 0, dim * sizeof(float));
    } else if (feature.plan.pooling != Pooling::sum) {
      RowOps::divide(out, out, by, dim);
    }
  }
  return Fault::none;
}

template <class Inverse, class RowOps>
Fault add_gradient(const GradientFeature& feature, const GradientTable& table, const Columns& columns, float* scaled) {
  const std::size_t width = columns.width;
  const auto* inverse = static_cast<const Inverse*>(feature.plan.inverse);
  const std::size_t dim = table.dim;
  const std::size_t count = table.count;
  float* out = table.out + columns.first;
  for (std::size_t sample = 0; sample < feature.plan.batch; ++sample) {
    Bag bag;
    if (!find_bag(feature.plan, sample, bag)) return Fault::offsets;
    const float* weights = feature.plan.weights + bag.begin;
    const float* gradient =
        feature.gradient + static_cast<std::ptrdiff_t>(sample) * feature.sample_stride + columns.first;
    if (feature.plan.pooling != Pooling::sum) {
      const float by = weighted_divisor(feature.plan.pooling, weights, bag.length);
      if (by == 0) continue;  // The sample has zeros, whatever its rows are.
      RowOps::divide(scaled, gradient, by, width);
      gradient = scaled;
    }
    for (std::size_t p = 0; p < bag.length; ++p) {
      const std::size_t row = inverse[bag.begin + p];
      if (row >= count) return Fault::inverse;
      if (bag.begin + p + kAhead < feature.plan.positions) {
        const std::size_t later = inverse[bag.begin + p + kAhead];
        if (later < count) __builtin_prefetch(out + later * dim, 1);
      }
      RowOps::add_scaled(out + row * dim, gradient, weights[p], width);
    }
  }
  return Fault::none;
}

}  // namespace

Fault pool_weighted(const PoolFeature& feature, std::size_t first, std::size_t last) {
  return with_types(feature.plan.wide, feature.table.dim, [&]<class Inverse, class RowOps>(Inverse, RowOps) {
    return pool_bags<Inverse, RowOps>(feature, first, last);
  });
}

Fault add_weighted_gradient(const GradientFeature& feature, const GradientTable& table, const Columns& columns,
                            float* scaled) {
  return with_types(feature.plan.wide, columns.width, [&]<class Inverse, class RowOps>(Inverse, RowOps) {
    return add_gradient<Inverse, RowOps>(feature, table, columns, scaled);
  });
}

}  // namespace persia
