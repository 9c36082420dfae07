#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "store_arrays.hpp"

using persia::RowBatch;
using persia::Store;

namespace {

using Output = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void check_lengths(std::size_t tables, std::initializer_list<std::size_t> others) {
  for (const std::size_t other : others) {
    if (other != tables) throw std::invalid_argument("tables, ids and the other lists must have one entry per table");
  }
}

constexpr const char* kOutWanted = "out must be a writable, contiguous numpy array [ids, dim] of float32";
constexpr const char* kGradientsWanted =
    "gradients must be a contiguous numpy array [ids, dim] of float32 (use `np.ascontiguousarray(g, np.float32)`)";

void lookup(Store& store, const std::vector<std::size_t>& tables, nb::list ids, nb::list out, bool train) {
  check_lengths(tables.size(), {ids.size(), out.size()});
  std::vector<persia::LookupRequest> requests;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto& table = store.table(tables[i]);
    const auto keys = take<Ids>(ids[i], table.config.name, kIdsWanted);
    const auto to = take<Output>(out[i], table.config.name, kOutWanted);
    check_rows(to.shape(0), to.shape(1), keys.shape(0), table.row_words, table, "out");
    requests.push_back({tables[i], keys.data(), keys.shape(0), to.data()});
  }
  const nb::gil_scoped_release release;
  store.lookup(requests, train);
}

// Returns one tuple (applied, absent, nonfinite, duplicates) per table.
nb::list update(Store& store, const std::vector<std::size_t>& tables, nb::list ids, nb::list gradients,
                const std::vector<float>& lrs, std::uint32_t step, std::uint64_t client, std::uint64_t sequence) {
  check_lengths(tables.size(), {ids.size(), gradients.size(), lrs.size()});
  std::vector<persia::UpdateRequest> requests;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto& table = store.table(tables[i]);
    const auto keys = take<Ids>(ids[i], table.config.name, kIdsWanted);
    const auto values = take<Floats>(gradients[i], table.config.name, kGradientsWanted);
    check_rows(values.shape(0), values.shape(1), keys.shape(0), table.config.dim, table, "gradients");
    requests.push_back({tables[i], keys.data(), keys.shape(0), values.data(), lrs[i]});
  }
  std::vector<persia::PushCounts> counts;
  {
    const nb::gil_scoped_release release;
    counts = store.update(requests, step, client, sequence);
  }
  nb::list result;
  for (const auto& c : counts) result.append(nb::make_tuple(c.applied, c.absent, c.nonfinite, c.duplicates));
  return result;
}

nb::tuple peek(Store& store, std::size_t index, nb::object ids) {
  const auto& table = store.table(index);
  const auto keys = take<Ids>(ids, table.config.name, kIdsWanted);
  std::vector<std::uint8_t> found(keys.shape(0));
  RowBatch rows;
  {
    const nb::gil_scoped_release release;
    rows = store.peek(index, {keys.data(), keys.shape(0)}, found.data());
  }
  const std::size_t n = found.size();
  return nb::make_tuple(to_numpy(std::move(found), {n}), to_tuple(std::move(rows), table));
}

nb::object last_steps(Store& store, std::size_t index, nb::object ids) {
  const auto keys = take<Ids>(ids, store.table(index).config.name, kIdsWanted);
  std::vector<std::uint32_t> steps(keys.shape(0));
  {
    const nb::gil_scoped_release release;
    store.last_steps(index, {keys.data(), keys.shape(0)}, steps.data());
  }
  const std::size_t n = steps.size();
  return to_numpy(std::move(steps), {n});
}

nb::dict statistics(Store& store, std::size_t index) {
  persia::Counters c;
  {
    const nb::gil_scoped_release release;
    c = store.counters(index);
  }
  nb::dict d;
  d["lookups"] = c.lookups;
  d["hits"] = c.hits;
  d["misses"] = c.misses;
  d["admitted"] = c.admitted;
  d["rejected"] = c.rejected;
  d["evicted"] = c.evicted;
  d["applied"] = c.applied;
  d["absent"] = c.absent;
  d["nonfinite"] = c.nonfinite;
  d["duplicates"] = c.duplicates;
  return d;
}

nb::dict tier_counts(Store& store, std::size_t index) {
  persia::TierCounts c;
  {
    const nb::gil_scoped_release release;
    c = store.tier_counts(index);
  }
  nb::dict d;
  d["rows"] = c.rows;
  d["disk_bytes"] = c.disk_bytes;
  d["spilled"] = c.demoted;
  d["read"] = c.read;
  d["promoted"] = c.promoted;
  d["compacted"] = c.compacted;
  d["unreadable"] = c.unreadable;
  return d;
}

// Recovery counts of an attached table: its shards, and the number of shards in each state.
nb::dict recovery(Store& store, std::size_t index) {
  std::size_t busy = 0, undone = 0, open = 0, rebuilt = 0;
  const auto& shards = store.table(index).recovery;
  for (const auto& r : shards) {
    busy += r.busy;
    undone += r.undone;
    open += r.open;
    rebuilt += r.rebuilt;
  }
  nb::dict d;
  d["shards"] = shards.size();
  d["busy"] = busy;
  d["undone"] = undone;
  d["open"] = open;
  d["rebuilt"] = rebuilt;
  return d;
}

void register_config(nb::module_& m) {
  using persia::OptimizerConfig;
  using persia::TableConfig;
  nb::enum_<persia::Initializer>(m, "Initializer")
      .value("zeros", persia::Initializer::kZeros)
      .value("uniform", persia::Initializer::kUniform)
      .value("normal", persia::Initializer::kNormal);
  nb::enum_<persia::Admission>(m, "Admission")
      .value("all", persia::Admission::kAll)
      .value("probability", persia::Admission::kProbability)
      .value("min_frequency", persia::Admission::kMinFrequency);
  nb::enum_<persia::Eviction>(m, "Eviction")
      .value("lru", persia::Eviction::kLru)
      .value("midpoint", persia::Eviction::kMidpoint);
  nb::class_<OptimizerConfig>(m, "OptimizerConfig")
      .def(nb::init<>())
      .def_prop_rw(
          "kind", [](const OptimizerConfig& c) { return static_cast<std::uint32_t>(c.kind); },
          [](OptimizerConfig& c, const std::string& kind) { c.kind = persia::optimizer_kind(kind); })
      .def_rw("momentum", &OptimizerConfig::momentum)
      .def_rw("weight_decay", &OptimizerConfig::weight_decay)
      .def_rw("clip_row_norm", &OptimizerConfig::clip_row_norm)
      .def_rw("decoupled_weight_decay", &OptimizerConfig::decoupled_weight_decay)
      .def_rw("initial_accumulator", &OptimizerConfig::initial_accumulator)
      .def_rw("eps", &OptimizerConfig::eps)
      .def_rw("beta1", &OptimizerConfig::beta1)
      .def_rw("beta2", &OptimizerConfig::beta2)
      .def_rw("beta", &OptimizerConfig::beta)
      .def_rw("l1", &OptimizerConfig::l1)
      .def_rw("l2", &OptimizerConfig::l2)
      .def_rw("bound", &OptimizerConfig::bound);
  nb::class_<persia::InitializerConfig>(m, "InitializerConfig")
      .def(nb::init<>())
      .def_rw("kind", &persia::InitializerConfig::kind)
      .def_rw("a", &persia::InitializerConfig::a)
      .def_rw("b", &persia::InitializerConfig::b);
  nb::class_<persia::RegionFiles>(m, "RegionFiles")
      .def(nb::init<>())
      .def_rw("path", &persia::RegionFiles::path)
      .def_rw("attach", &persia::RegionFiles::attach)
      .def_rw("lock_seconds", &persia::RegionFiles::lock_seconds);
  nb::class_<persia::TierFiles>(m, "TierFiles")
      .def(nb::init<>())
      .def_rw("path", &persia::TierFiles::path)
      .def_rw("memory_rows", &persia::TierFiles::memory_rows);
  nb::class_<TableConfig>(m, "TableConfig")
      .def(nb::init<>())
      .def_rw("name", &TableConfig::name)
      .def_rw("dim", &TableConfig::dim)
      .def_prop_rw(
          "dtype", [](const TableConfig& c) { return static_cast<std::uint32_t>(c.dtype); },
          [](TableConfig& c, const std::string& dtype) { c.dtype = persia::dtype_of(dtype); })
      .def_rw("capacity", &TableConfig::capacity)
      .def_rw("shards", &TableConfig::shards)
      .def_rw("seed", &TableConfig::seed)
      .def_rw("optimizer", &TableConfig::optimizer)
      .def_rw("initializer", &TableConfig::initializer)
      .def_rw("admission", &TableConfig::admission)
      .def_rw("admission_value", &TableConfig::admission_value)
      .def_rw("ttl", &TableConfig::ttl)
      .def_rw("ttl_unit", &TableConfig::ttl_unit)
      .def_rw("eviction", &TableConfig::eviction)
      .def_rw("files", &TableConfig::files)
      .def_rw("tier", &TableConfig::tier);
}

}  // namespace

void register_store(nb::module_& m) {
  register_config(m);
  m.attr("MAX_SHARD_ROWS") = persia::kMaxRows;
  nb::exception<persia::RegionFull>(m, "RegionFull", PyExc_RuntimeError);
  using Release = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Store> store(m, "Store", "Tables of embedding rows; see persia.store.EmbeddingStore.");
  store.def(nb::init<persia::ThreadPool&>(), nb::arg("pool"), nb::keep_alive<1, 2>())
      .def("create_table", &Store::create_table, nb::arg("config"), Release())
      .def("lookup", &lookup, nb::arg("tables"), nb::arg("ids"), nb::arg("out"), nb::arg("train"))
      .def("update", &update, nb::arg("tables"), nb::arg("ids"), nb::arg("gradients"), nb::arg("lrs"), nb::arg("step"),
           nb::arg("client"), nb::arg("sequence"))
      .def("peek", &peek, nb::arg("table"), nb::arg("ids"))
      .def("advance_clock", &Store::advance_clock, nb::arg("table"), nb::arg("by"), Release())
      .def("keep_last_steps", &Store::keep_last_steps, nb::arg("table"), Release())
      .def("last_steps", &last_steps, nb::arg("table"), nb::arg("ids"))
      .def("state_width", [](const Store& s, std::size_t table) { return s.table(table).state_width; })
      .def("size", &Store::size, nb::arg("table"), Release())
      .def("memory_bytes", &Store::memory_bytes, nb::arg("table"), Release())
      .def("statistics", &statistics, nb::arg("table"))
      .def("tier_counts", &tier_counts, nb::arg("table"))
      .def("recovery", &recovery, nb::arg("table"))
      .def("clear", &Store::clear, nb::arg("table"), Release());
  register_store_transfer(store);
}
