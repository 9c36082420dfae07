// `persia._core.values`: 16-bit values of any shape; use persia.types.half_floats, which documents.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "module.hpp"
#include "persia/half.hpp"

namespace nb = nanobind;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using HalvesOut = nb::ndarray<std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_sizes(std::size_t values, std::size_t halves) {
  if (values != halves) throw nb::value_error("values, halves: must have the same size");
}

void narrow(const Floats& values, const HalvesOut& halves, const std::string& dtype) {
  check_sizes(values.size(), halves.size());
  const persia::ValueCodec codec(persia::dtype_of(dtype));
  const nb::gil_scoped_release release;
  const std::size_t even = values.size() & ~std::size_t{1};
  codec.store_nearest(values.data(), halves.data(), even);
  if (even == values.size()) return;
  std::uint16_t last[2];  // The codec writes whole words.
  codec.store_nearest(values.data() + even, last, 1);
  halves.data()[even] = last[0];
}

void widen(const Halves& halves, const FloatsOut& values, const std::string& dtype) {
  check_sizes(values.size(), halves.size());
  const persia::ValueCodec codec(persia::dtype_of(dtype));
  const nb::gil_scoped_release release;
  codec.load(halves.data(), values.data(), values.size());
}

float largest_finite(const Floats& values) {
  const nb::gil_scoped_release release;
  return persia::largest_finite(values.data(), values.size());
}

}  // namespace

void register_values(nb::module_& parent) {
  using nb::arg;
  nb::module_ m = parent.def_submodule("values");
  m.def("narrow", &narrow, arg("values").noconvert(), arg("halves").noconvert(), arg("dtype"));
  m.def("widen", &widen, arg("halves").noconvert(), arg("values").noconvert(), arg("dtype"));
  m.def("largest_finite", &largest_finite, arg("values").noconvert());
}
