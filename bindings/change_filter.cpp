// `persia._core.ChangeFilter`: persia/change_filter.hpp on arrays of numpy. As in batch.cpp, nothing is converted or
// copied.
#include "persia/change_filter.hpp"

#include <nanobind/stl/vector.h>

#include <vector>

#include "buffer.hpp"
#include "module.hpp"

namespace nb = nanobind;
using bindings::Buffer;
using bindings::take_dense;
using bindings::take_size;
using persia::ChangeFilter;

namespace {

using Sizes = std::vector<std::size_t>;

constexpr const char* kIds = "a contiguous uint64 array [n]";

void mark(ChangeFilter& filter, const Sizes& tables, const Sizes& counts, nb::handle ids_in, nb::handle version_in) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 2, ", ids"}, kIds);
  const std::size_t version = take_size(version_in, {"argument", 3, ", version"});
  const nb::gil_scoped_release release;
  filter.mark({tables, counts}, ids.span<const std::uint64_t>(), version);
}

Sizes changed(const ChangeFilter& filter, const Sizes& tables, const Sizes& counts, nb::handle ids_in,
              nb::handle since_in, nb::handle places_out, nb::handle found_out) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 2, ", ids"}, kIds);
  const std::size_t since = take_size(since_in, {"argument", 3, ", since"});
  const Buffer places = take_dense<std::uint32_t>(places_out, 1, {"output", 0}, "a contiguous uint32 array [n]");
  const Buffer found = take_dense<std::uint64_t>(found_out, 1, {"output", 1}, kIds);
  const nb::gil_scoped_release release;
  return filter.changed({tables, counts}, ids.span<const std::uint64_t>(), since, places.span<std::uint32_t>(),
                        found.span<std::uint64_t>());
}

}  // namespace

void register_change_filter(nb::module_& m) {
  using nb::arg;
  nb::class_<ChangeFilter>(m, "ChangeFilter", "Use persia.batching.ChangeFilter, which checks errors and documents.")
      .def(
          "__init__",
          [](ChangeFilter* self, nb::handle bits) {
            new (self) ChangeFilter(take_size(bits, {"argument", 0, ", bits"}));
          },
          arg("bits"))
      .def("mark", &mark, arg("tables"), arg("counts"), arg("ids"), arg("version"))
      .def("changed", &changed, arg("tables"), arg("counts"), arg("ids"), arg("since"), arg("places"), arg("found"));
}
