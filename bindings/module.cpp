// The extension module `persia._core`: glue only, one register function per header of the core.
#include "module.hpp"

NB_MODULE(_core, m) {
  m.doc() = "Native core of persia: hot loops only. Use the Python faces in persia.store and persia.nn.";
  // Objects may live until the interpreter exits (a trainer in a script), so leak warnings would be noise.
  nanobind::set_leak_warnings(false);
  register_isa(m);
  register_threads(m);
  register_store(m);
  register_batch(m);
  register_features(m);
  register_packed(m);
  register_onebit(m);
  register_row_sums(m);
  register_row_copies(m);
  register_change_filter(m);
  register_values(m);
  register_checksum(m);
  register_served(m);
  register_disk(m);
}
