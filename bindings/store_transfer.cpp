// Methods of `persia._core.Store` that take rows out of a store and bring them into it.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

#include "persia/hash.hpp"
#include "store_arrays.hpp"

using persia::RowBatch;
using persia::Store;

namespace {

// Returns (rows, row number to continue with, or None).
nb::tuple export_rows(Store& store, std::size_t index, std::size_t shard, std::uint64_t start, std::uint64_t max_rows) {
  RowBatch rows;
  std::uint64_t next = 0;
  {
    const nb::gil_scoped_release release;
    next = store.shard(index, shard).export_rows(start, max_rows, rows);
  }
  const nb::object following = next == persia::Shard::kNoRow ? nb::none() : nb::cast(next);
  return nb::make_tuple(to_tuple(std::move(rows), store.table(index)), following);
}

persia::BucketSet bucket_set(nb::handle chosen, const std::string& table) {
  const auto flags = take<Flags>(chosen, table, "buckets must be bool [4096]");
  if (flags.shape(0) != persia::kBuckets) {
    throw std::invalid_argument("table '" + table + "': buckets must be bool [4096], not [" +
                                std::to_string(flags.shape(0)) + "]");
  }
  persia::BucketSet buckets{persia::xxh64(table.data(), table.size(), 0), {}};
  std::copy_n(flags.data(), persia::kBuckets, buckets.chosen.begin());
  return buckets;
}

void begin_snapshot(Store& store, std::size_t index, std::uint32_t id, std::uint32_t since,
                    const std::string& directory, std::size_t buffer_bytes, std::size_t evicted_limit, bool live,
                    nb::object buckets) {
  const auto& table = store.table(index);
  const auto& all = table.all;
  persia::SnapshotOptions options{id, since, directory, buffer_bytes, evicted_limit, live, std::nullopt};
  if (!buckets.is_none()) options.only = bucket_set(buckets, table.config.name);
  const nb::gil_scoped_release release;
  std::size_t begun = 0;
  try {
    for (; begun < all.size(); ++begun) all[begun]->begin_snapshot(options);
  } catch (...) {  // Else nobody would end those of the other shards.
    while (begun > 0) all[--begun]->end_snapshot();
    throw;
  }
}

void end_snapshot(Store& store, std::size_t index) {
  for (persia::Shard* shard : store.table(index).all) shard->end_snapshot();
}

std::uint32_t changes_since(Store& store, std::size_t index) {
  const auto& all = store.table(index).all;
  const std::uint32_t since = all[0]->changes_since();
  for (persia::Shard* shard : all) {
    if (shard->changes_since() != since) return 0;
  }
  return since;
}

// Returns (rows, whether there may be more).
nb::tuple export_snapshot(Store& store, std::size_t index, std::size_t shard, std::uint32_t id,
                          std::uint64_t max_rows) {
  const auto& table = store.table(index);
  RowBatch rows;
  bool more = false;
  {
    const nb::gil_scoped_release release;
    const std::size_t room = max_rows + persia::kRowsPerLock;
    rows.ids.reserve(room);
    rows.update_counts.reserve(room);
    rows.last_steps.reserve(room);
    rows.stamps.reserve(room);
    rows.embeddings.reserve(room * table.config.dim);
    rows.states.reserve(room * table.state_width);
    more = store.shard(index, shard).export_snapshot(id, max_rows, rows);
  }
  return nb::make_tuple(to_tuple(std::move(rows), table), more);
}

nb::object snapshot_evicted(Store& store, std::size_t index, std::size_t shard, std::uint32_t id) {
  std::vector<std::uint64_t> ids;
  {
    const nb::gil_scoped_release release;
    ids = store.shard(index, shard).snapshot_evicted(id);
  }
  const std::size_t n = ids.size();
  return to_numpy(std::move(ids), {n});
}

bool begin_changes(Store& store, std::size_t index, bool whole, std::size_t removed_limit) {
  for (persia::Shard* shard : store.table(index).all) {
    if (!shard->begin_changes(whole, removed_limit)) return false;  // The others ask for all rows from now on.
  }
  return true;
}

// Returns ((removed ids, ids, embeddings), whether there may be more).
nb::tuple take_changes(Store& store, std::size_t index, std::size_t shard, std::uint64_t max_rows) {
  persia::RowChanges changes;
  bool more = false;
  {
    const nb::gil_scoped_release release;
    more = store.shard(index, shard).take_changes(max_rows, changes);
  }
  const std::size_t n = changes.ids.size(), removed = changes.removed.size();
  return nb::make_tuple(
      nb::make_tuple(to_numpy(std::move(changes.removed), {removed}), to_numpy(std::move(changes.ids), {n}),
                     to_numpy(std::move(changes.embeddings), {n, store.table(index).config.dim})),
      more);
}

void end_changes(Store& store, std::size_t index) {
  for (persia::Shard* shard : store.table(index).all) shard->end_changes();
}

void import_rows(Store& store, std::size_t index, nb::object ids, nb::object embeddings, nb::object states,
                 nb::object update_counts, nb::object last_steps, nb::object stamps) {
  const auto& table = store.table(index);
  const auto& name = table.config.name;
  const auto keys = take<Ids>(ids, name, kIdsWanted);
  const auto weights = take<Floats>(embeddings, name, "embeddings must be float32 [rows, dim]");
  const auto state = take<Floats>(states, name, "states must be float32 [rows, state width]");
  const auto counts = take<Words>(update_counts, name, "update_counts must be uint32 [rows]");
  const auto steps = take<Words>(last_steps, name, "last_steps must be uint32 [rows]");
  const auto recency = take<Words>(stamps, name, "stamps must be uint32 [rows]");
  const std::size_t n = keys.shape(0);
  check_rows(weights.shape(0), weights.shape(1), n, table.config.dim, table, "embeddings");
  if (state.shape(0) != n || state.shape(1) != table.state_width) {
    throw std::invalid_argument("table '" + name + "': states must have " + std::to_string(table.state_width) +
                                " columns: were the rows written with another optimizer?");
  }
  if (counts.shape(0) != n || steps.shape(0) != n || recency.shape(0) != n) {
    throw std::invalid_argument("table '" + name + "': the columns differ in length");
  }
  const nb::gil_scoped_release release;
  store.import_rows(index, n, {keys.data(), weights.data(), state.data(), counts.data(), steps.data(), recency.data()});
}

std::uint64_t remove_rows(Store& store, std::size_t index, nb::object ids) {
  const auto keys = take<Ids>(ids, store.table(index).config.name, kIdsWanted);
  const nb::gil_scoped_release release;
  return store.remove_rows(index, {keys.data(), keys.shape(0)});
}

std::uint64_t remove_buckets(Store& store, std::size_t index, std::size_t shard, nb::object chosen) {
  const persia::BucketSet buckets = bucket_set(chosen, store.table(index).config.name);
  const nb::gil_scoped_release release;
  return store.shard(index, shard).remove_buckets(buckets);
}

// Time, marks made, stamp before which rows have expired, unit; then time and clock of each mark.
constexpr std::size_t kMarkWords = 4;
constexpr std::size_t kTtlWords = kMarkWords + 2 * persia::kTtlMarks;

std::vector<std::uint64_t> ttl_to_words(const persia::TtlState& ttl) {
  std::vector<std::uint64_t> words{ttl.time, ttl.marks_made, ttl.expired_before, ttl.unit};
  for (const auto& mark : ttl.marks) words.insert(words.end(), {mark.time, mark.clock});
  return words;
}

persia::TtlState ttl_of_words(const std::uint64_t* words, const std::string& table) {
  const auto small = [&](std::uint64_t word) {
    if (word > std::numeric_limits<std::uint32_t>::max()) {
      throw std::invalid_argument("table '" + table +
                                  "': stamps and clocks in the ages of the shard state must be below 2^32");
    }
    return static_cast<std::uint32_t>(word);
  };
  persia::TtlState ttl{words[0], words[1], small(words[2]), small(words[3]), {}};
  for (std::size_t i = 0; i < persia::kTtlMarks; ++i) {
    ttl.marks[i] = {words[kMarkWords + 2 * i], small(words[kMarkWords + 2 * i + 1]), 0};
  }
  return ttl;
}

nb::dict export_state(Store& store, std::size_t index, std::size_t shard) {
  persia::ShardState state;
  {
    const nb::gil_scoped_release release;
    state = store.shard(index, shard).export_state();
  }
  std::vector<std::uint64_t> clients(state.clients.size() * persia::kClientWords);
  std::memcpy(clients.data(), state.clients.data(), clients.size() * sizeof(std::uint64_t));
  std::vector<std::uint64_t> counters(state.counters.begin(), state.counters.end());
  const std::size_t sketch = state.sketch.size();
  nb::dict result;
  result["clocks"] = to_numpy(std::vector<std::uint64_t>{state.clock, state.snapshot, state.client_clock}, {3});
  result["clients"] = to_numpy(std::move(clients), {persia::kClients, persia::kClientWords});
  result["counters"] = to_numpy(std::move(counters), {persia::kCounters});
  result["sketch"] = to_numpy(std::move(state.sketch), {sketch});
  result["ages"] = to_numpy(ttl_to_words(state.ttl), {kTtlWords});
  return result;
}

void import_state(Store& store, std::size_t index, std::size_t shard, nb::dict values) {
  const auto& name = store.table(index).config.name;
  const auto clocks = take<Ids>(values["clocks"], name, "clocks must be uint64 [3]");
  const auto counters = take<Ids>(values["counters"], name, "counters must be uint64 [10]");
  const auto sketch = take<Halves>(values["sketch"], name, "sketch must be uint16 [counters]");
  const auto ages = take<Ids>(values["ages"], name, "ages must be uint64 [68]");
  using Table2 = nb::ndarray<const std::uint64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
  const auto clients = take<Table2>(values["clients"], name, "clients must be uint64 [256, 4]");
  if (clocks.shape(0) != 3 || counters.shape(0) != persia::kCounters || clients.shape(0) != persia::kClients ||
      clients.shape(1) != persia::kClientWords || ages.shape(0) != kTtlWords) {
    throw std::invalid_argument("table '" + name + "': the shard state has another shape: is it of another version?");
  }
  if (std::max(clocks.data()[0], clocks.data()[1]) > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("table '" + name + "': clock and epoch of the shard state must be below 2^32");
  }
  persia::ShardState state;
  state.clock = static_cast<std::uint32_t>(clocks.data()[0]);
  state.snapshot = static_cast<std::uint32_t>(clocks.data()[1]);
  state.client_clock = clocks.data()[2];
  state.clients.resize(persia::kClients);
  std::memcpy(state.clients.data(), clients.data(), persia::kClients * sizeof(persia::ClientEntry));
  std::memcpy(state.counters.data(), counters.data(), sizeof(persia::Counters));
  state.sketch.assign(sketch.data(), sketch.data() + sketch.shape(0));
  state.ttl = ttl_of_words(ages.data(), name);
  const nb::gil_scoped_release release;
  store.shard(index, shard).import_state(state);
}

}  // namespace

void register_store_transfer(nb::class_<Store>& store) {
  using Release = nb::call_guard<nb::gil_scoped_release>;
  store.def("export_rows", &export_rows, nb::arg("table"), nb::arg("shard"), nb::arg("start"), nb::arg("max_rows"))
      .def("begin_snapshot", &begin_snapshot, nb::arg("table"), nb::arg("id"), nb::arg("since"), nb::arg("directory"),
           nb::arg("buffer_bytes"), nb::arg("evicted_limit"), nb::arg("live"), nb::arg("buckets").none())
      .def("export_snapshot", &export_snapshot, nb::arg("table"), nb::arg("shard"), nb::arg("id"), nb::arg("max_rows"))
      .def("snapshot_evicted", &snapshot_evicted, nb::arg("table"), nb::arg("shard"), nb::arg("id"))
      .def("end_snapshot", &end_snapshot, nb::arg("table"), Release())
      .def("changes_since", &changes_since, nb::arg("table"), Release())
      .def("begin_changes", &begin_changes, nb::arg("table"), nb::arg("whole"), nb::arg("removed_limit"), Release())
      .def("take_changes", &take_changes, nb::arg("table"), nb::arg("shard"), nb::arg("max_rows"))
      .def("end_changes", &end_changes, nb::arg("table"), Release())
      .def("import_rows", &import_rows, nb::arg("table"), nb::arg("ids"), nb::arg("embeddings"), nb::arg("states"),
           nb::arg("update_counts"), nb::arg("last_steps"), nb::arg("stamps"))
      .def("end_import", &Store::end_import, nb::arg("table"), Release())
      .def("remove_rows", &remove_rows, nb::arg("table"), nb::arg("ids"))
      .def("remove_buckets", &remove_buckets, nb::arg("table"), nb::arg("shard"), nb::arg("buckets"))
      .def("export_state", &export_state, nb::arg("table"), nb::arg("shard"))
      .def("import_state", &import_state, nb::arg("table"), nb::arg("shard"), nb::arg("state"));
}
