#include "persia/store.hpp"

#include <unistd.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <thread>
#include <utility>

namespace persia {
namespace {

// Below this many ids, waking a thread takes longer than the work it would take over.
constexpr std::size_t kSerial = 1024;
// How often all taken shards are tried again before a thread sleeps, which takes longer than a few ids in a shard.
constexpr std::size_t kIdleRounds = 16;
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
  // Counts a part of a table; see `Table::parts`.
  class Presence {
   public:
    explicit Presence(const Table& table) : parts_(&table.parts), alone_(parts_->fetch_add(1) == 0) {}
    Presence(Presence&& other) noexcept : parts_(std::exchange(other.parts_, nullptr)), alone_(other.alone_) {}
    Presence& operator=(Presence&&) = delete;
    ~Presence() {
      if (parts_ != nullptr) parts_->fetch_sub(1);
    }
    // Returns whether there was no other part when this one came.
    bool alone() const { return alone_; }

   private:
    std::atomic<std::uint32_t>* parts_;
    bool alone_;
  };
  std::vector<const Table*> tables;  // of the requests
  std::vector<Grouping> groupings;
  std::vector<Item> items;
  std::vector<Item> busy;         // items that found a lock taken
  std::vector<Presence> waiting;  // of these

  // Groups the ids of a request by shard.
  void group(std::size_t r, const std::uint64_t* ids, std::size_t count) {
    groupings[r].build(ids, count, static_cast<std::uint32_t>(tables[r]->all.size()));
  }
  // Adds a request as it is.
  void add_whole(std::size_t r, const std::uint64_t* ids, std::size_t count) {
    if (count > 0) items.push_back({r, {ids, nullptr, count}, tables[r]->all});
  }
  // Adds the parts of a grouped request.
  void add_shards(std::size_t r, const std::uint64_t* ids) {
    const Shard::Shards all = tables[r]->all;
    for (std::size_t s = 0; s < all.size(); ++s) {
      const Slice slice = groupings[r].slice(ids, s);
      if (slice.count > 0) items.push_back({r, slice, all.subspan(s, 1)});
    }
  }
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

void Store::run(bool parallel, std::size_t count, const Work& work) {
  if (parallel) return pool_->parallel_for(count, work);
  for (std::size_t i = 0; i < count; ++i) work(i);
}

template <class Request, class Body>
void Store::for_each_part(std::span<const Request> requests, Body&& body) {
  std::vector<bool> seen;
  std::size_t total = 0;
  auto scratch = take_scratch();
  auto& tables = scratch->tables;
  auto& items = scratch->items;
  auto& busy = scratch->busy;
  tables.clear();
  for (const auto& request : requests) {
    tables.push_back(&checked(request.table, request.count, seen));
    total += request.count;
  }
  const bool parallel = total >= kSerial && pool_->threads() > 1;
  // The order of the request is the best one for the caches, and costs no grouping; but all threads shall have work.
  const auto split = [&](std::size_t r) {
    return parallel && tables[r]->all.size() > 1 && requests[r].count * pool_->threads() * 2 > total;
  };
  if (scratch->groupings.size() < requests.size()) scratch->groupings.resize(requests.size());
  run(parallel, requests.size(), [&](std::size_t r) {
    if (split(r)) scratch->group(r, requests[r].ids, requests[r].count);
  });
  items.clear();
  for (std::size_t r = 0; r < requests.size(); ++r) {
    if (split(r)) {
      scratch->add_shards(r, requests[r].ids);
    } else {
      scratch->add_whole(r, requests[r].ids, requests[r].count);
    }
  }
  std::mutex mutex;
  busy.clear();
  run(parallel, items.size(), [&](std::size_t i) {
    const Scratch::Item& item = items[i];
    Scratch::Presence presence(*tables[item.request]);
    // Whoever locked a whole table beside others, who wait for one of its shards, would take it again before they wake.
    if (item.shards.size() == 1 || presence.alone()) {
      const Shard::ShardLocks locks(item.shards, std::try_to_lock);
      if (locks.held()) return body(item.request, item.slice, locks);
    }
    const std::lock_guard lock(mutex);
    busy.push_back(item);
    scratch->waiting.push_back(std::move(presence));
  });
  if (!busy.empty()) {
    items.clear();
    for (const Scratch::Item& item : busy) {
      if (item.shards.size() == 1) {
        items.push_back(item);
        continue;
      }
      const Request& request = requests[item.request];
      scratch->group(item.request, request.ids, request.count);
      scratch->add_shards(item.request, request.ids);
    }
    for (std::size_t idle = 0; !items.empty(); items.swap(busy)) {
      if (idle == kIdleRounds) {
        const Scratch::Item item = items.back();
        items.pop_back();
        const Shard::ShardLocks locks(item.shards);
        body(item.request, item.slice, locks);
      } else if (idle > 0) {
        std::this_thread::yield();
      }
      busy.clear();
      run(parallel && idle == 0, items.size(), [&](std::size_t i) {
        {
          const Shard::ShardLocks locks(items[i].shards, std::try_to_lock);
          if (locks.held()) return body(items[i].request, items[i].slice, locks);
        }
        const std::lock_guard lock(mutex);
        busy.push_back(items[i]);
      });
      idle = busy.size() == items.size() && idle < kIdleRounds ? idle + 1 : 0;
    }
    scratch->waiting.clear();
  }
  give_scratch(std::move(scratch));
}

template <class Body>
void Store::for_each_shard(std::size_t index, const std::uint64_t* ids, std::size_t count, Body&& body) {
  std::vector<bool> seen;
  const Table& t = checked(index, count, seen);
  auto scratch = take_scratch();
  if (scratch->groupings.empty()) scratch->groupings.resize(1);
  Grouping& grouping = scratch->groupings[0];
  grouping.build(ids, count, static_cast<std::uint32_t>(t.all.size()));
  run(count >= kSerial, t.all.size(), [&](std::size_t s) {
    if (const Slice slice = grouping.slice(ids, s); slice.count > 0) body(slice, *t.all[s]);
  });
  give_scratch(std::move(scratch));
}

void Store::lookup(std::span<const LookupRequest> requests, bool train) {
  check_process();
  std::mutex mutex;
  std::vector<Shard::Deferred> deferred;
  for_each_part(requests, [&](std::size_t r, const Slice& slice, const Shard::ShardLocks& locks) {
    Shard::Deferred left = Shard::lookup(locks, slice, requests[r].out, train, requests[r].found);
    if (left.positions.empty()) return;
    const std::lock_guard lock(mutex);
    deferred.push_back(std::move(left));
  });
  if (deferred.empty()) return;
  Shard::fetch(deferred);
  pool_->parallel_for(deferred.size(), [&](std::size_t i) {
    {
      const Shard::ShardLocks locks(deferred[i].shards, std::try_to_lock);
      if (locks.held()) return Shard::lookup_deferred(locks, deferred[i], train);
    }
    for (const Shard::Deferred& part : Shard::by_shard(std::move(deferred[i]))) {
      const Shard::ShardLocks locks(part.shards);
      Shard::lookup_deferred(locks, part, train);
    }
  });
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
  for_each_part(requests, [&](std::size_t r, const Slice& slice, const Shard::ShardLocks& locks) {
    const auto done = Shard::update(locks, slice, {requests[r].gradients, requests[r].lr, step, client, sequence});
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
  for_each_part(std::span(&request, 1), [&](std::size_t, const Slice& slice, const Shard::ShardLocks& locks) {
    Shard::last_steps(locks, slice, out);
  });
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
  for_each_shard(index, ids.data(), ids.size(),
                 [&](const Slice& slice, Shard& shard) { shard.peek(slice, found, rows); });
  return rows;
}

void Store::import_rows(std::size_t index, std::size_t count, const RowView& rows) {
  for_each_shard(index, rows.ids, count, [&](const Slice& slice, Shard& shard) { shard.import_rows(slice, rows); });
}

std::uint64_t Store::remove_rows(std::size_t index, std::span<const std::uint64_t> ids) {
  std::atomic<std::uint64_t> removed = 0;
  for_each_shard(index, ids.data(), ids.size(),
                 [&](const Slice& slice, Shard& shard) { removed += shard.remove_rows(slice); });
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
