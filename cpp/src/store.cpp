#include "persia/store.hpp"

#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace persia {
namespace {

// Below this many ids, waking a thread takes longer than the work it would take over.
constexpr std::size_t kSerial = 1024;
constexpr std::size_t kMaxDim = 65536;
constexpr std::uint32_t kMaxShards = 1024;

void require(bool condition, const std::string& table, const std::string& message) {
  if (!condition) throw std::invalid_argument("table '" + table + "': " + message);
}

bool unit_interval(double value) { return value >= 0.0 && value < 1.0; }

void validate(const TableConfig& c) {
  require(!c.name.empty(), c.name, "the name is empty");
  require(c.dim >= 1 && c.dim <= kMaxDim, c.name, "dim must be within 1 ... 65536");
  require(c.shards <= kMaxShards && std::has_single_bit(c.shards), c.name, "shards must be a power of two up to 1024");
  require(c.capacity >= c.shards, c.name, "capacity must be at least the number of shards");
  if (c.tiered()) {
    const auto& s = c.tier;
    require(s.memory_rows >= c.shards && s.memory_rows <= c.capacity, c.name,
            "memory_rows must be at least the number of shards, and at most the capacity");
  }
  const auto& o = c.optimizer;
  for (const float value : {o.momentum, o.weight_decay, o.initial_accumulator, o.eps, o.beta, o.l1, o.l2, o.bound,
                            o.clip_row_norm, o.decoupled_weight_decay}) {
    require(std::isfinite(value) && value >= 0.0f, c.name, "optimizer parameters must be finite and not negative");
  }
  require(unit_interval(o.beta1) && unit_interval(o.beta2), c.name, "beta1 and beta2 must be within [0, 1)");
  require(std::isfinite(c.initializer.a) && std::isfinite(c.initializer.b), c.name, "initializer must be finite");
  if (c.admission == Admission::kProbability) {
    require(c.admission_value >= 0.0 && c.admission_value <= 1.0, c.name, "the probability must be within [0, 1]");
  }
  if (c.admission == Admission::kMinFrequency) {
    require(c.admission_value >= 1.0 && c.admission_value <= Sketch::kMax, c.name,
            "the minimum frequency must be within 1 ... 65535");
  }
}

TableConfig validated(TableConfig config) {
  validate(config);
  return config;
}

}  // namespace

Table::Table(TableConfig table_config)
    : config(validated(std::move(table_config))),
      optimizer(config.optimizer),
      state_width(optimizer.state_width(config.dim)),
      row_words(words_of(config.dtype, config.dim)) {
  if (config.tiered()) reader = std::make_unique<DiskReader>();
  for (std::uint32_t i = 0; i < config.shards; ++i) {
    shards.push_back(std::make_unique<Shard>(config, optimizer, i, reader.get()));
    all.push_back(shards.back().get());
  }
}

// The positions of a request's ids, sorted by shard, order kept within a shard.
struct Store::Grouping {
  std::vector<std::uint32_t> positions;
  std::vector<std::uint32_t> ends;
  std::vector<std::uint16_t> shard;

  void build(const std::uint64_t* ids, std::size_t count, std::uint32_t shards) {
    if (positions.size() < count) positions.resize(count);
    if (shard.size() < count) shard.resize(count);
    ends.assign(shards + 1, 0);
    for (std::size_t i = 0; i < count; ++i) {
      shard[i] = static_cast<std::uint16_t>(shard_of(ids[i], shards));
      ++ends[shard[i] + 1];
    }
    for (std::uint32_t s = 1; s <= shards; ++s) ends[s] += ends[s - 1];
    for (std::size_t i = 0; i < count; ++i) positions[ends[shard[i]]++] = static_cast<std::uint32_t>(i);
  }

  Slice slice(const std::uint64_t* ids, std::size_t s) const {
    const std::uint32_t begin = s == 0 ? 0 : ends[s - 1];
    return {ids, positions.data() + begin, ends[s] - begin};
  }
};

class Store::Scratch {
 public:
  struct Item {
    std::size_t request;
    Slice slice;
    Shard::Shards shards;
  };
  std::vector<Grouping> groupings;
  std::vector<Item> items;
};

Store::Store(ThreadPool& pool) : pool_(&pool), owner_(getpid()) {}
Store::~Store() = default;

void Store::check_process() const {
  if (getpid() != owner_) {
    throw std::runtime_error(
        "this store belongs to the process that created it: a forked child must not use it (threads and rows stay with "
        "the parent); create a store in the child, or ask the parent");
  }
}

std::size_t Store::create_table(const TableConfig& config) {
  check_process();
  auto table = std::make_unique<Table>(config);
  if (config.files.attach) {
    table->recovery.resize(table->all.size());
    pool_->parallel_for(table->all.size(), [&](std::size_t s) { table->recovery[s] = table->all[s]->recover(); });
  }
  const std::unique_lock lock(tables_mutex_);
  for (const auto& other : tables_) require(other->config.name != config.name, config.name, "the name is in use");
  tables_.push_back(std::move(table));
  return tables_.size() - 1;
}

std::size_t Store::tables() const {
  const std::shared_lock lock(tables_mutex_);
  return tables_.size();
}

const Table& Store::table(std::size_t index) const {
  check_process();
  const std::shared_lock lock(tables_mutex_);
  if (index >= tables_.size()) {
    throw std::invalid_argument("there is no table " + std::to_string(index) + ": the store has " +
                                std::to_string(tables_.size()));
  }
  return *tables_[index];
}

const Table& Store::checked(std::size_t index, std::size_t count, std::vector<bool>& seen) const {
  const Table& t = table(index);
  if (seen.size() <= index) seen.resize(index + 1);
  require(!seen[index], t.config.name, "named twice in one call: concatenate its ids");
  require(count < std::numeric_limits<std::uint32_t>::max(), t.config.name, "more than 2^32 ids in one call");
  seen[index] = true;
  return t;
}

std::unique_ptr<Store::Scratch> Store::take_scratch() {
  const std::lock_guard lock(scratch_mutex_);
  if (scratch_.empty()) return std::make_unique<Scratch>();
  auto taken = std::move(scratch_.back());
  scratch_.pop_back();
  return taken;
}

void Store::give_scratch(std::unique_ptr<Scratch> scratch) {
  const std::lock_guard lock(scratch_mutex_);
  scratch_.push_back(std::move(scratch));
}

template <class Request, class Body>
void Store::for_each_part(std::span<const Request> requests, Parts parts, Body&& body) {
  std::vector<bool> seen;
  std::size_t total = 0;
  for (const auto& request : requests) {
    checked(request.table, request.count, seen);
    total += request.count;
  }
  const std::size_t threads = total < kSerial ? 1 : pool_->threads();
  const auto run = [&](std::size_t count, const std::function<void(std::size_t)>& work) {
    if (threads > 1) return pool_->parallel_for(count, work);
    for (std::size_t i = 0; i < count; ++i) work(i);
  };
  // The order of the request is the best one for the caches, and costs no grouping; but all threads shall have work.
  const auto split = [&](std::size_t r) {
    if (parts == Parts::kShards) return true;
    return threads > 1 && table(requests[r].table).all.size() > 1 && requests[r].count * threads * 2 > total;
  };
  auto scratch = take_scratch();
  if (scratch->groupings.size() < requests.size()) scratch->groupings.resize(requests.size());
  run(requests.size(), [&](std::size_t r) {
    if (!split(r)) return;
    const auto shards = static_cast<std::uint32_t>(table(requests[r].table).all.size());
    scratch->groupings[r].build(requests[r].ids, requests[r].count, shards);
  });
  scratch->items.clear();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    const Shard::Shards all = table(requests[r].table).all;
    if (!split(r)) {
      scratch->items.push_back({r, {requests[r].ids, nullptr, requests[r].count}, all});
      continue;
    }
    for (std::size_t s = 0; s < all.size(); ++s) {
      const Slice slice = scratch->groupings[r].slice(requests[r].ids, s);
      if (slice.count > 0) scratch->items.push_back({r, slice, all.subspan(s, 1)});
    }
  }
  run(scratch->items.size(), [&](std::size_t i) {
    const auto& item = scratch->items[i];
    body(item.request, item.slice, item.shards);
  });
  give_scratch(std::move(scratch));
}

void Store::lookup(std::span<const LookupRequest> requests, bool train) {
  check_process();
  std::mutex mutex;
  std::vector<Shard::Deferred> deferred;
  for_each_part(requests, Parts::kAny, [&](std::size_t r, const Slice& slice, Shard::Shards shards) {
    Shard::Deferred left = Shard::lookup(shards, slice, requests[r].out, train, requests[r].found);
    if (left.positions.empty()) return;
    const std::lock_guard lock(mutex);
    deferred.push_back(std::move(left));
  });
  if (deferred.empty()) return;
  Shard::fetch(deferred);
  pool_->parallel_for(deferred.size(), [&](std::size_t i) { Shard::lookup_deferred(deferred[i], train); });
}

std::vector<PushCounts> Store::update(std::span<const UpdateRequest> requests, std::uint32_t step, std::uint64_t client,
                                      std::uint64_t sequence) {
  check_process();
  for (const auto& request : requests) {
    const auto& config = table(request.table).config;
    require(std::isfinite(request.lr) && request.lr >= 0.0f, config.name, "lr must be finite and not negative");
    require(request.lr > 0.0f || config.optimizer.kind != OptimizerKind::kFtrl, config.name, "ftrl divides by lr");
  }
  std::vector<PushCounts> counts(requests.size());
  std::mutex mutex;
  for_each_part(requests, Parts::kAny, [&](std::size_t r, const Slice& slice, Shard::Shards shards) {
    const auto done = Shard::update(shards, slice, {requests[r].gradients, requests[r].lr, step, client, sequence});
    const std::lock_guard lock(mutex);
    counts[r] += done;
  });
  return counts;
}

void Store::advance_clock(std::size_t index, std::uint64_t by) {
  for (const auto& shard : table(index).shards) shard->advance_clock(by);
}

void Store::keep_last_steps(std::size_t index) {
  for (const auto& shard : table(index).shards) shard->keep_last_steps();
}

void Store::last_steps(std::size_t index, std::span<const std::uint64_t> ids, std::uint32_t* out) {
  check_process();
  const UpdateRequest request{index, ids.data(), ids.size(), nullptr, 0.0f};
  for_each_part(std::span(&request, 1), Parts::kAny,
                [&](std::size_t, const Slice& slice, Shard::Shards shards) { Shard::last_steps(shards, slice, out); });
}

RowBatch Store::peek(std::size_t index, std::span<const std::uint64_t> ids, std::uint8_t* found) {
  const Table& t = table(index);
  RowBatch rows;
  rows.ids.assign(ids.begin(), ids.end());
  rows.embeddings.resize(ids.size() * t.config.dim);
  rows.states.resize(ids.size() * t.state_width);
  rows.update_counts.resize(ids.size());
  rows.last_steps.resize(ids.size());
  rows.stamps.resize(ids.size());
  const UpdateRequest request{index, ids.data(), ids.size(), nullptr, 0.0f};
  for_each_part(std::span(&request, 1), Parts::kShards,
                [&](std::size_t, const Slice& slice, Shard::Shards one) { one[0]->peek(slice, found, rows); });
  return rows;
}

void Store::import_rows(std::size_t index, std::size_t count, const RowView& rows) {
  const UpdateRequest request{index, rows.ids, count, nullptr, 0.0f};
  for_each_part(std::span(&request, 1), Parts::kShards,
                [&](std::size_t, const Slice& slice, Shard::Shards one) { one[0]->import_rows(slice, rows); });
}

std::uint64_t Store::remove_rows(std::size_t index, std::span<const std::uint64_t> ids) {
  const UpdateRequest request{index, ids.data(), ids.size(), nullptr, 0.0f};
  std::atomic<std::uint64_t> removed = 0;
  for_each_part(std::span(&request, 1), Parts::kShards,
                [&](std::size_t, const Slice& slice, Shard::Shards one) { removed += one[0]->remove_rows(slice); });
  return removed;
}

Shard& Store::shard(std::size_t index, std::size_t shard) const {
  const Table& t = table(index);
  require(shard < t.shards.size(), t.config.name, "there is no shard " + std::to_string(shard));
  return *t.shards[shard];
}

std::uint64_t Store::size(std::size_t index) const {
  std::uint64_t rows = 0;
  for (const auto& shard : table(index).shards) rows += shard->size();
  return rows;
}

std::uint64_t Store::memory_bytes(std::size_t index) const {
  std::uint64_t bytes = 0;
  for (const auto& shard : table(index).shards) bytes += shard->memory_bytes();
  return bytes;
}

Counters Store::counters(std::size_t index) const {
  Counters sum{};
  for (const auto& shard : table(index).shards) {
    const Counters c = shard->counters();
    sum.lookups += c.lookups;
    sum.hits += c.hits;
    sum.misses += c.misses;
    sum.admitted += c.admitted;
    sum.rejected += c.rejected;
    sum.evicted += c.evicted;
    sum.applied += c.applied;
    sum.absent += c.absent;
    sum.nonfinite += c.nonfinite;
    sum.duplicates += c.duplicates;
  }
  return sum;
}

TierCounts Store::tier_counts(std::size_t index) const {
  TierCounts sum;
  for (const auto& shard : table(index).shards) sum += shard->tier_counts();
  return sum;
}

void Store::end_import(std::size_t index) {
  const Table& t = table(index);
  pool_->parallel_for(t.shards.size(), [&](std::size_t s) { t.shards[s]->end_import(); });
}

void Store::clear(std::size_t index) {
  for (const auto& shard : table(index).shards) shard->clear();
}

}  // namespace persia
