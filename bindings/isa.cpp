#include "persia/isa.hpp"

#include <nanobind/stl/string.h>

#include <string>

#include "module.hpp"

namespace nb = nanobind;

void register_isa(nb::module_& m) {
  // At import, so that a wrong value of PERSIA_MAX_ISA is refused there and not in the middle of a lookup.
  persia::isa();
  m.def(
      "isa", [] { return std::string(persia::isa_name(persia::isa())); },
      "Returns the instruction set of the hot loops: 'baseline', 'avx2' or 'avx512'.");
}
