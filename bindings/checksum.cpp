// `persia._core.checksum`.
#include "persia/checksum.hpp"

#include <nanobind/ndarray.h>

#include "module.hpp"

namespace nb = nanobind;

void register_checksum(nb::module_& m) {
  auto module = m.def_submodule("checksum");
  module.def(
      "crc32",
      [](const nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data, std::uint32_t crc) {
        const nb::gil_scoped_release release;
        return persia::crc32(crc, reinterpret_cast<const std::byte*>(data.data()), data.size());
      },
      nb::arg("data").noconvert(), nb::arg("crc") = 0);
}
