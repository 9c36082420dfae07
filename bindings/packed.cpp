// `persia._core.packed`: one buffer for all tables of a batch. As in batch.cpp, nothing is converted or copied.
#include "persia/packed.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "buffer.hpp"
#include "module.hpp"
#include "persia/hash.hpp"
#include "persia/mix.hpp"

namespace nb = nanobind;
using bindings::Buffer;
using bindings::take_dense;
using bindings::take_list;
using persia::Arena;
using persia::Store;
using persia::ThreadPool;

namespace {

using Sizes = std::vector<std::size_t>;

constexpr const char* kIds = "a contiguous uint64 array [n]";
constexpr const char* kFloats = "a contiguous float32 array [n]";

void lookup(Store& store, const Sizes& tables, const Sizes& counts, nb::handle ids_in, nb::handle out, bool train) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 3, ", ids"}, kIds);
  const Buffer rows = take_dense<float>(out, 1, {"argument", 4, ", out"}, kFloats);
  const nb::gil_scoped_release release;
  persia::lookup_packed(store, {tables, counts}, ids.span<const std::uint64_t>(), rows.span<float>(), train);
}

void read_rows(Store& store, const Sizes& tables, const Sizes& counts, nb::handle ids_in, nb::handle out,
               nb::handle found_out) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 3, ", ids"}, kIds);
  const Buffer rows = take_dense<float>(out, 1, {"argument", 4, ", out"}, kFloats);
  const Buffer found =
      take_dense<std::uint8_t>(found_out, 1, {"argument", 5, ", found"}, "a contiguous uint8 array [n]");
  const nb::gil_scoped_release release;
  persia::read_packed(store, {tables, counts}, ids.span<const std::uint64_t>(), rows.span<float>(),
                      found.span<std::uint8_t>());
}

nb::list update(Store& store, const Sizes& tables, const Sizes& counts, nb::handle ids_in, nb::handle gradients_in,
                const std::vector<float>& lrs, std::uint32_t step, std::uint64_t client, std::uint64_t sequence) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 3, ", ids"}, kIds);
  const Buffer gradients = take_dense<const float>(gradients_in, 1, {"argument", 4, ", gradients"}, kFloats);
  std::vector<persia::PushCounts> counted;
  {
    const nb::gil_scoped_release release;
    counted = persia::update_packed(store, {tables, counts}, ids.span<const std::uint64_t>(),
                                    gradients.span<const float>(), lrs, step, client, sequence);
  }
  nb::list result;
  for (const auto& c : counted) result.append(nb::make_tuple(c.applied, c.absent, c.nonfinite, c.duplicates));
  return result;
}

// Returns (ids, entries of uint16, entries of uint32, whether each group has the latter).
nb::tuple pack_batch(const std::vector<std::string>& names, nb::list groups, nb::handle owners_in, nb::handle ids_out,
                     nb::handle inverse_out, nb::handle bounds_out, ThreadPool& pool, Arena& arena) {
  const Buffer owners =
      take_dense<const std::uint16_t>(owners_in, 1, {"argument", 2}, "a contiguous uint16 array [buckets]");
  const Buffer ids = take_dense<std::uint64_t>(ids_out, 1, {"output", 0}, kIds);
  const Buffer inverse = take_dense<std::uint32_t>(inverse_out, 1, {"output", 1}, "a contiguous uint32 array [n]");
  const Buffer bounds =
      take_dense<std::int64_t>(bounds_out, 2, {"output", 2}, "a contiguous int64 array [groups, servers + 1]");
  if (names.size() != groups.size() || bounds.shape(0) != groups.size() || bounds.shape(1) < 2 ||
      bounds.shape(1) > persia::kBuckets + 1) {
    throw nb::value_error("names, groups, bounds: must have one entry per table, bounds servers + 1 columns");
  }
  std::vector<Buffer> held;
  std::vector<persia::PackedGroup> records(groups.size());
  for (std::size_t g = 0; g < records.size(); ++g) {
    records[g].name_hash = persia::xxh64(names[g].data(), names[g].size(), 0);
    records[g].bounds = bounds.data<std::int64_t>() + g * bounds.shape(1);
    for (nb::handle feature : take_list(groups[g], {"group", g})) {
      held.push_back(take_dense<const std::uint64_t>(feature, 1, {"group", g}, "contiguous uint64 arrays [n]"));
      records[g].features.push_back(held.back().span<const std::uint64_t>());
    }
  }
  const persia::BucketOwners of{owners.span<const std::uint16_t>(), static_cast<std::uint32_t>(bounds.shape(1) - 1)};
  persia::PackedSizes sizes;
  {
    const nb::gil_scoped_release release;
    sizes = persia::pack_batch(records, of, ids.span<std::uint64_t>(), inverse.span<std::uint32_t>(), pool, arena);
  }
  nb::list wide;
  for (const auto& record : records) wide.append(record.wide);
  return nb::make_tuple(sizes.ids, sizes.narrow, sizes.wide, wide);
}

// Accepts any dtype; `widths` holds the number of items per row.
void move_part(nb::handle whole_in, nb::handle part_in, nb::handle bounds_in, std::size_t server, Sizes widths,
               bool take) {
  constexpr std::string_view kAny = "LQlqfeHIB";
  Buffer whole, mine;
  if (!whole.open(whole_in, kAny, !take) || !mine.open(part_in, kAny, take) || whole.ndim() != 1 || mine.ndim() != 1 ||
      !whole.contiguous() || !mine.contiguous() || whole.itemsize() != mine.itemsize()) {
    throw nb::value_error("whole and part: must be contiguous arrays [n] of one dtype, the written one writable");
  }
  const Buffer bounds =
      take_dense<const std::int64_t>(bounds_in, 2, {"argument", 2}, "a contiguous int64 array [tables, servers + 1]");
  if (bounds.shape(1) < 2) throw nb::value_error("bounds: must be [tables, servers + 1]");
  for (auto& width : widths) width *= whole.itemsize();
  const persia::ServerPart part{bounds.span<const std::int64_t>(), bounds.shape(1) - 1, server, widths};
  const std::size_t size = whole.size() * whole.itemsize(), part_size = mine.size() * mine.itemsize();
  const nb::gil_scoped_release release;
  if (take) {
    persia::take_part(part, {whole.data<const std::byte>(), size}, {mine.data<std::byte>(), part_size});
  } else {
    persia::put_part(part, {whole.data<std::byte>(), size}, {mine.data<const std::byte>(), part_size});
  }
}

void copy(nb::handle to_out, nb::handle from_in, ThreadPool& pool) {
  const Buffer to = take_dense<std::uint8_t>(to_out, 1, {"argument", 0, ", to"}, "a contiguous uint8 array [n]");
  const Buffer from =
      take_dense<const std::uint8_t>(from_in, 1, {"argument", 1, ", from"}, "a contiguous uint8 array [n]");
  const nb::gil_scoped_release release;
  persia::copy_bytes(std::as_writable_bytes(to.span<std::uint8_t>()), std::as_bytes(from.span<const std::uint8_t>()),
                     pool);
}

}  // namespace

void register_packed(nb::module_& parent) {
  using nb::arg;
  nb::module_ m = parent.def_submodule("packed", "Use persia.store and persia.batching, which check and document.");
  m.def("lookup", &lookup, arg("store"), arg("tables"), arg("counts"), arg("ids"), arg("out"), arg("train"));
  m.def("read", &read_rows, arg("store"), arg("tables"), arg("counts"), arg("ids"), arg("out"), arg("found"));
  m.def("update", &update, arg("store"), arg("tables"), arg("counts"), arg("ids"), arg("gradients"), arg("lrs"),
        arg("step"), arg("client"), arg("sequence"));
  m.def("pack_batch", &pack_batch, arg("names"), arg("groups"), arg("owners"), arg("ids"), arg("inverse"),
        arg("bounds"), arg("pool"), arg("scratch"));
  m.def("move_part", &move_part, arg("whole"), arg("part"), arg("bounds"), arg("server"), arg("widths"), arg("take"));
  m.def("copy", &copy, arg("to"), arg("from"), arg("pool"));
}
