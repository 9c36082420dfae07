// What the bindings of the store share: arrays of numpy, taken as they are, and rows returned as arrays.
#pragma once
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "module.hpp"
#include "persia/store.hpp"

namespace nb = nanobind;

// Defines the methods for checkpoints, publishing and rows that move (store_transfer.cpp).
void register_store_transfer(nb::class_<persia::Store>& store);

using Ids = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<const std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Accepts arrays as they are or rejects them with an error that names the table; never copies them.
template <class Array>
Array take(nb::handle object, const std::string& table, const char* what) {
  Array array;
  if (!nb::try_cast<Array>(object, array, false)) {
    throw std::invalid_argument("table '" + table + "': " + what);
  }
  return array;
}

inline void check_rows(std::size_t rows, std::size_t width, std::size_t count, std::size_t expected,
                       const persia::Table& table, const char* what) {
  if (rows == count && width == expected) return;
  throw std::invalid_argument("table '" + table.config.name + "': " + what + " must have shape [" +
                              std::to_string(count) + ", " + std::to_string(expected) + "], not [" +
                              std::to_string(rows) + ", " + std::to_string(width) + "]");
}

inline constexpr const char* kIdsWanted =
    "ids must be a contiguous one-dimensional numpy array of uint64 (use `.astype(np.uint64)`)";

template <class T>
nb::object to_numpy(std::vector<T>&& values, std::vector<std::size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T>(kept->data(), shape.size(), shape.data(), owner));
}

// Returns (ids, embeddings, states, update_counts, last_steps, stamps).
inline nb::tuple to_tuple(persia::RowBatch&& rows, const persia::Table& table) {
  const std::size_t n = rows.ids.size();
  return nb::make_tuple(to_numpy(std::move(rows.ids), {n}), to_numpy(std::move(rows.embeddings), {n, table.config.dim}),
                        to_numpy(std::move(rows.states), {n, table.state_width}),
                        to_numpy(std::move(rows.update_counts), {n}), to_numpy(std::move(rows.last_steps), {n}),
                        to_numpy(std::move(rows.stamps), {n}));
}
