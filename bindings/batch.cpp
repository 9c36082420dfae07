// `persia._core.batch`: turns lists of arrays into the records of persia/batch.hpp, codec.hpp, hash.hpp,
// texts.hpp, times.hpp and words.hpp.
//
// Arrays are never converted or copied: an unsuitable one is a ValueError that names it. Every array is held for the
// duration of the call, and the GIL is released while the core works.
#include "persia/batch.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "module.hpp"
#include "persia/codec.hpp"
#include "persia/half.hpp"
#include "persia/hash.hpp"
#include "persia/mix.hpp"
#include "persia/texts.hpp"
#include "persia/times.hpp"
#include "persia/words.hpp"

namespace nb = nanobind;

namespace {

using bindings::Buffer;
using bindings::take;
using bindings::take_dense;
using bindings::take_list;
using bindings::take_size;
using bindings::Where;
using persia::Arena;
using persia::ThreadPool;

nb::list unique(nb::list groups, nb::handle ids_out, nb::handle inverse_out, ThreadPool& pool, Arena& arena) {
  const Buffer ids = take_dense<std::uint64_t>(ids_out, 1, {"output", 0}, "a contiguous uint64 array [n]");
  const Buffer inverse = take_dense<std::uint32_t>(inverse_out, 1, {"output", 1}, "a contiguous uint32 array [n]");
  if (inverse.size() != ids.size()) throw nb::value_error("ids, inverse: must have one entry per id");
  std::vector<Buffer> held;
  std::vector<persia::UniqueGroup> records(groups.size());
  std::size_t total = 0;
  for (std::size_t g = 0; g < records.size(); ++g) {
    records[g].ids = ids.data<std::uint64_t>() + total;
    records[g].inverse = inverse.data<std::uint32_t>() + total;
    for (nb::handle feature : take_list(groups[g], {"group", g})) {
      held.push_back(take_dense<const std::uint64_t>(feature, 1, {"group", g}, "contiguous uint64 arrays [n]"));
      const auto& array = held.back();
      if (array.size() > ids.size() - total) throw nb::value_error("ids: too small");
      records[g].features.push_back(array.span<const std::uint64_t>());
      total += array.size();
    }
  }
  if (ids.size() != total) throw nb::value_error("ids, inverse: must have one entry per id");
  {
    const nb::gil_scoped_release release;
    persia::unique(records, pool, arena);
  }
  nb::list counts;
  for (const auto& group : records) counts.append(group.count);
  return counts;
}

// Groups are (table name, ids, [inverse, ...]); `bounds` is int64 [groups, servers + 1].
void group_by_owner(nb::list groups, nb::handle owners_in, nb::handle bounds_out, ThreadPool& pool, Arena& arena) {
  const Buffer owners =
      take_dense<const std::uint16_t>(owners_in, 1, {"argument", 1}, "a contiguous uint16 array [buckets]");
  const Buffer bounds =
      take_dense<std::int64_t>(bounds_out, 2, {"output", 0}, "a contiguous int64 array [groups, servers + 1]");
  if (bounds.shape(0) != groups.size() || bounds.shape(1) < 2 || bounds.shape(1) > persia::kBuckets + 1) {
    throw nb::value_error("bounds: must have the shape [groups, servers + 1]");
  }
  std::vector<Buffer> held;
  std::vector<persia::OwnerGroup> records(groups.size());
  for (std::size_t g = 0; g < records.size(); ++g) {
    nb::tuple fields;
    std::string name;
    if (!nb::try_cast(groups[g], fields, false) || fields.size() != 3 || !nb::try_cast(fields[0], name, false)) {
      Where{"group", g}.fail("must be (name, ids, inverses)");
    }
    auto& record = records[g];
    record.name_hash = persia::xxh64(name.data(), name.size(), 0);
    record.bounds = bounds.data<std::int64_t>() + g * bounds.shape(1);
    held.push_back(take_dense<std::uint64_t>(fields[1], 1, {"group", g}, "writable contiguous uint64 ids [n]"));
    record.ids = held.back().span<std::uint64_t>();
    for (nb::handle inverse : take_list(fields[2], {"group", g})) {
      Buffer entries;
      if (!entries.open(inverse, "HI", true) || entries.ndim() != 1 || !entries.contiguous()) {
        Where{"group", g, ", inverse"}.fail("must be a writable contiguous uint16 or uint32 array [n]");
      }
      record.inverses.push_back({entries.data<void>(), entries.size(), entries.itemsize() == sizeof(std::uint32_t)});
      held.push_back(std::move(entries));
    }
  }
  const persia::BucketOwners of{owners.span<const std::uint16_t>(), static_cast<std::uint32_t>(bounds.shape(1) - 1)};
  const nb::gil_scoped_release release;
  persia::group_by_owner(records, of, pool, arena);
}

void buckets_of(const std::string& table, nb::handle ids_in, nb::handle buckets_out) {
  const Buffer ids = take_dense<const std::uint64_t>(ids_in, 1, {"argument", 1}, "a contiguous uint64 array [n]");
  const Buffer buckets = take_dense<std::uint16_t>(buckets_out, 1, {"output", 0}, "a contiguous uint16 array [n]");
  const nb::gil_scoped_release release;
  persia::buckets_of(persia::xxh64(table.data(), table.size(), 0), ids.span<const std::uint64_t>(),
                     buckets.span<std::uint16_t>());
}

// The plans of a call, with the arrays they point into.
class Plans {
 public:
  explicit Plans(nb::list plans) {
    for (std::size_t f = 0; f < plans.size(); ++f) {
      nb::tuple fields;
      if (!nb::try_cast(plans[f], fields, false) || fields.size() != 6) {
        Where{"feature", f}.fail("must be (table, inverse, offsets, pooling, max_length, weights)");
      }
      persia::FeaturePlan plan;
      tables.push_back(take_size(fields[0], {"feature", f, ", table"}));
      Buffer inverse;
      if (!inverse.open(fields[1], "HI", false) || inverse.ndim() != 1 || !inverse.contiguous()) {
        Where{"feature", f, ", inverse"}.fail("must be a contiguous uint16 or uint32 array [n]");
      }
      plan.inverse = inverse.data<const void>();
      plan.positions = inverse.size();
      plan.wide = inverse.itemsize() == sizeof(std::uint32_t);
      plan.batch = plan.positions;
      held_.push_back(std::move(inverse));
      if (!fields[2].is_none()) {
        held_.push_back(take_dense<const std::int64_t>(fields[2], 1, {"feature", f, ", offsets"},
                                                       "None or a contiguous int64 array [batch + 1]"));
        if (held_.back().size() == 0) Where{"feature", f, ", offsets"}.fail("must have batch + 1 entries");
        plan.offsets = held_.back().data<const std::int64_t>();
        plan.batch = held_.back().size() - 1;
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
      if (!fields[5].is_none()) {
        const Where where{"feature", f, ", weights"};
        held_.push_back(take_dense<const float>(fields[5], 1, where, "None or a contiguous float32 array [n]"));
        if (held_.back().size() != plan.positions) where.fail("must have one entry per value");
        plan.weights = held_.back().data<const float>();
      }
      plans_.push_back(plan);
    }
  }

  std::size_t size() const { return plans_.size(); }
  const persia::FeaturePlan& operator[](std::size_t f) const { return plans_[f]; }
  std::vector<std::size_t> tables;

 private:
  std::vector<persia::FeaturePlan> plans_;
  std::vector<Buffer> held_;
};

// float32 [batch, dim], or [batch, max_length, dim] for a sequence; only the last axis must be dense.
template <class T>
Buffer take_values(nb::handle object, const persia::FeaturePlan& plan, std::size_t dim, const Where& where) {
  Buffer array = take<T>(object, where, "a float32 array, writable if it is an output");
  const bool sequence = plan.pooling == persia::Pooling::sequence;
  const std::size_t ndim = sequence ? 3 : 2;
  if (array.ndim() != ndim || array.shape(0) != plan.batch || array.shape(ndim - 1) != dim ||
      (sequence && array.shape(1) != plan.max_length)) {
    where.fail(sequence ? "must have the shape [batch, max_length, dim] of its feature"
                        : "must have the shape [batch, dim] of its feature");
  }
  // The strides of an empty array have no meaning.
  if (dim > 1 && array.size() != 0 && array.stride(ndim - 1) != 1) where.fail("must be contiguous along its last axis");
  return array;
}

void pool_forward(nb::list rows, nb::list plan_list, nb::list outputs, nb::list masks, ThreadPool& pool) {
  std::vector<Buffer> tables;
  for (std::size_t t = 0; t < rows.size(); ++t) {
    tables.push_back(
        take_dense<const float>(rows[t], 2, {"table", t, ", rows"}, "a contiguous float32 array [rows, dim]"));
  }
  const Plans plans(plan_list);
  if (outputs.size() != plans.size() || masks.size() != plans.size()) {
    throw nb::value_error("outputs and masks: there must be one per feature");
  }
  std::vector<Buffer> held;
  std::vector<persia::PoolFeature> features(plans.size());
  for (std::size_t f = 0; f < plans.size(); ++f) {
    auto& feature = features[f];
    feature.plan = plans[f];
    if (plans.tables[f] >= tables.size()) Where{"feature", f, ", table"}.fail("there is no such table");
    const auto& table = tables[plans.tables[f]];
    feature.table = {table.data<const float>(), table.shape(0), table.shape(1)};
    held.push_back(take_values<float>(outputs[f], feature.plan, feature.table.dim, {"feature", f, ", output"}));
    feature.out = held.back().data<float>();
    feature.sample_stride = held.back().stride(0);
    if (feature.plan.pooling != persia::Pooling::sequence) continue;
    feature.position_stride = held.back().stride(1);
    const Where where{"feature", f, ", mask"};
    held.push_back(take<bool>(masks[f], where, "a writable bool array"));
    const auto& mask = held.back();
    if (mask.ndim() != 2 || mask.shape(0) != feature.plan.batch || mask.shape(1) != feature.plan.max_length ||
        (mask.shape(1) > 1 && mask.size() != 0 && mask.stride(1) != 1)) {
      where.fail("must have the shape [batch, max_length], contiguous along the last axis");
    }
    feature.mask = mask.data<std::uint8_t>();
    feature.mask_stride = mask.stride(0);
  }
  const nb::gil_scoped_release release;
  persia::pool_forward(features, pool);
}

void pool_backward(nb::list plan_list, nb::list gradients, nb::list outputs, ThreadPool& pool, Arena& arena) {
  std::vector<Buffer> held_out;
  std::vector<persia::GradientTable> tables(outputs.size());
  for (std::size_t t = 0; t < tables.size(); ++t) {
    held_out.push_back(take_dense<float>(outputs[t], 2, {"table", t, ", gradient"},
                                         "a contiguous writable float32 array [rows, dim]"));
    tables[t].out = held_out.back().data<float>();
    tables[t].count = held_out.back().shape(0);
    tables[t].dim = held_out.back().shape(1);
  }
  const Plans plans(plan_list);
  if (gradients.size() != plans.size()) throw nb::value_error("gradients: there must be one per feature (or None)");
  std::vector<Buffer> held;
  for (std::size_t f = 0; f < plans.size(); ++f) {
    if (plans.tables[f] >= tables.size()) Where{"feature", f, ", table"}.fail("there is no such table");
    auto& table = tables[plans.tables[f]];
    persia::GradientFeature feature;
    feature.plan = plans[f];
    feature.name = f;
    if (!gradients[f].is_none()) {
      held.push_back(take_values<const float>(gradients[f], feature.plan, table.dim, {"feature", f, ", gradient"}));
      feature.gradient = held.back().data<const float>();
      feature.sample_stride = held.back().stride(0);
      if (feature.plan.pooling == persia::Pooling::sequence) feature.position_stride = held.back().stride(1);
    }
    table.features.push_back(feature);
  }
  const nb::gil_scoped_release release;
  persia::pool_backward(tables, pool, arena);
}

// `count` texts of an Arrow array, held while the core reads them.
struct TextBuffers {
  TextBuffers(nb::handle data, nb::handle ends, nb::handle validity, std::size_t validity_start, std::size_t count)
      : bytes(take_dense<const std::uint8_t>(data, 1, {"argument", 0}, "a contiguous uint8 array")) {
    if (!offsets.open(ends, "ilq", false) || offsets.ndim() != 1 || !offsets.contiguous()) {
      throw nb::value_error("offsets: must be a contiguous int32 or int64 array [n + 1]");
    }
    if (offsets.size() != count + 1) throw nb::value_error("offsets: there must be one more than texts");
    texts.data = bytes.span<const std::uint8_t>();
    if (validity.is_none()) return;
    if (!bitmap.open(validity, "B", false) || bitmap.ndim() != 1 || !bitmap.contiguous()) {
      throw nb::value_error("validity: must be a contiguous uint8 array");
    }
    if (validity_start > bitmap.size() * 8 || count > bitmap.size() * 8 - validity_start) {
      throw nb::value_error("validity: must have one bit per text");
    }
    texts.validity = bitmap.data<const std::uint8_t>();
    texts.validity_start = validity_start;
  }

  Buffer bytes;
  Buffer offsets;
  Buffer bitmap;
  persia::Texts texts;
};

std::int64_t text_ids(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                      std::uint8_t kind, nb::handle out, nb::handle present) {
  const Buffer ids = take_dense<std::uint64_t>(out, 1, {"output", 0}, "a contiguous uint64 array [n]");
  const Buffer flags = take_dense<std::uint8_t>(present, 1, {"output", 1}, "a contiguous uint8 array [n]");
  if (flags.size() != ids.size()) throw nb::value_error("present: must have one entry per text");
  const TextBuffers taken(data, offsets, validity, validity_start, ids.size());
  const auto as = static_cast<persia::IdKind>(kind);
  const nb::gil_scoped_release release;
  if (taken.offsets.itemsize() == sizeof(std::int32_t)) {
    return persia::text_ids(taken.texts, taken.offsets.span<const std::int32_t>(), as, ids.span<std::uint64_t>(),
                            flags.span<std::uint8_t>());
  }
  return persia::text_ids(taken.texts, taken.offsets.span<const std::int64_t>(), as, ids.span<std::uint64_t>(),
                          flags.span<std::uint8_t>());
}

std::int64_t text_numbers(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                          nb::handle out, nb::handle present) {
  const Buffer numbers = take_dense<double>(out, 1, {"output", 0}, "a contiguous float64 array [n]");
  const Buffer flags = take_dense<std::uint8_t>(present, 1, {"output", 1}, "a contiguous uint8 array [n]");
  if (flags.size() != numbers.size()) throw nb::value_error("present: must have one entry per text");
  const TextBuffers taken(data, offsets, validity, validity_start, numbers.size());
  const nb::gil_scoped_release release;
  if (taken.offsets.itemsize() == sizeof(std::int32_t)) {
    return persia::text_numbers(taken.texts, taken.offsets.span<const std::int32_t>(), numbers.span<double>(),
                                flags.span<std::uint8_t>());
  }
  return persia::text_numbers(taken.texts, taken.offsets.span<const std::int64_t>(), numbers.span<double>(),
                              flags.span<std::uint8_t>());
}

std::int64_t text_times(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                        std::int64_t per_second, nb::handle out, nb::handle present) {
  const Buffer times = take_dense<std::int64_t>(out, 1, {"output", 0}, "a contiguous int64 array [n]");
  const Buffer flags = take_dense<std::uint8_t>(present, 1, {"output", 1}, "a contiguous uint8 array [n]");
  if (flags.size() != times.size()) throw nb::value_error("present: must have one entry per text");
  const TextBuffers taken(data, offsets, validity, validity_start, times.size());
  const nb::gil_scoped_release release;
  if (taken.offsets.itemsize() == sizeof(std::int32_t)) {
    return persia::text_times(taken.texts, taken.offsets.span<const std::int32_t>(), per_second,
                              times.span<std::int64_t>(), flags.span<std::uint8_t>());
  }
  return persia::text_times(taken.texts, taken.offsets.span<const std::int64_t>(), per_second,
                            times.span<std::int64_t>(), flags.span<std::uint8_t>());
}

nb::bytes non_ascii_texts(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                          std::size_t count) {
  const TextBuffers taken(data, offsets, validity, validity_start, count);
  std::string joined;
  {
    const nb::gil_scoped_release release;
    joined = taken.offsets.itemsize() == sizeof(std::int32_t)
                 ? persia::non_ascii_texts(taken.texts, taken.offsets.span<const std::int32_t>())
                 : persia::non_ascii_texts(taken.texts, taken.offsets.span<const std::int64_t>());
  }
  return nb::bytes(joined.data(), joined.size());
}

template <class T>
nb::object as_array(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

nb::tuple text_words(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                     std::size_t count, nb::bytes lengths, bool lower, nb::bytes lowered) {
  const TextBuffers taken(data, offsets, validity, validity_start, count);
  const std::span<const std::uint8_t> sizes(static_cast<const std::uint8_t*>(lengths.data()), lengths.size());
  const std::string_view lower_texts(static_cast<const char*>(lowered.data()), lowered.size());
  persia::Words words;
  {
    const nb::gil_scoped_release release;
    words = taken.offsets.itemsize() == sizeof(std::int32_t)
                ? persia::text_words(taken.texts, taken.offsets.span<const std::int32_t>(), sizes, lower, lower_texts)
                : persia::text_words(taken.texts, taken.offsets.span<const std::int64_t>(), sizes, lower, lower_texts);
  }
  return nb::make_tuple(as_array(std::move(words.ids)), as_array(std::move(words.offsets)));
}

nb::tuple split_ids(nb::handle data, nb::handle offsets, nb::handle validity, std::size_t validity_start,
                    std::size_t count, std::uint8_t kind, const std::string& separator) {
  const TextBuffers taken(data, offsets, validity, validity_start, count);
  const auto as = static_cast<persia::IdKind>(kind);
  persia::SplitIds found;
  {
    const nb::gil_scoped_release release;
    found = taken.offsets.itemsize() == sizeof(std::int32_t)
                ? persia::split_ids(taken.texts, taken.offsets.span<const std::int32_t>(), as, separator)
                : persia::split_ids(taken.texts, taken.offsets.span<const std::int64_t>(), as, separator);
  }
  return nb::make_tuple(as_array(std::move(found.ids)), as_array(std::move(found.offsets)), found.bad);
}

void decimal_doubles(nb::handle floats, nb::handle out) {
  const Buffer values = take_dense<const float>(floats, 1, {"argument", 0}, "a contiguous float32 array [n]");
  const Buffer doubles = take_dense<double>(out, 1, {"output", 0}, "a contiguous float64 array [n]");
  if (doubles.size() != values.size()) throw nb::value_error("out: must have one entry per float");
  const nb::gil_scoped_release release;
  persia::decimal_doubles(values.span<const float>(), doubles.span<double>());
}

void hash_cross(nb::list columns, std::uint64_t seed, nb::handle out, ThreadPool& pool) {
  const Buffer hashes = take_dense<std::uint64_t>(out, 1, {"output", 0}, "a contiguous uint64 array [n]");
  std::vector<Buffer> held;
  std::vector<const std::uint64_t*> pointers;
  for (std::size_t c = 0; c < columns.size(); ++c) {
    held.push_back(take_dense<const std::uint64_t>(columns[c], 1, {"column", c}, "a contiguous uint64 array [n]"));
    if (held.back().size() != hashes.size()) Where{"column", c}.fail("must be as long as the first");
    pointers.push_back(held.back().data<const std::uint64_t>());
  }
  const nb::gil_scoped_release release;
  persia::hash_cross(pointers, seed, hashes.span<std::uint64_t>(), pool);
}

// float16 values are passed as their bits, since C++20 has no such type.
Buffer take_halves(nb::handle object, bool writable) {
  Buffer halves;
  if (!halves.open(object, "e", writable) || halves.ndim() != 2 || !halves.contiguous()) {
    throw nb::value_error("halves: must be a contiguous float16 array [n, dim]");
  }
  return halves;
}

void check_codec(const Buffer& rows, const Buffer& halves, const Buffer& scales) {
  if (rows.shape(0) != halves.shape(0) || rows.shape(1) != halves.shape(1) || scales.size() != rows.shape(0)) {
    throw nb::value_error("rows, halves, scales: must be [n, dim], [n, dim] and [n]");
  }
}

void encode_fp16(nb::handle rows_in, nb::handle halves_out, nb::handle scales_out) {
  const Buffer rows = take_dense<const float>(rows_in, 2, {"argument", 0}, "a contiguous float32 array [n, dim]");
  const Buffer halves = take_halves(halves_out, true);
  const Buffer scales = take_dense<float>(scales_out, 1, {"output", 1}, "a contiguous float32 array [n]");
  check_codec(rows, halves, scales);
  const nb::gil_scoped_release release;
  persia::encode_fp16(rows.data<const float>(), rows.shape(0), rows.shape(1), halves.data<std::uint16_t>(),
                      scales.data<float>());
}

void decode_fp16(nb::handle halves_in, nb::handle scales_in, nb::handle rows_out) {
  const Buffer halves = take_halves(halves_in, false);
  const Buffer scales = take_dense<const float>(scales_in, 1, {"argument", 1}, "a contiguous float32 array [n]");
  const Buffer rows = take_dense<float>(rows_out, 2, {"output", 0}, "a contiguous float32 array [n, dim]");
  check_codec(rows, halves, scales);
  const nb::gil_scoped_release release;
  persia::decode_fp16(halves.data<const std::uint16_t>(), scales.data<const float>(), rows.shape(0), rows.shape(1),
                      rows.data<float>());
}

// Rows of 16-bit values as stored, in items of 2 or 4 bytes, to float32.
void widen_rows(nb::handle stored_in, nb::handle rows_out, const std::string& dtype) {
  Buffer stored;
  if (!stored.open(stored_in, "fe", false) || stored.ndim() != 2 || !stored.contiguous()) {
    throw nb::value_error("stored: must be a contiguous float32 or float16 array [n, width]");
  }
  const Buffer rows = take_dense<float>(rows_out, 2, {"output", 0}, "a contiguous float32 array [n, dim]");
  const persia::ValueCodec codec(persia::dtype_of(dtype));
  const std::size_t count = rows.shape(0), dim = rows.shape(1), bytes = codec.words(dim) * sizeof(float);
  if (stored.shape(0) != count || stored.shape(1) * stored.itemsize() != bytes) {
    throw nb::value_error("stored: must have as many rows as the output, of as many values");
  }
  const nb::gil_scoped_release release;
  const auto* from = stored.data<const std::byte>();
  // Without padding, all rows are one.
  const bool whole = codec.words(dim) * 2 == dim;
  const std::size_t pieces = whole ? 1 : count, size = whole ? count * dim : dim;
  for (std::size_t i = 0; i < pieces; ++i) codec.load(from + i * bytes, rows.data<float>() + i * dim, size);
}

// A borrowed array. Its memory returns to the scratch with the last reference to the array.
nb::object floats(nb::object scratch, std::size_t count) {
  struct Loan {
    nb::object scratch;  // outlives the lease, which is destroyed first
    Arena::Lease lease;
  };
  auto* loan = new Loan{scratch, {nb::cast<Arena&>(scratch), count * sizeof(float)}};
  const nb::capsule owner(loan, [](void* p) noexcept { delete static_cast<Loan*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<1>>(loan->lease.as<float>(), {count}, owner));
}

}  // namespace

void register_batch(nb::module_& parent) {
  using nb::arg;
  nb::module_ m = parent.def_submodule("batch", "The batch path; use persia.batching, which checks and documents.");
  nb::class_<Arena>(m, "Scratch", "Memory that calls borrow and give back. Thread-safe.")
      .def(nb::init<>())
      .def("floats", &floats, arg("count"));
  m.def("unique", &unique, arg("groups"), arg("ids"), arg("inverse"), arg("pool"), arg("scratch"));
  m.def("group_by_owner", &group_by_owner, arg("groups"), arg("owners"), arg("bounds"), arg("pool"), arg("scratch"));
  m.def("buckets_of", &buckets_of, arg("table"), arg("ids"), arg("buckets"));
  m.def("pool_forward", &pool_forward, arg("rows"), arg("plans"), arg("outputs"), arg("masks"), arg("pool"));
  m.def("pool_backward", &pool_backward, arg("plans"), arg("gradients"), arg("outputs"), arg("pool"), arg("scratch"));
  m.def("encode_fp16", &encode_fp16, arg("rows"), arg("halves"), arg("scales"));
  m.def("decode_fp16", &decode_fp16, arg("halves"), arg("scales"), arg("rows"));
  m.def("widen_rows", &widen_rows, arg("stored"), arg("rows"), arg("dtype"));
  m.def("text_ids", &text_ids, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"), arg("kind"),
        arg("out"), arg("present"));
  m.def("text_numbers", &text_numbers, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"),
        arg("out"), arg("present"));
  m.def("text_times", &text_times, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"),
        arg("per_second"), arg("out"), arg("present"));
  m.def("non_ascii_texts", &non_ascii_texts, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"),
        arg("count"));
  m.def("text_words", &text_words, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"),
        arg("count"), arg("lengths"), arg("lower"), arg("lowered"));
  m.def("split_ids", &split_ids, arg("data"), arg("offsets"), arg("validity").none(), arg("validity_start"),
        arg("count"), arg("kind"), arg("separator"));
  m.def("decimal_doubles", &decimal_doubles, arg("floats"), arg("out"));
  m.def("hash_cross", &hash_cross, arg("columns"), arg("seed"), arg("out"), arg("pool"));
}
