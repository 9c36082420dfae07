// `persia._core.disk`.
#include <nanobind/stl/string.h>

#include "module.hpp"
#include "persia/disk_rate.hpp"
#include "persia/disk_reader.hpp"

namespace nb = nanobind;

void register_disk(nb::module_& m) {
  auto module = m.def_submodule("disk");
  module.attr("DEPTH") = persia::DiskReader::kDepth;
  module.def(
      "random_reads",
      [](const std::string& path, std::uint64_t begin, std::uint64_t blocks, std::size_t block_bytes, std::size_t count,
         std::uint64_t seed, unsigned threads) {
        const nb::gil_scoped_release release;
        const persia::RandomReads reads{path, begin, blocks, block_bytes, count, seed};
        return threads == 0 ? persia::read_as_rows(reads) : persia::read_by_threads(reads, threads);
      },
      nb::arg("path"), nb::arg("begin"), nb::arg("blocks"), nb::arg("block_bytes"), nb::arg("count"), nb::arg("seed"),
      nb::arg("threads"));
  module.def("reads_with_io_uring", [] { return persia::DiskReader().kind() == persia::DiskReader::Kind::kUring; });
}
