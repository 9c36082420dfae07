// `persia._core.ServedTable`: persia/served.hpp on arrays of numpy.
#include "persia/served.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "buffer.hpp"
#include "module.hpp"

namespace nb = nanobind;

namespace {

using bindings::Buffer;
using persia::ServedTable;

[[noreturn]] void reject(const std::string& name, const std::string& expected) {
  throw nb::value_error((name + " must be " + expected).c_str());
}

// A contiguous array of this shape.
template <class T>
Buffer take(nb::handle object, const char* name, const char* kind, std::initializer_list<std::size_t> shape) {
  Buffer buffer;
  bool fits = buffer.open(object, bindings::kFormats<std::remove_const_t<T>>, !std::is_const_v<T>);
  fits = fits && buffer.contiguous() && buffer.ndim() == shape.size();
  std::string axes;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    const std::size_t items = shape.begin()[axis];
    fits = fits && buffer.shape(axis) == items;
    axes += (axis == 0 ? "" : ", ") + std::to_string(items);
  }
  if (!fits)
    reject(name, std::string("a ") + (std::is_const_v<T> ? "" : "writable, ") + "contiguous numpy array [" + axes +
                     "] of " + kind);
  return buffer;
}

Buffer take_ids(nb::handle object) {
  Buffer ids;
  if (!ids.open(object, bindings::kFormats<std::uint64_t>, false) || ids.ndim() != 1 || !ids.contiguous()) {
    reject("ids", "a contiguous, one-dimensional numpy array of uint64 (use `.astype(np.uint64)`)");
  }
  return ids;
}

std::optional<Buffer> take_found(nb::handle object, std::size_t ids) {
  std::optional<Buffer> found;
  if (!object.is_none()) found.emplace(take<bool>(object, "found", "bool", {ids}));
  return found;
}

std::uint64_t lookup(const ServedTable& table, nb::handle ids_in, nb::handle out_in, nb::handle found_in) {
  const Buffer ids = take_ids(ids_in);
  const Buffer out = take<float>(out_in, "out", "float32", {ids.size(), table.dim()});
  const std::optional<Buffer> found = take_found(found_in, ids.size());
  const nb::gil_scoped_release release;
  return table.lookup(ids.span<const std::uint64_t>(), out.data<float>(), found ? found->data<bool>() : nullptr);
}

std::uint64_t lookup_packed(const std::vector<const ServedTable*>& tables, nb::list counts_in, nb::handle ids_in,
                            nb::handle out_in, nb::handle found_in) {
  const Buffer ids = take_ids(ids_in);
  std::vector<std::size_t> counts;
  for (nb::handle count : counts_in) counts.push_back(bindings::take_size(count, {"counts", counts.size()}));
  if (counts.size() != tables.size()) reject("counts", "a list with one number for each table");
  std::size_t left = ids.size(), floats = 0;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    if (tables[t] == nullptr) reject("tables", "a list of tables");
    if (counts[t] > left)
      reject("counts", "the parts of the " + std::to_string(ids.size()) + " ids; their sum is larger");
    left -= counts[t];
    floats += counts[t] * tables[t]->dim();
  }
  if (left != 0) reject("counts", "the parts of the " + std::to_string(ids.size()) + " ids; their sum is smaller");
  const Buffer out = take<float>(out_in, "out", "float32", {floats});
  const std::optional<Buffer> found = take_found(found_in, ids.size());
  const nb::gil_scoped_release release;
  const auto* id = ids.data<const std::uint64_t>();
  auto* row = out.data<float>();
  bool* mark = found ? found->data<bool>() : nullptr;
  std::uint64_t rows = 0;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    rows += tables[t]->lookup({id, counts[t]}, row, mark);
    id += counts[t];
    row += counts[t] * tables[t]->dim();
    if (mark != nullptr) mark += counts[t];
  }
  return rows;
}

void set_rows(ServedTable& table, nb::handle ids_in, nb::handle values_in) {
  const Buffer ids = take_ids(ids_in);
  const Buffer values = take<const float>(values_in, "values", "float32", {ids.size(), table.dim()});
  const nb::gil_scoped_release release;
  table.set(ids.span<const std::uint64_t>(), values.data<const float>());
}

std::uint64_t remove_rows(ServedTable& table, nb::handle ids_in) {
  const Buffer ids = take_ids(ids_in);
  const nb::gil_scoped_release release;
  return table.remove(ids.span<const std::uint64_t>());
}

nb::object ids(const ServedTable& table) {
  auto all = std::make_unique<std::vector<std::uint64_t>>();
  {
    const nb::gil_scoped_release release;
    *all = table.ids();
  }
  std::vector<std::uint64_t>* const kept = all.release();
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::uint64_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, std::uint64_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

void create(ServedTable* table, std::size_t dim, const std::optional<std::string>& base) {
  const nb::gil_scoped_release release;
  if (base) {
    new (table) ServedTable(dim, *base);
  } else {
    new (table) ServedTable(dim);
  }
}

}  // namespace

void register_served(nb::module_& m) {
  using nb::arg;
  nb::class_<ServedTable>(m, "ServedTable", "Use persia.store.served, which checks and documents.")
      .def("__init__", &create, arg("dim"), arg("base").none())
      .def("lookup", &lookup, arg("ids").none(), arg("out").none(), arg("found").none())
      .def("set", &set_rows, arg("ids").none(), arg("values").none())
      .def("remove", &remove_rows, arg("ids").none())
      .def("size", &ServedTable::size)
      .def("memory_bytes", &ServedTable::memory_bytes)
      .def("ids", &ids)
      .def("name", [](const ServedTable& table) { return table.base() == nullptr ? "" : table.base()->name(); })
      .def(
          "verify",
          [](const ServedTable& table) {
            if (table.base() != nullptr) table.base()->verify();
          },
          nb::call_guard<nb::gil_scoped_release>())
      .def("write_snapshot", &ServedTable::write_file, arg("path"), arg("name"),
           nb::call_guard<nb::gil_scoped_release>());
  m.def("served_lookup_packed", &lookup_packed, arg("tables"), arg("counts"), arg("ids").none(), arg("out").none(),
        arg("found").none());
}
