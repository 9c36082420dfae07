// The hot loops of a shard: lookups and updates of the rows of a request.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "persia/memory.hpp"
#include "persia/push_log.hpp"
#include "persia/shard.hpp"

namespace persia {
namespace {

constexpr std::size_t kGroup = 32;  // two are in flight: L2, where `prefetch` puts lines, can wait for that number
constexpr std::size_t kMaxPrefetch = 8 * kLine;  // the hardware follows a stream by itself from there on

}  // namespace

// Calls a function for each id of a request, in order, whose row is on its way to the cache by then: hash and fetch
// slots, probe and fetch rows, use rows.
class Shard::Pipeline {
 public:
  // A few ids.
  struct Group {
    std::size_t count;
    std::uint64_t id[kGroup];
    Shard* shard[kGroup];
    const Index* index[kGroup];
    std::uint32_t tag[kGroup];
    std::uint32_t row[kGroup];  // candidates
  };

  // What a request reads or writes of a row.
  struct Fetch {
    std::size_t bytes;        // from the row's first on
    bool last_steps = false;  // the row's last step, if the table keeps them
  };

  // Calls use(i, group, lane) for i = 0 ... slice.count - 1.
  //
  // Three groups are on their way at any time: the slots of one are being fetched, and the rows of the one before it,
  // while the one before that is used.
  template <class Use>
  static void run(Shards shards, const Slice& slice, const Fetch& fetch, Use&& use) {
    Group groups[4];  // one more than needed, since a remainder by 4 costs nothing
    const std::size_t count = (slice.count + kGroup - 1) / kGroup;
    for (std::size_t n = 0; n < count + 2; ++n) {
      if (n < count) fetch_slots(shards, slice, n * kGroup, groups[n % 4]);
      if (n >= 1 && n <= count) fetch_rows(groups[(n - 1) % 4], fetch);
      if (n < 2) continue;
      const Group& group = groups[(n - 2) % 4];
      for (std::size_t i = 0; i < group.count; ++i) use((n - 2) * kGroup + i, group, i);
    }
  }

  // Returns the row of memory of an id; kNone if there is none. The candidate may be another id with the same tag, or
  // have been evicted, demoted or inserted since it was probed.
  static std::uint32_t resolve(const Group& group, std::size_t lane);

  // Begins to load where the embedding of a later id is to be written. One shard's part of a batch is scattered over
  // the output, where the hardware does not see it coming.
  static void prefetch_output(const Slice& slice, std::size_t i, const float* out, std::size_t words);

 private:
  static void fetch_slots(Shards shards, const Slice& slice, std::size_t start, Group& group);
  static void fetch_rows(Group& group, const Fetch& fetch);
};

void Shard::Pipeline::fetch_slots(Shards shards, const Slice& slice, std::size_t start, Group& group) {
  group.count = std::min(kGroup, slice.count - start);
  for (std::size_t i = 0; i < group.count; ++i) {
    group.id[i] = slice.ids[slice.position(start + i)];
    const std::uint64_t hash = hash_id(group.id[i]);
    group.tag[i] = Index::tag_of(hash);
    Shard* const shard = shards[shard_of_hash(hash, shards.size())];
    group.shard[i] = shard;
    const Index& index = shard->memory_.index.slots();
    group.index[i] = &index;
    index.prefetch(index.home(group.tag[i]));
  }
}

void Shard::Pipeline::fetch_rows(Group& group, const Fetch& fetch) {
  Index::candidates(group.index, group.tag, group.count, group.row);
  for (std::size_t i = 0; i < group.count; ++i) {
    const RowStore& store = group.shard[i]->memory_.store;
    if (!store.in_memory(group.row[i])) continue;
    const std::byte* bytes = store.row_bytes(group.row[i]);
    const std::byte* const end = bytes + fetch.bytes;  // Not a line twice: asking takes a place in the queue, too.
    for (bytes -= reinterpret_cast<std::uintptr_t>(bytes) % kLine; bytes < end; bytes += kLine) prefetch(bytes);
    if (fetch.last_steps && store.header().keeps_last_steps != 0) prefetch(store.last_steps() + group.row[i]);
  }
}

// Out of line, as is `RowIndex::find`: the loop that calls it is the faster for being small.
std::uint32_t Shard::Pipeline::resolve(const Group& group, std::size_t lane) {
  const MemoryRows& memory = group.shard[lane]->memory_;
  const std::uint32_t number = group.row[lane];
  if (memory.store.in_memory(number)) {
    const RowHeader& row = *memory.store.row(number);
    if (row.key() == group.id[lane] && row.stamp != kVacant) return number;
  }
  return memory.index.find(group.id[lane]);
}

void Shard::Pipeline::prefetch_output(const Slice& slice, std::size_t i, const float* out, std::size_t words) {
  if (slice.positions == nullptr || i + kGroup >= slice.count) return;
  __builtin_prefetch(out + slice.position(i + kGroup) * words, 1);
}

void Shard::begin() {
  mark();
  memory_.tick();
}

Shard::Deferred Shard::lookup(const ShardLocks& locks, const Slice& slice, float* out, bool train,
                              std::uint8_t* found) {
  const Shards shards = locks.shards();
  Deferred deferred{shards, slice.ids, out, found, {}, {}};
  const bool tiered = shards[0]->tier_ != nullptr;
  if (tiered) deferred.fetched.resize(shards.size());
  Deferred* const later = tiered ? &deferred : nullptr;
  train ? lookup_train(shards, slice, out, later) : lookup_only(shards, slice, out, found, later);
  return deferred;
}

void Shard::fetch(std::span<Deferred> deferred) {
  std::vector<FetchedRecords::Pending> pending;
  for (Deferred& each : deferred) {
    for (std::size_t s = 0; s < each.shards.size(); ++s) {
      if (!each.fetched[s].empty()) pending.push_back({&each.fetched[s], &each.shards[s]->tier_->log()});
    }
  }
  FetchedRecords::read(pending);
}

std::vector<Shard::Deferred> Shard::by_shard(Deferred&& deferred) {
  std::vector<Deferred> parts;
  for (std::size_t s = 0; s < deferred.shards.size(); ++s) {
    parts.push_back({deferred.shards.subspan(s, 1), deferred.ids, deferred.out, deferred.found, {}, {}});
    parts.back().fetched.push_back(std::move(deferred.fetched[s]));
  }
  for (const std::uint32_t position : deferred.positions) {
    parts[shard_of_hash(hash_id(deferred.ids[position]), parts.size())].positions.push_back(position);
  }
  std::erase_if(parts, [](const Deferred& part) { return part.positions.empty(); });
  return parts;
}

void Shard::lookup_deferred(const ShardLocks& locks, const Deferred& deferred, bool train) {
  const Shards shards = locks.shards();
  for (std::size_t s = 0; s < shards.size(); ++s) shards[s]->tier_->use(deferred.fetched[s]);
  const Slice slice{deferred.ids, deferred.positions.data(), deferred.positions.size()};
  float* const out = deferred.out;
  train ? lookup_train(shards, slice, out, nullptr) : lookup_only(shards, slice, out, deferred.found, nullptr);
}

// Whether the row of an id, which is not in memory, may be in the tier; then it is looked up in another pass.
bool Shard::defer(const Slice& slice, std::size_t i, Deferred& deferred) const {
  const std::size_t at = slice.position(i);
  const std::size_t shard = deferred.fetched.size() == 1 ? 0 : header_->shard;
  if (!tier_->want(slice.ids[at], deferred.fetched[shard])) return false;
  deferred.positions.push_back(static_cast<std::uint32_t>(at));
  return true;
}

void Shard::lookup_only(Shards shards, const Slice& slice, float* out, std::uint8_t* rows_found, Deferred* deferred) {
  const std::size_t words = shards[0]->memory_.store.words();
  const std::size_t bytes = std::min(sizeof(RowHeader) + words * sizeof(float), kMaxPrefetch);
  Pipeline::run(shards, slice, {bytes}, [&](std::size_t i, const Pipeline::Group& group, std::size_t lane) {
    Shard& shard = *group.shard[lane];
    Pipeline::prefetch_output(slice, i, out, words);
    float* to = out + slice.position(i) * words;
    const std::uint32_t found = Pipeline::resolve(group, lane), number = shard.memory_.present(found);
    const float* values = number == Index::kNone ? nullptr : shard.memory_.store.embedding(number);
    if (found == Index::kNone && shard.tier_) {
      if (deferred != nullptr) {
        if (shard.defer(slice, i, *deferred)) return;
      } else {
        values = shard.tier_->embedding(group.id[lane]);
      }
    }
    if (rows_found != nullptr) rows_found[slice.position(i)] = values != nullptr;
    if (values == nullptr) {
      std::fill_n(to, words, 0.0f);
    } else {
      copy_floats(to, values, words);
    }
  });
}

void Shard::lookup_train(Shards shards, const Slice& slice, float* out, Deferred* deferred) {
  const std::size_t words = shards[0]->memory_.store.words();
  const std::size_t bytes = std::min(sizeof(RowHeader) + words * sizeof(float), kMaxPrefetch);
  Pipeline::run(shards, slice, {bytes}, [&](std::size_t i, const Pipeline::Group& group, std::size_t lane) {
    Shard& shard = *group.shard[lane];
    if (!shard.begun_) shard.begin();
    Pipeline::prefetch_output(slice, i, out, words);
    float* to = out + slice.position(i) * words;
    std::uint32_t number = Pipeline::resolve(group, lane);
    if (number == Index::kNone && shard.tier_) {
      if (deferred != nullptr) {
        if (shard.defer(slice, i, *deferred)) return;
      } else {
        number = shard.tier_->promote(group.id[lane]);
      }
    }
    Header& header = *shard.header_;
    if (number != Index::kNone && !shard.memory_.expired(number)) {
      shard.memory_.touch(number);
      ++header.counters.hits;
    } else {
      ++header.counters.misses;
      if (!shard.admits(group.id[lane])) {
        std::fill_n(to, words, 0.0f);
        return;
      }
      number = shard.insert(group.id[lane], number);
    }
    copy_floats(to, shard.memory_.store.embedding(number), words);
  });
}

void Shard::last_steps(const ShardLocks& locks, const Slice& slice, std::uint32_t* out) {
  const Shards shards = locks.shards();
  Pipeline::run(shards, slice, {sizeof(RowHeader), true},
                [&](std::size_t i, const Pipeline::Group& group, std::size_t lane) {
                  Shard& shard = *group.shard[lane];
                  const std::uint32_t found = Pipeline::resolve(group, lane), number = shard.memory_.present(found);
                  std::uint32_t& step = out[slice.position(i)];
                  step = number == Index::kNone ? 0 : shard.memory_.store.last_step(number);
                  if (found == Index::kNone && shard.tier_) {
                    shard.tier_->fetch(slice, i, shards.size());
                    if (const TierRow stored = shard.tier_->find(group.id[lane]); shard.tier_->present(stored))
                      step = stored.last_step;
                  }
                });
}

void Shard::begin_push(const Push& push) {
  const bool tracked = push.client != 0 && push.sequence != 0;
  PushLog log(*header_);
  if (tracked && log.applied(push.client, push.sequence)) {
    begun_push_ = PushState::kDuplicate;
    return;
  }
  begin();
  skip_ = log.begin(tracked ? push.client : 0, push.sequence);
  begun_push_ = PushState::kOpen;
}

void Shard::end_push(const Push& push) {
  if (begun_push_ == PushState::kOpen && push.client != 0 && push.sequence != 0) {
    PushLog(*header_).commit(push.client, push.sequence);
  }
}

PushCounts Shard::update(const ShardLocks& locks, const Slice& slice, const Push& push) {
  const Shards shards = locks.shards();
  PushCounts counts;
  const std::size_t dim = shards[0]->memory_.store.dim();
  const std::size_t bytes = std::min(shards[0]->memory_.store.stride(), kMaxPrefetch);
  float* const before = shards[0]->before_.data();  // One for all shards stays in L1.
  const auto use = [&](std::size_t i, const Pipeline::Group& group, std::size_t lane) {
    Shard& shard = *group.shard[lane];
    if (shard.begun_push_ != PushState::kOpen) {
      if (shard.begun_push_ == PushState::kNone) shard.begin_push(push);
      if (shard.begun_push_ == PushState::kDuplicate) {
        ++counts.duplicates;
        ++shard.header_->counters.duplicates;
        return;
      }
    }
    std::uint32_t found = Pipeline::resolve(group, lane);
    if (found == Index::kNone && shard.tier_) {
      shard.tier_->fetch(slice, i, shards.size());
      found = shard.tier_->promote(group.id[lane]);
    }
    const std::uint32_t number = shard.memory_.present(found);
    const float* gradient = push.gradients + slice.position(i) * dim;
    Header& header = *shard.header_;
    if (shard.skip_ > 0) {
      // Applied before the interruption; but all rows of a push are equally recent, so that they are evicted in the
      // order in which they would be without it.
      --shard.skip_;
      if (number != Index::kNone && all_finite(gradient, dim) && shard.memory_.makes_recent(number))
        shard.memory_.touch(number);
      return;
    }
    if (number == Index::kNone) {
      ++counts.absent;
      ++header.counters.absent;
    } else if (!all_finite(gradient, dim) || !shard.apply(number, push, gradient, before)) {
      ++counts.nonfinite;
      ++header.counters.nonfinite;
    } else {
      ++counts.applied;
      ++header.counters.applied;
    }
    if (header.durable) {
      // One store both counts the row and makes its undo void, so that no kill can separate the two.
      barrier();
      ++header.push.rows_applied;
      shard.memory_.store.drop_undo();
    }
  };
  try {
    if (shards[0]->tier_) {
      for (Shard* shard : shards) shard->promote_all(slice, shards.size(), push);
    }
    Pipeline::run(shards, slice, {bytes, true}, use);
  } catch (...) {  // The disk may be full. What has been applied counts once the push is repeated.
    for (Shard* shard : shards) {
      if (shard->begun_push_ != PushState::kOpen || shard->header_->push.rows_applied == 0) continue;
      PushLog(*shard->header_).recover();
    }
    throw;
  }
  for (Shard* shard : shards) shard->end_push(push);
  return counts;
}

// Moves all rows of a push to memory before its first gradient is applied: if that fails, nothing of it has been.
void Shard::promote_all(const Slice& slice, std::size_t shards, const Push& push) {
  for (std::size_t i = 0; i < slice.count; ++i) {
    const std::uint64_t id = slice.ids[slice.position(i)];
    if (shards > 1 && shard_of_hash(hash_id(id), shards) != header_->shard) continue;
    if (begun_push_ == PushState::kNone) begin_push(push);
    if (begun_push_ == PushState::kDuplicate) return;
    if (memory_.index.find(id) != Index::kNone) continue;
    tier_->fetch(slice, i, shards);
    tier_->promote(id);
  }
}

// Returns whether the row has changed. If a new value would not be finite, only its recency has: a push that is
// repeated after an interruption knows of its gradient alone.
bool Shard::apply(std::uint32_t number, const Push& push, const float* gradient, float* before) {
  memory_.snapshots.before_change(number);
  memory_.store.save_undo(number);
  RowHeader& r = *memory_.store.row(number);
  const std::uint32_t count = r.update_count;
  if (count != std::numeric_limits<std::uint32_t>::max()) ++r.update_count;
  if (memory_.makes_recent(number)) memory_.renew(number);
  crash_point();
  if (!memory_.store.update(number, {gradient, push.lr, push.step, before})) {
    r.update_count = count;
    return false;
  }
  memory_.changes.mark(number);
  memory_.store.set_last_step(number, push.step);
  return true;
}

}  // namespace persia
