#include "module.hpp"
#include "persia/thread_pool.hpp"

namespace nb = nanobind;

void register_threads(nb::module_& m) {
  nb::class_<persia::ThreadPool>(m, "ThreadPool", "Threads that share the loops of the core; the caller helps.")
      .def(nb::init<std::size_t>(), nb::arg("threads"))
      .def_prop_ro("threads", &persia::ThreadPool::threads);
}
