// `persia._core.batch`: turns lists of arrays into the records of persia/batch.hpp and persia/hash.hpp.
//
// Arrays are never converted or copied: what does not fit is a ValueError that names it. Every array is held for the
// time of the call, and the GIL is released while the core works.
#include "persia/batch.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <limits>
#include <string>
#include <vector>

#include "module.hpp"
#include "persia/hash.hpp"

namespace nb = nanobind;

namespace {

using persia::Arena;
using persia::ThreadPool;

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Strided = nb::ndarray<T, nb::device::cpu>;

// Names an argument in messages; its text is only made when one is needed.
struct Where {
  const char* kind;
  std::size_t index;
  const char* part = "";
  [[noreturn]] void fail(const std::string& what) const {
    throw nb::value_error((std::string(kind) + " " + std::to_string(index) + part + ": " + what).c_str());
  }
};

template <class Array>
Array take(nb::handle object, const Where& where, const char* expected) {
  Array array;
  if (!nb::try_cast(object, array, false) || !array.is_valid()) where.fail(std::string("must be ") + expected);
  if (reinterpret_cast<std::uintptr_t>(array.data()) % sizeof(typename Array::Scalar) != 0) {
    where.fail("must be aligned to its items");
  }
  return array;
}

nb::list take_list(nb::handle object, const Where& where) {
  nb::list list;
  if (!nb::try_cast(object, list, false)) where.fail("must be a list");
  return list;
}

std::size_t take_size(nb::handle object, const Where& where) {
  std::size_t value = 0;
  if (!nb::try_cast(object, value, false)) where.fail("must be an int >= 0");
  return value;
}

// Entries of each array, by group. Python sizes the outputs of `unique` with it, which checks them again.
nb::list sizes(nb::list groups) {
  nb::list result;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    nb::list group;
    for (nb::handle feature : take_list(groups[g], {"group", g})) {
      group.append(take<Vector<const std::uint64_t>>(feature, {"group", g}, "contiguous uint64 arrays [n]").size());
    }
    result.append(group);
  }
  return result;
}

nb::list unique(nb::list groups, Vector<std::uint64_t> ids, Vector<std::uint32_t> inverse, ThreadPool& pool,
                Arena& arena) {
  std::vector<Vector<const std::uint64_t>> held;
  std::vector<persia::UniqueGroup> records(groups.size());
  std::size_t total = 0;
  for (std::size_t g = 0; g < records.size(); ++g) {
    records[g].ids = ids.data() + total;
    records[g].inverse = inverse.data() + total;
    for (nb::handle feature : take_list(groups[g], {"group", g})) {
      held.push_back(take<Vector<const std::uint64_t>>(feature, {"group", g}, "contiguous uint64 arrays [n]"));
      const auto& array = held.back();
      if (array.size() > ids.size() - total) throw nb::value_error("ids: too small");
      records[g].features.emplace_back(array.data(), array.size());
      total += array.size();
    }
  }
  if (ids.size() != total || inverse.size() != total) throw nb::value_error("ids, inverse: must have one entry per id");
  {
    const nb::gil_scoped_release release;
    persia::unique(records, pool, arena);
  }
  nb::list counts;
  for (const auto& group : records) counts.append(group.count);
  return counts;
}

// The plans of a call, with the arrays they point into.
class Plans {
 public:
  explicit Plans(nb::list plans) {
    for (std::size_t f = 0; f < plans.size(); ++f) {
      nb::tuple fields;
      if (!nb::try_cast(plans[f], fields, false) || fields.size() != 5) {
        Where{"feature", f}.fail("must be (table, inverse, offsets, pooling, max_length)");
      }
      persia::FeaturePlan plan;
      tables.push_back(take_size(fields[0], {"feature", f, ", table"}));
      Vector<const std::uint16_t> narrow;
      if (nb::try_cast(fields[1], narrow, false) && narrow.is_valid()) {
        plan.inverse = narrow.data();
        plan.positions = narrow.size();
        if (reinterpret_cast<std::uintptr_t>(narrow.data()) % sizeof(std::uint16_t) != 0) {
          Where{"feature", f, ", inverse"}.fail("must be aligned to its items");
        }
        narrow_.push_back(std::move(narrow));
      } else {
        wide_.push_back(take<Vector<const std::uint32_t>>(fields[1], {"feature", f, ", inverse"},
                                                          "a contiguous uint16 or uint32 array [n]"));
        plan.inverse = wide_.back().data();
        plan.positions = wide_.back().size();
        plan.wide = true;
      }
      plan.batch = plan.positions;
      if (!fields[2].is_none()) {
        offsets_.push_back(take<Vector<const std::int64_t>>(fields[2], {"feature", f, ", offsets"},
                                                            "None or a contiguous int64 array [batch + 1]"));
        if (offsets_.back().size() == 0) Where{"feature", f, ", offsets"}.fail("must have batch + 1 entries");
        plan.offsets = offsets_.back().data();
        plan.batch = offsets_.back().size() - 1;
      }
      const std::size_t pooling = take_size(fields[3], {"feature", f, ", pooling"});
      if (pooling > static_cast<std::size_t>(persia::Pooling::sequence)) {
        Where{"feature", f, ", pooling"}.fail("is unknown");
      }
      plan.pooling = static_cast<persia::Pooling>(pooling);
      if (!fields[4].is_none()) {
        plan.max_length = take_size(fields[4], {"feature", f, ", max_length"});
        if (plan.max_length == 0) Where{"feature", f, ", max_length"}.fail("must be >= 1 or None");
      } else if (plan.pooling == persia::Pooling::sequence) {
        Where{"feature", f, ", max_length"}.fail("an un-pooled sequence needs one");
      }
      plans_.push_back(plan);
    }
  }

  std::size_t size() const { return plans_.size(); }
  const persia::FeaturePlan& operator[](std::size_t f) const { return plans_[f]; }
  std::vector<std::size_t> tables;

 private:
  std::vector<persia::FeaturePlan> plans_;
  std::vector<Vector<const std::uint16_t>> narrow_;
  std::vector<Vector<const std::uint32_t>> wide_;
  std::vector<Vector<const std::int64_t>> offsets_;
};

// float32 [batch, dim], or [batch, max_length, dim] for a sequence; only the last axis must be dense.
template <class T>
Strided<T> take_values(nb::handle object, const persia::FeaturePlan& plan, std::size_t dim, const Where& where) {
  auto array = take<Strided<T>>(object, where, "a float32 array, writable if it is an output");
  const bool sequence = plan.pooling == persia::Pooling::sequence;
  const std::size_t ndim = sequence ? 3 : 2;
  if (array.ndim() != ndim || array.shape(0) != plan.batch || array.shape(ndim - 1) != dim ||
      (sequence && array.shape(1) != plan.max_length)) {
    where.fail(sequence ? "must have the shape [batch, max_length, dim] of its feature"
                        : "must have the shape [batch, dim] of its feature");
  }
  // Strides of an array without items say nothing.
  if (dim > 1 && array.size() != 0 && array.stride(ndim - 1) != 1) where.fail("must be contiguous along its last axis");
  return array;
}

void pool_forward(nb::list rows, nb::list plan_list, nb::list outputs, nb::list masks, ThreadPool& pool) {
  std::vector<Matrix<const float>> tables;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    tables.push_back(
        take<Matrix<const float>>(rows[t], {"table", t, ", rows"}, "a contiguous float32 array [rows, dim]"));
  }
  const Plans plans(plan_list);
  if (outputs.size() != plans.size() || masks.size() != plans.size()) {
    throw nb::value_error("outputs and masks: there must be one per feature");
  }
  std::vector<Strided<float>> held;
  std::vector<Strided<bool>> held_masks;
  std::vector<persia::PoolFeature> features(plans.size());
  for (std::size_t f = 0; f < plans.size(); ++f) {
    auto& feature = features[f];
    feature.plan = plans[f];
    if (plans.tables[f] >= tables.size()) Where{"feature", f, ", table"}.fail("there is no such table");
    const auto& table = tables[plans.tables[f]];
    feature.table = {table.data(), table.shape(0), table.shape(1)};
    held.push_back(take_values<float>(outputs[f], feature.plan, feature.table.dim, {"feature", f, ", output"}));
    feature.out = held.back().data();
    feature.sample_stride = held.back().stride(0);
    if (feature.plan.pooling != persia::Pooling::sequence) continue;
    feature.position_stride = held.back().stride(1);
    const Where where{"feature", f, ", mask"};
    held_masks.push_back(take<Strided<bool>>(masks[f], where, "a writable bool array"));
    const auto& mask = held_masks.back();
    if (mask.ndim() != 2 || mask.shape(0) != feature.plan.batch || mask.shape(1) != feature.plan.max_length ||
        (mask.shape(1) > 1 && mask.size() != 0 && mask.stride(1) != 1)) {
      where.fail("must have the shape [batch, max_length], contiguous along the last axis");
    }
    feature.mask = reinterpret_cast<std::uint8_t*>(mask.data());
    feature.mask_stride = mask.stride(0);
  }
  const nb::gil_scoped_release release;
  persia::pool_forward(features, pool);
}

void pool_backward(nb::list plan_list, nb::list gradients, nb::list outputs, ThreadPool& pool, Arena& arena) {
  std::vector<Matrix<float>> held_out;
  std::vector<persia::GradientTable> tables(outputs.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    held_out.push_back(
        take<Matrix<float>>(outputs[t], {"table", t, ", gradient"}, "a contiguous writable float32 array [rows, dim]"));
    tables[t].out = held_out.back().data();
    tables[t].count = held_out.back().shape(0);
    tables[t].dim = held_out.back().shape(1);
  }
  const Plans plans(plan_list);
  if (gradients.size() != plans.size()) throw nb::value_error("gradients: there must be one per feature (or None)");
  std::vector<Strided<const float>> held;
  for (std::size_t f = 0; f < plans.size(); ++f) {
    if (plans.tables[f] >= tables.size()) Where{"feature", f, ", table"}.fail("there is no such table");
    auto& table = tables[plans.tables[f]];
    persia::GradientFeature feature;
    feature.plan = plans[f];
    feature.name = f;
    if (!gradients[f].is_none()) {
      held.push_back(take_values<const float>(gradients[f], feature.plan, table.dim, {"feature", f, ", gradient"}));
      feature.gradient = held.back().data();
      feature.sample_stride = held.back().stride(0);
      if (feature.plan.pooling == persia::Pooling::sequence) feature.position_stride = held.back().stride(1);
    }
    table.features.push_back(feature);
  }
  const nb::gil_scoped_release release;
  persia::pool_backward(tables, pool, arena);
}

template <class Offset>
void hash_strings(Vector<const std::uint8_t> data, Vector<const Offset> offsets, nb::object validity,
                  std::size_t validity_start, std::uint64_t seed, std::uint64_t null, Vector<std::uint64_t> out,
                  ThreadPool& pool) {
  if (offsets.size() != out.size() + 1) throw nb::value_error("offsets: there must be one more than strings");
  persia::Strings strings;
  strings.data = {data.data(), data.size()};
  Vector<const std::uint8_t> bitmap;
  if (!validity.is_none()) {
    if (!nb::try_cast(validity, bitmap, false)) throw nb::value_error("validity: must be a contiguous uint8 array");
    if (validity_start > bitmap.size() * 8 || out.size() > bitmap.size() * 8 - validity_start) {
      throw nb::value_error("validity: must have one bit per string");
    }
    strings.validity = bitmap.data();
    strings.validity_start = validity_start;
  }
  const nb::gil_scoped_release release;
  persia::hash_strings(strings, std::span<const Offset>(offsets.data(), offsets.size()), seed, null,
                       {out.data(), out.size()}, pool);
}

template <class T>
void hash_values(Vector<const T> values, bool floating, std::uint64_t seed, Vector<std::uint64_t> out,
                 ThreadPool& pool) {
  if (values.size() != out.size()) throw nb::value_error("out: must have one entry per value");
  const nb::gil_scoped_release release;
  persia::hash_values(values.data(), sizeof(T), floating ? persia::ValueKind::floating : persia::ValueKind::integer,
                      seed, {out.data(), out.size()}, pool);
}

void hash_cross(nb::list columns, std::uint64_t seed, Vector<std::uint64_t> out, ThreadPool& pool) {
  std::vector<Vector<const std::uint64_t>> held;
  std::vector<const std::uint64_t*> pointers;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    held.push_back(take<Vector<const std::uint64_t>>(columns[c], {"column", c}, "a contiguous uint64 array [n]"));
    if (held.back().size() != out.size()) Where{"column", c}.fail("must be as long as the first");
    pointers.push_back(held.back().data());
  }
  const nb::gil_scoped_release release;
  persia::hash_cross(pointers, seed, {out.data(), out.size()}, pool);
}

}  // namespace

void register_batch(nb::module_& parent) {
  using nb::arg;
  nb::module_ m = parent.def_submodule("batch", "The batch path; use persia.batching, which checks and documents.");
  nb::class_<Arena>(m, "Scratch", "Memory that calls borrow and give back. Thread-safe.").def(nb::init<>());
  m.def("sizes", &sizes, arg("groups"));
  m.def("unique", &unique, arg("groups"), arg("ids").noconvert(), arg("inverse").noconvert(), arg("pool"),
        arg("scratch"));
  m.def("pool_forward", &pool_forward, arg("rows"), arg("plans"), arg("outputs"), arg("masks"), arg("pool"));
  m.def("pool_backward", &pool_backward, arg("plans"), arg("gradients"), arg("outputs"), arg("pool"), arg("scratch"));
  const auto strings = [&]<class Offset>(Offset) {
    m.def("hash_strings", &hash_strings<Offset>, arg("data").noconvert(), arg("offsets").noconvert(),
          arg("validity").none(), arg("validity_start"), arg("seed"), arg("null"), arg("out").noconvert(), arg("pool"));
  };
  strings(std::int32_t{});
  strings(std::int64_t{});
  const auto values = [&]<class T>(T) {
    m.def("hash_values", &hash_values<T>, arg("values").noconvert(), arg("floating"), arg("seed"),
          arg("out").noconvert(), arg("pool"));
  };
  values(std::uint8_t{});
  values(std::uint16_t{});
  values(std::uint32_t{});
  values(std::uint64_t{});
  m.def("hash_cross", &hash_cross, arg("columns"), arg("seed"), arg("out").noconvert(), arg("pool"));
}
