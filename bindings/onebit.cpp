// `persia._core.onebit`: persia/onebit.hpp on numpy arrays. Gradients and parameters are addresses, as passing torch
// tensors takes longer than updating them. The caller keeps them alive, and their lengths are those of the runs.
#include "persia/onebit.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "module.hpp"

namespace nb = nanobind;

namespace {

using namespace persia;

template <class T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Floats = Array<float, 1>;
using Bytes = Array<std::uint8_t, 1>;
using Rows = Array<std::uint8_t, 2>;
using Bounds = Array<const std::uint64_t, 2>;  // begin, end, address of the gradient, address of the parameter
using Numbers = Array<const float, 2>;         // keep, take, rate, shrink, eps, beta2, rest2, bias2

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

OneBitFormat format_of(std::size_t block, bool l2) {
  require(block >= 64 && block % 64 == 0, "block is no multiple of 64");
  return {block, l2};
}

std::vector<MomentumRun> runs_of(const Bounds& bounds, const Numbers& numbers, std::size_t count) {
  require(bounds.shape(1) == 4 && numbers.shape(1) == 8 && bounds.shape(0) == numbers.shape(0), "runs: wrong shape");
  std::vector<MomentumRun> runs;
  std::size_t at = 0;
  for (std::size_t i = 0; i < bounds.shape(0); ++i) {
    const std::uint64_t* b = bounds.data() + 4 * i;
    const float* n = numbers.data() + 8 * i;
    require(b[0] == at && b[1] >= b[0] && b[1] <= count, "runs have gaps, or end past the bucket");
    at = b[1];
    runs.push_back({b[0], b[1], reinterpret_cast<const float*>(b[2]), reinterpret_cast<float*>(b[3]), n[0], n[1], n[2],
                    n[3], n[4], n[5], n[6], n[7]});
  }
  require(at == count, "runs end before the bucket");
  return runs;
}

OneBitRows rows_of(const OneBitFormat& format, const Rows& rows, std::size_t chunk, std::size_t count) {
  require(chunk > 0 && chunk % 64 == 0, "chunk is no multiple of 64");
  require(rows.shape(0) * chunk >= count && rows.shape(1) >= format.payload_bytes(chunk), "rows are too few or short");
  return {rows.data(), rows.shape(1), chunk};
}

void pack(const Floats& values, const Bytes& payload, std::size_t block, bool l2) {
  const OneBitFormat format = format_of(block, l2);
  require(payload.size() == format.payload_bytes(values.size()), "payload: wrong size");
  nb::gil_scoped_release free;
  onebit_pack(format, values.data(), values.size(), payload.data());
}

void unpack(const Bytes& payload, const Floats& out, std::size_t block, bool l2) {
  const OneBitFormat format = format_of(block, l2);
  require(payload.size() == format.payload_bytes(out.size()), "payload: wrong size");
  nb::gil_scoped_release free;
  onebit_unpack(format, payload.data(), out.size(), out.data());
}

void average(const Rows& payloads, const Floats& error, const Bytes& payload, std::size_t block, bool l2,
             ThreadPool& pool) {
  const OneBitFormat format = format_of(block, l2);
  const std::size_t bytes = format.payload_bytes(error.size());
  require(payloads.shape(1) >= bytes && payload.size() >= bytes, "payloads are too short");
  nb::gil_scoped_release free;
  onebit_average(format, payloads.data(), payloads.shape(1), payloads.shape(0), error.data(), error.size(),
                 payload.data(), pool);
}

void compress(const Bounds& bounds, const Numbers& numbers, const std::optional<Floats>& momentum,
              const std::optional<Rows>& previous, const Floats& error, const Rows& rows, std::size_t chunk,
              std::size_t block, bool l2, ThreadPool& pool) {
  const OneBitFormat format = format_of(block, l2);
  const auto runs = runs_of(bounds, numbers, error.size());
  require(!momentum || momentum->size() == error.size(), "momentum: wrong size");
  const OneBitRows to = rows_of(format, rows, chunk, error.size());
  OneBitRows from{};
  if (previous) from = rows_of(format, *previous, chunk, error.size());
  nb::gil_scoped_release free;
  onebit_compress(format, runs, momentum ? momentum->data() : nullptr, previous ? &from : nullptr, error.data(),
                  error.size(), to, pool);
}

void apply(const Bounds& bounds, const Numbers& numbers, const Rows& rows, const std::optional<Floats>& momentum,
           const Floats& variance, std::size_t chunk, std::size_t block, bool l2, ThreadPool& pool) {
  const OneBitFormat format = format_of(block, l2);
  const auto runs = runs_of(bounds, numbers, variance.size());
  require(!momentum || momentum->size() == variance.size(), "momentum: wrong size");
  const OneBitRows from = rows_of(format, rows, chunk, variance.size());
  nb::gil_scoped_release free;
  onebit_apply(format, runs, from, momentum ? momentum->data() : nullptr, variance.data(), variance.size(), pool);
}

void adam(const Bounds& bounds, const Numbers& numbers, const Floats& gradient, float factor, const Floats& momentum,
          const Floats& variance, ThreadPool& pool) {
  const auto runs = runs_of(bounds, numbers, variance.size());
  require(momentum.size() == variance.size() && gradient.size() == variance.size(), "arrays of different sizes");
  nb::gil_scoped_release free;
  adam_step(runs, gradient.data(), factor, momentum.data(), variance.data(), variance.size(), pool);
}

double squares(std::uint64_t address, std::size_t count, ThreadPool& pool) {
  nb::gil_scoped_release free;
  return sum_of_squares(reinterpret_cast<const float*>(address), count, pool);
}

}  // namespace

void register_onebit(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("onebit", "Signs with scales, and the steps of APMSqueeze around them.");
  m.def("pack", &pack, nb::arg("values").noconvert(), nb::arg("payload").noconvert(), nb::arg("block"), nb::arg("l2"));
  m.def("unpack", &unpack, nb::arg("payload").noconvert(), nb::arg("out").noconvert(), nb::arg("block"), nb::arg("l2"));
  m.def("average", &average, nb::arg("payloads").noconvert(), nb::arg("error").noconvert(),
        nb::arg("payload").noconvert(), nb::arg("block"), nb::arg("l2"), nb::arg("pool"));
  m.def("compress", &compress, nb::arg("bounds").noconvert(), nb::arg("numbers").noconvert(),
        nb::arg("momentum").noconvert().none(), nb::arg("previous").noconvert().none(), nb::arg("error").noconvert(),
        nb::arg("rows").noconvert(), nb::arg("chunk"), nb::arg("block"), nb::arg("l2"), nb::arg("pool"));
  m.def("apply", &apply, nb::arg("bounds").noconvert(), nb::arg("numbers").noconvert(), nb::arg("rows").noconvert(),
        nb::arg("momentum").noconvert().none(), nb::arg("variance").noconvert(), nb::arg("chunk"), nb::arg("block"),
        nb::arg("l2"), nb::arg("pool"));
  m.def("adam", &adam, nb::arg("bounds").noconvert(), nb::arg("numbers").noconvert(), nb::arg("gradient").noconvert(),
        nb::arg("factor"), nb::arg("momentum").noconvert(), nb::arg("variance").noconvert(), nb::arg("pool"));
  m.def("sum_of_squares", &squares, nb::arg("address"), nb::arg("count"), nb::arg("pool"));
}
