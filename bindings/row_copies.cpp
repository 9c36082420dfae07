// `persia._core.row_copies`: persia/row_copies.hpp on arrays of numpy. As in batch.cpp, nothing is converted or copied.
#include "persia/row_copies.hpp"

#include <nanobind/nanobind.h>

#include <limits>
#include <vector>

#include "buffer.hpp"
#include "module.hpp"

namespace nb = nanobind;
using bindings::Buffer;
using bindings::take_dense;
using bindings::take_size;
using bindings::Where;

namespace {

std::uint32_t take_place(nb::handle object, const Where& where) {
  const std::size_t value = take_size(object, where);
  if (value > std::numeric_limits<std::int32_t>::max()) where.fail("must fit into int32");
  return static_cast<std::uint32_t>(value);
}

// Tables are (ids, slot_ids, slot_steps, wanted, first_row, first_slot, spare). Returns (hits of each, oldest).
nb::tuple plan(nb::list tables, std::int64_t step, std::int64_t applied, std::int64_t limit, nb::handle places_out,
               persia::ThreadPool& pool) {
  const Buffer places = take_dense<std::int32_t>(places_out, 1, {"output", 0}, "a contiguous int32 array [2 n]");
  std::vector<Buffer> held;
  std::vector<persia::CopiedTable> records(tables.size());
  for (std::size_t t = 0; t < records.size(); ++t) {
    nb::tuple fields;
    if (!nb::try_cast(tables[t], fields, false) || fields.size() != 7) {
      Where{"table", t}.fail("must be (ids, slot_ids, slot_steps, wanted, first_row, first_slot, spare)");
    }
    auto& record = records[t];
    held.push_back(take_dense<const std::uint64_t>(fields[0], 1, {"table", t}, "contiguous uint64 ids [n]"));
    record.ids = held.back().span<const std::uint64_t>();
    held.push_back(take_dense<std::uint64_t>(fields[1], 1, {"table", t}, "contiguous uint64 slot_ids [slots]"));
    record.slot_ids = held.back().span<std::uint64_t>();
    held.push_back(take_dense<std::int64_t>(fields[2], 1, {"table", t}, "contiguous int64 slot_steps [slots]"));
    record.slot_steps = held.back().span<std::int64_t>();
    held.push_back(take_dense<bool>(fields[3], 1, {"table", t}, "contiguous bool wanted [n]"));
    if (held.back().size() != record.ids.size()) Where{"table", t}.fail("wanted must have one entry per id");
    record.wanted = held.back().data<bool>();
    record.first_row = take_place(fields[4], {"table", t, ", first_row"});
    record.first_slot = take_place(fields[5], {"table", t, ", first_slot"});
    record.spare = take_place(fields[6], {"table", t, ", spare"});
  }
  std::int64_t oldest = 0;
  {
    const nb::gil_scoped_release release;
    oldest = persia::plan_copies(records, {step, applied, limit}, places.span<std::int32_t>(), pool);
  }
  nb::list hits;
  for (const auto& record : records) hits.append(record.hits);
  return nb::make_tuple(hits, oldest);
}

}  // namespace

void register_row_copies(nb::module_& parent) {
  using nb::arg;
  nb::module_ m =
      parent.def_submodule("row_copies", "Use persia.batching.plan_copies, which checks errors and documents.");
  m.def("plan", &plan, arg("tables"), arg("step"), arg("applied"), arg("limit"), arg("places"), arg("pool"));
}
