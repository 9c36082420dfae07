// `persia._core.RowSums`: persia/row_sums.hpp on arrays of numpy.
#include "persia/row_sums.hpp"

#include <nanobind/ndarray.h>

#include "module.hpp"

namespace nb = nanobind;

namespace {

using persia::RowSums;

template <class T, std::size_t N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw nb::value_error(message);
}

void add(RowSums& sums, const Array<const std::uint64_t, 1>& ids, const Array<const float, 2>& values,
         const Array<const float, 1>& counts, float share) {
  require(values.shape(0) == ids.size() && values.shape(1) == sums.dim(), "values: wrong shape");
  require(counts.size() == ids.size(), "counts: wrong size");
  nb::gil_scoped_release free;
  sums.add({ids.data(), ids.size()}, values.data(), counts.data(), share);
}

void take(RowSums& sums, double total, const Array<std::uint64_t, 1>& ids, const Array<float, 2>& values) {
  require(ids.size() == sums.counted() && values.shape(0) == ids.size() && values.shape(1) == sums.dim(),
          "ids or values: wrong shape");
  nb::gil_scoped_release free;
  sums.take(total, ids.data(), values.data());
}

}  // namespace

void register_row_sums(nb::module_& m) {
  nb::class_<RowSums>(m, "RowSums", "The running sum of a step's gradients, of one table.")
      .def(nb::init<std::size_t>(), nb::arg("dim"))
      .def("add", &add, nb::arg("ids").noconvert(), nb::arg("values").noconvert(), nb::arg("counts").noconvert(),
           nb::arg("share"))
      .def("counted", &RowSums::counted)
      .def("take", &take, nb::arg("total"), nb::arg("ids").noconvert(), nb::arg("values").noconvert())
      .def_prop_ro("nbytes", &RowSums::bytes);
}
