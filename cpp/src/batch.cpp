#include "persia/batch.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>

#include "persia/memory.hpp"
#include "persia/pooling.hpp"

namespace persia {

namespace {

constexpr std::size_t kNarrow = 65536;  // up to this number of distinct ids have an inverse of uint16

}  // namespace

// ---- unique -----------------------------------------------------------------------------------------------------

namespace {

// Every input bit reaches the high bits (home slot) and the low bits (tag): ids are often consecutive, or differ in
// their top bits only.
inline std::uint64_t mix(std::uint64_t id) {
  id ^= id >> 32;
  id *= 0xd6e8feb86659fd93U;
  id ^= id >> 32;
  id *= 0xd6e8feb86659fd93U;
  return id ^ (id >> 32);
}

// An open-addressing set of ids that live elsewhere, in order of arrival. A slot holds one plus the place of its id.
// At most a quarter of the slots are in use: collisions cost more (a wrong guess of the processor) than the memory.
template <class Slot>
class Index {
 public:
  // `slots` has slot_count(capacity) entries; `ids` has space for `capacity`, the most that are added.
  Index(Slot* slots, std::size_t capacity, std::uint64_t* ids)
      : slots_(slots), ids_(ids), mask_(slot_count(capacity) - 1), shift_(64 - std::countr_zero(mask_ + 1)) {
    std::memset(slots_, 0, (mask_ + 1) * sizeof(Slot));
  }

  static std::size_t slot_count(std::size_t capacity) { return std::bit_ceil(std::max<std::size_t>(capacity, 8) * 4); }

  void prefetch(std::uint64_t hash) const { __builtin_prefetch(slots_ + (hash >> shift_), 1); }

  // New and known ids take the same way without a branch, as nothing can predict which one comes: the id is written
  // behind the last one anyway, where an empty slot finds it. Only a slot of another id costs a branch.
  std::size_t find_or_insert(std::uint64_t id, std::uint64_t hash) {
    ids_[count_] = id;
    for (std::size_t slot = hash >> shift_;; slot = (slot + 1) & mask_) {
      const Slot entry = slots_[slot];
      const bool empty = entry == 0;
      // Not `?:`, of which compilers make the branch again.
      const std::size_t place = (entry | ((count_ + 1) & (std::size_t{0} - std::size_t{empty}))) - 1;
      if (ids_[place] == id) [[likely]] {
        slots_[slot] = static_cast<Slot>(place + 1);
        count_ += empty;
        return place;
      }
    }
  }

  std::size_t count() const { return count_; }

 private:
  Slot* slots_;
  std::uint64_t* ids_;
  std::size_t mask_;
  int shift_;
  std::size_t count_ = 0;
};

template <class Slot, class Inverse>
Inverse* add(Index<Slot>& index, std::span<const std::uint64_t> ids, Inverse* inverse) {
  constexpr std::size_t kGroup = 32;
  std::uint64_t hashes[kGroup];
  for (std::size_t i = 0; i < ids.size(); i += kGroup) {
    const std::size_t n = std::min(kGroup, ids.size() - i);
    for (std::size_t k = 0; k < n; ++k) {
      hashes[k] = mix(ids[i + k]);
      index.prefetch(hashes[k]);
    }
    for (std::size_t k = 0; k < n; ++k) {
      *inverse++ = static_cast<Inverse>(index.find_or_insert(ids[i + k], hashes[k]));
    }
  }
  return inverse;
}

// uint32 entries become uint16 entries at the start of the same memory.
void narrow(std::uint32_t* inverse, std::size_t n) {
  constexpr std::size_t kGroup = 256;
  auto* bytes = reinterpret_cast<std::byte*>(inverse);
  std::uint32_t from[kGroup];
  std::uint16_t to[kGroup];
  for (std::size_t i = 0; i < n; i += kGroup) {
    const std::size_t m = std::min(kGroup, n - i);
    std::memcpy(from, bytes + i * sizeof(std::uint32_t), m * sizeof(std::uint32_t));
    for (std::size_t k = 0; k < m; ++k) to[k] = static_cast<std::uint16_t>(from[k]);
    std::memcpy(bytes + i * sizeof(std::uint16_t), to, m * sizeof(std::uint16_t));
  }
}

template <class Slot, class Inverse>
std::size_t unique_as(const UniqueGroup& group, std::size_t n, Arena& arena) {
  Arena::Lease slots(arena, Index<Slot>::slot_count(n) * sizeof(Slot));
  Index<Slot> index(slots.as<Slot>(), n, group.ids);
  auto* inverse = reinterpret_cast<Inverse*>(group.inverse);
  for (const auto& ids : group.features) inverse = add(index, ids, inverse);
  return index.count();
}

void unique_group(UniqueGroup& group, std::size_t n, Arena& arena) {
  if (n < kNarrow) {
    group.count = unique_as<std::uint16_t, std::uint16_t>(group, n, arena);
  } else if (n == kNarrow) {  // the places fit uint16, one plus the place does not
    group.count = unique_as<std::uint32_t, std::uint16_t>(group, n, arena);
  } else {
    group.count = unique_as<std::uint32_t, std::uint32_t>(group, n, arena);
    if (group.count <= kNarrow) narrow(group.inverse, n);
  }
  group.wide = group.count > kNarrow;
}

}  // namespace

std::size_t UniqueGroup::positions() const {
  std::size_t n = 0;
  for (const auto& feature : features) n += feature.size();
  return n;
}

void unique(std::span<UniqueGroup> groups, ThreadPool& pool, Arena& arena) {
  std::vector<std::size_t> sizes;
  for (const auto& group : groups) sizes.push_back(group.positions());
  for (std::size_t g = 0; g < sizes.size(); ++g) {
    if (sizes[g] >= std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("group " + std::to_string(g) + " has 2^32 - 1 ids or more: use smaller batches");
    }
  }
  // Largest first, so that no thread starts the largest when the others are done.
  std::vector<std::size_t> order(groups.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
  pool.parallel_for(order.size(), [&](std::size_t i) { unique_group(groups[order[i]], sizes[order[i]], arena); });
}

// ---- pooling ----------------------------------------------------------------------------------------------------

namespace {

std::string feature_name(std::size_t feature) { return "feature " + std::to_string(feature); }

// Keeps the fault of the first feature, so that the message does not depend on the order of threads.
class Faults {
 public:
  void add(std::size_t feature, Fault fault) {
    if (fault == Fault::none) return;
    const std::lock_guard lock(mutex_);
    if (fault_ != Fault::none && feature_ <= feature) return;
    feature_ = feature;
    fault_ = fault;
  }

  void raise() const {
    if (fault_ == Fault::none) return;
    throw std::invalid_argument(feature_name(feature_) + (fault_ == Fault::inverse
                                                              ? ": inverse points behind the rows of its table"
                                                              : ": offsets must not decrease and must stay in range"));
  }

 private:
  std::mutex mutex_;
  std::size_t feature_ = 0;
  Fault fault_ = Fault::none;
};

void check(const FeaturePlan& plan, const std::string& where) {
  if (plan.offsets == nullptr) {
    if (plan.positions != plan.batch)
      throw std::invalid_argument(where + ": without offsets there is one value per sample");
  } else if (plan.offsets[0] != 0) {
    throw std::invalid_argument(where + ": offsets must start at 0");
  } else if (plan.offsets[plan.batch] != static_cast<std::int64_t>(plan.positions)) {
    throw std::invalid_argument(where + ": offsets must end at the number of values, " +
                                std::to_string(plan.positions));
  }
  if (plan.pooling == Pooling::sequence && plan.max_length == 0) {
    throw std::invalid_argument(where + ": a sequence needs a max_length");
  }
  if (plan.pooling == Pooling::sequence && plan.weights != nullptr) {
    throw std::invalid_argument(where + ": a sequence has no weights");
  }
}

template <class Inverse, class RowOps>
Fault pool_sequences(const PoolFeature& feature, std::size_t first, std::size_t last) {
  const auto [rows, count, dim] = feature.table;
  const auto* inverse = static_cast<const Inverse*>(feature.plan.inverse);
  for (std::size_t sample = first; sample < last; ++sample) {
    Bag bag;
    if (!find_bag(feature.plan, sample, bag)) return Fault::offsets;
    float* out = feature.out + static_cast<std::ptrdiff_t>(sample) * feature.sample_stride;
    std::uint8_t* mask = feature.mask + static_cast<std::ptrdiff_t>(sample) * feature.mask_stride;
    for (std::size_t p = 0; p < feature.plan.max_length; ++p, out += feature.position_stride) {
      mask[p] = p < bag.length;
      if (p < bag.length) {
        const std::size_t row = inverse[bag.begin + p];
        if (row >= count) return Fault::inverse;
        RowOps::copy(out, rows + row * dim, dim);
      } else {
        std::memset(out, 0, dim * sizeof(float));
      }
    }
  }
  return Fault::none;
}

template <class Inverse, class RowOps>
Fault pool_bags(const PoolFeature& feature, std::size_t first, std::size_t last) {
  const auto [rows, count, dim] = feature.table;
  const auto* inverse = static_cast<const Inverse*>(feature.plan.inverse);
  float* out = feature.out + static_cast<std::ptrdiff_t>(first) * feature.sample_stride;
  for (std::size_t sample = first; sample < last; ++sample, out += feature.sample_stride) {
    Bag bag;
    if (!find_bag(feature.plan, sample, bag)) return Fault::offsets;
    if (bag.length == 0) {
      std::memset(out, 0, dim * sizeof(float));
      continue;
    }
    for (std::size_t p = 0; p < bag.length; ++p) {
      const std::size_t row = inverse[bag.begin + p];
      if (row >= count) return Fault::inverse;
      if (p == 0) {
        RowOps::copy(out, rows + row * dim, dim);
      } else {
        RowOps::add(out, rows + row * dim, dim);
      }
    }
    if (bag.length > 1 && feature.plan.pooling != Pooling::sum) {
      const float by = divisor(feature.plan.pooling, bag.length);
      RowOps::divide(out, out, by, dim);
    }
  }
  return Fault::none;
}

std::size_t positions_used(const FeaturePlan& plan) {
  if (plan.pooling == Pooling::sequence) return plan.batch * plan.max_length;
  return std::max(plan.positions, plan.batch);
}

}  // namespace

void pool_forward(std::span<const PoolFeature> features, ThreadPool& pool) {
  struct Task {
    std::size_t feature, first, last;
  };
  constexpr std::size_t kSmallest = 1 << 14;  // floats; less is not worth waking a thread
  std::size_t work = 0;
  for (std::size_t f = 0; f < features.size(); ++f) {
    check(features[f].plan, feature_name(f));
    work += positions_used(features[f].plan) * features[f].table.dim;
  }
  const std::size_t share = std::max(kSmallest, work / (pool.threads() * 8));
  std::vector<Task> tasks;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const std::size_t batch = features[f].plan.batch;
    const std::size_t parts = 1 + positions_used(features[f].plan) * features[f].table.dim / share;
    const std::size_t step = std::max<std::size_t>(1, (batch + parts - 1) / parts);
    for (std::size_t first = 0; first < batch; first += step)
      tasks.push_back({f, first, std::min(batch, first + step)});
  }
  Faults faults;
  const auto run = [&](std::size_t t) {
    const auto& task = tasks[t];
    const auto& feature = features[task.feature];
    if (feature.plan.weights != nullptr) {
      faults.add(task.feature, pool_weighted(feature, task.first, task.last));
      return;
    }
    faults.add(task.feature,
               with_types(feature.plan.wide, feature.table.dim, [&]<class Inverse, class RowOps>(Inverse, RowOps) {
                 return feature.plan.pooling == Pooling::sequence
                            ? pool_sequences<Inverse, RowOps>(feature, task.first, task.last)
                            : pool_bags<Inverse, RowOps>(feature, task.first, task.last);
               }));
  };
  if (work <= kSmallest) {
    for (std::size_t t = 0; t < tasks.size(); ++t) run(t);
  } else {
    pool.parallel_for(tasks.size(), run);
  }
  faults.raise();
}

// ---- gradient of pooling ----------------------------------------------------------------------------------------

namespace {

template <class Inverse, class RowOps>
Fault add_gradient(const GradientFeature& feature, const GradientTable& table, const Columns& columns, float* scaled) {
  const std::size_t width = columns.width;
  const auto* inverse = static_cast<const Inverse*>(feature.plan.inverse);
  const bool sequence = feature.plan.pooling == Pooling::sequence;
  const std::size_t dim = table.dim;
  const std::size_t count = table.count;
  float* out = table.out + columns.first;
  for (std::size_t sample = 0; sample < feature.plan.batch; ++sample) {
    Bag bag;
    if (!find_bag(feature.plan, sample, bag)) return Fault::offsets;
    const float* gradient =
        feature.gradient + static_cast<std::ptrdiff_t>(sample) * feature.sample_stride + columns.first;
    // Rows and gradients lie where the processor cannot guess them.
    if (sample + kAhead < feature.plan.batch) {
      __builtin_prefetch(gradient + static_cast<std::ptrdiff_t>(kAhead) * feature.sample_stride);
    }
    if (bag.length > 1 && !sequence && feature.plan.pooling != Pooling::sum) {
      RowOps::divide(scaled, gradient, divisor(feature.plan.pooling, bag.length), width);
      gradient = scaled;
    }
    for (std::size_t p = 0; p < bag.length; ++p) {
      const std::size_t row = inverse[bag.begin + p];
      if (row >= count) return Fault::inverse;
      if (bag.begin + p + kAhead < feature.plan.positions) {
        const std::size_t later = inverse[bag.begin + p + kAhead];
        if (later < count) __builtin_prefetch(out + later * dim, 1);
      }
      RowOps::add(out + row * dim, gradient, width);
      if (sequence) gradient += feature.position_stride;
    }
  }
  return Fault::none;
}

void backward(const GradientTable& table, const Columns& columns, Arena& arena, Faults& faults) {
  if (columns.width == table.dim) {
    std::memset(table.out, 0, table.count * table.dim * sizeof(float));
  } else {
    for (std::size_t row = 0; row < table.count; ++row) {
      std::memset(table.out + row * table.dim + columns.first, 0, columns.width * sizeof(float));
    }
  }
  Arena::Lease scaled(arena, columns.width * sizeof(float));
  for (const auto& feature : table.features) {
    if (feature.gradient == nullptr) continue;
    if (feature.plan.weights != nullptr) {
      faults.add(feature.name, add_weighted_gradient(feature, table, columns, scaled.as<float>()));
      continue;
    }
    faults.add(feature.name,
               with_types(feature.plan.wide, columns.width, [&]<class Inverse, class RowOps>(Inverse, RowOps) {
                 return add_gradient<Inverse, RowOps>(feature, table, columns, scaled.as<float>());
               }));
  }
}

}  // namespace

void pool_backward(std::span<const GradientTable> tables, ThreadPool& pool, Arena& arena) {
  std::vector<std::size_t> work(tables.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    work[t] = tables[t].count * tables[t].dim;
    for (const auto& feature : tables[t].features) {
      check(feature.plan, feature_name(feature.name));
      if (feature.gradient != nullptr) work[t] += feature.plan.positions * tables[t].dim;
    }
  }
  const std::size_t total = std::accumulate(work.begin(), work.end(), std::size_t{0});
  // A table that is much of the whole is split by columns, in cache lines: unlike a split by rows it needs no sorting
  // of positions, which costs as much as the sum (measured: 1.7 times the time of the sum in all, for dim 16).
  constexpr std::size_t kSmallest = 1 << 16;  // floats
  constexpr std::size_t kColumns = kLine / sizeof(float);
  const std::size_t share = std::max(kSmallest, total / (pool.threads() * 2));
  std::vector<Columns> tasks;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::size_t dim = tables[t].dim;
    const std::size_t most = pool.threads() == 1 ? 1 : std::max<std::size_t>(1, dim / kColumns);
    const std::size_t parts = std::clamp<std::size_t>(work[t] / share, 1, most);
    const std::size_t lines = (dim + kColumns - 1) / kColumns;
    const std::size_t step = std::max<std::size_t>(1, (lines + parts - 1) / parts) * kColumns;
    if (parts == 1) {
      tasks.push_back({t, 0, dim});
    } else {
      for (std::size_t first = 0; first < dim; first += step) tasks.push_back({t, first, std::min(step, dim - first)});
    }
  }
  const auto cost = [&](const Columns& c) {
    return work[c.table] / std::max<std::size_t>(1, tables[c.table].dim) * c.width;
  };
  std::stable_sort(tasks.begin(), tasks.end(), [&](const Columns& a, const Columns& b) { return cost(a) > cost(b); });
  Faults faults;
  pool.parallel_for(tasks.size(), [&](std::size_t i) { backward(tables[tasks[i].table], tasks[i], arena, faults); });
  faults.raise();
}

}  // namespace persia
