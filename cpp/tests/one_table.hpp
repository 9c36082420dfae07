// What tests of a store with one table share.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "persia/store.hpp"

namespace persia {

inline constexpr std::size_t kDim = 5;

// The rows of the table; a test may change them.
struct RowShape {
  std::size_t dim = kDim;
  Dtype dtype = Dtype::kFloat32;
  OptimizerKind optimizer = OptimizerKind::kAdagrad;
  std::uint64_t ttl = 0;
  Eviction eviction = Eviction::kLru;
};
inline RowShape row_shape;

// Rows of 32 bits, and rows of 16 bits whose state has 16 bits, too: a shard computes those in scratch memory.
inline constexpr RowShape kRowShapes[] = {{}, {kDim, Dtype::kBfloat16, OptimizerKind::kAdam}};

// Runs a test with each of these shapes.
template <class Test>
void for_each_row_shape(Test&& test) {
  for (const RowShape& shape : kRowShapes) {
    row_shape = shape;
    test();
  }
  row_shape = {};
}

using Keys = std::vector<std::uint64_t>;

inline Keys range(std::uint64_t from, std::uint64_t to) {
  Keys keys(to - from);
  std::iota(keys.begin(), keys.end(), from);
  return keys;
}

inline TableConfig config_of(std::uint64_t capacity, std::uint32_t shards) {
  TableConfig c;
  c.name = "t";
  c.dim = row_shape.dim;
  c.dtype = row_shape.dtype;
  c.optimizer.kind = row_shape.optimizer;
  c.ttl = row_shape.ttl;
  c.eviction = row_shape.eviction;
  c.capacity = capacity;
  c.shards = shards;
  return c;
}

inline std::vector<float> look(Store& store, const Keys& keys, bool train = true) {
  std::vector<float> out(keys.size() * words_of(row_shape.dtype, row_shape.dim));
  const LookupRequest request{0, keys.data(), keys.size(), out.data()};
  store.lookup({&request, 1}, train);
  return out;
}

struct Origin {
  std::uint32_t step = 1;
  std::uint64_t client = 0;
  std::uint64_t sequence = 0;
};

inline PushCounts push(Store& store, const Keys& keys, const std::vector<float>& gradients, const Origin& origin) {
  const UpdateRequest request{0, keys.data(), keys.size(), gradients.data(), 0.1f};
  return store.update({&request, 1}, origin.step, origin.client, origin.sequence)[0];
}

// Gradients of one.
inline PushCounts push(Store& store, const Keys& keys, const Origin& origin = {}) {
  return push(store, keys, std::vector<float>(keys.size() * row_shape.dim, 1.0f), origin);
}

// Sets rows: all values of their embeddings and states are `value`, and their counts `step`.
inline void set(Store& store, const Keys& keys, float value, std::uint32_t step) {
  std::uint32_t clock = 0;
  for (Shard* shard : store.table(0).all) clock = std::max(clock, shard->export_state().clock);
  const std::vector<float> embeddings(keys.size() * row_shape.dim, value);
  const std::vector<float> states(keys.size() * store.table(0).state_width, value);
  const std::vector<std::uint32_t> steps(keys.size(), step), stamps(keys.size(), clock + 1);
  store.import_rows(0, keys.size(),
                    {keys.data(), embeddings.data(), states.data(), steps.data(), steps.data(), stamps.data()});
}

}  // namespace persia
