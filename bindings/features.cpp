// `persia._core.features`: turns tuples into the records of persia/features.hpp. As in bindings/batch.cpp, arrays are
// never converted or copied, and the GIL is released while the core works.
#include "persia/features.hpp"

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "buffer.hpp"
#include "module.hpp"

namespace nb = nanobind;

namespace {

using bindings::Buffer;
using bindings::take;
using bindings::take_dense;
using bindings::take_list;
using bindings::take_size;
using bindings::Where;

double take_number(nb::handle object, const Where& where) {
  double value = 0;
  if (!nb::try_cast(object, value)) where.fail("must be a number");
  return value;
}

// (clip or None, log, scale or None): a scale is (centre, width), or quantiles, a float64 array.
persia::DenseRules take_rules(nb::handle object, const Where& where, std::vector<Buffer>& held) {
  nb::tuple fields, pair;
  if (!nb::try_cast(object, fields, false) || fields.size() != 3) where.fail("must be (clip, log, scale)");
  persia::DenseRules rules;
  if (!fields[0].is_none()) {
    if (!nb::try_cast(fields[0], pair, false) || pair.size() != 2) where.fail("must have a clip of two numbers");
    rules.clips = true;
    rules.low = take_number(pair[0], where);
    rules.high = take_number(pair[1], where);
  }
  if (!nb::try_cast(fields[1], rules.log, false)) where.fail("must have a bool, log");
  if (fields[2].is_none()) return rules;
  if (nb::try_cast(fields[2], pair, false)) {
    if (pair.size() != 2) where.fail("must have a scale of two numbers");
    rules.scale = persia::DenseScale::affine;
    rules.centre = take_number(pair[0], where);
    rules.width = take_number(pair[1], where);
    return rules;
  }
  held.push_back(take_dense<const double>(fields[2], 1, where, "(clip, log, a contiguous float64 array)"));
  rules.scale = persia::DenseScale::quantile;
  rules.quantiles = held.back().span<const double>();
  return rules;
}

bool transform(nb::handle rules_in, nb::handle values_out) {
  std::vector<Buffer> held;
  const persia::DenseRules rules = take_rules(rules_in, {"argument", 0}, held);
  const Buffer values = take<double>(values_out, {"output", 0}, "a contiguous float64 array");
  if (!values.contiguous()) throw nb::value_error("values: must be contiguous");
  const nb::gil_scoped_release release;
  return persia::transform(rules, values.span<double>());
}

persia::NumberType type_of(const Buffer& values) {
  if (values.format() == 'd' || values.format() == 'f')
    return values.itemsize() == sizeof(double) ? persia::NumberType::float64 : persia::NumberType::float32;
  return values.itemsize() == sizeof(std::int64_t) ? persia::NumberType::int64 : persia::NumberType::int32;
}

// Columns are (values, missing or None, size, fill or None, indicator, at, rules).
std::int64_t dense_columns(nb::list column_list, nb::handle matrix_out) {
  const Buffer matrix = take_dense<float>(matrix_out, 2, {"output", 0}, "a contiguous float32 array [rows, width]");
  const std::size_t rows = matrix.shape(0);
  std::vector<Buffer> held;
  std::vector<persia::DenseColumn> columns(column_list.size());
  for (std::size_t c = 0; c < columns.size(); ++c) {
    const Where where{"column", c};
    nb::tuple fields;
    if (!nb::try_cast(column_list[c], fields, false) || fields.size() != 7) {
      where.fail("must be (values, missing, size, fill, indicator, at, rules)");
    }
    auto& column = columns[c];
    Buffer values;
    if (!values.open(fields[0], "dfilq", false) || !values.contiguous()) {
      where.fail("must be a contiguous float64, float32, int64 or int32 array");
    }
    column.values = values.data<const void>();
    column.type = type_of(values);
    column.size = take_size(fields[2], where);
    // No size is larger than the matrix is wide, so that the product cannot wrap.
    if (column.size == 0 || column.size > matrix.shape(1) || values.size() != rows * column.size)
      where.fail("must have `size` values in each row");
    held.push_back(std::move(values));
    if (!fields[1].is_none()) {
      held.push_back(take_dense<const bool>(fields[1], 1, where, "bool, contiguous: missing [rows]"));
      if (held.back().size() != rows) where.fail("missing: must have one entry per row");
      column.missing = held.back().data<const std::uint8_t>();
    }
    column.fills = !fields[3].is_none();
    if (column.fills) column.fill = take_number(fields[3], where);
    if (!nb::try_cast(fields[4], column.indicator, false)) where.fail("indicator: must be a bool");
    column.at = take_size(fields[5], where);
    column.rules = take_rules(fields[6], where, held);
  }
  const nb::gil_scoped_release release;
  return persia::dense_columns(columns, rows, matrix.data<float>(), matrix.shape(1));
}

void buckets(nb::handle values_in, nb::handle edges_in, nb::handle out) {
  const Buffer values = take_dense<const double>(values_in, 1, {"argument", 0}, "a contiguous float64 array [n]");
  const Buffer edges = take_dense<const double>(edges_in, 1, {"argument", 1}, "a contiguous float64 array [edges]");
  const Buffer found = take_dense<std::uint64_t>(out, 1, {"output", 0}, "a contiguous uint64 array [n]");
  if (found.size() != values.size()) throw nb::value_error("out: must have one entry per value");
  const nb::gil_scoped_release release;
  persia::buckets(values.span<const double>(), edges.span<const double>(), found.span<std::uint64_t>());
}

}  // namespace

void register_features(nb::module_& parent) {
  using nb::arg;
  nb::module_ m = parent.def_submodule("features", "Rules of features; use persia.batching.");
  m.def("transform", &transform, arg("rules"), arg("values"));
  m.def("dense_columns", &dense_columns, arg("columns"), arg("matrix"));
  m.def("buckets", &buckets, arg("values"), arg("edges"), arg("out"));
}
