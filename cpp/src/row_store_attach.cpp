// How a shard gets its region: creates one, or attaches to the one that another process has left.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "persia/index.hpp"
#include "persia/memory.hpp"
#include "persia/mix.hpp"
#include "persia/row_store.hpp"

namespace persia {
namespace {

constexpr std::size_t kPage = 4096;  // the smallest that a file has memory in

std::size_t stride_of(const TableConfig& config, const Optimizer& optimizer) {
  const std::size_t words =
      words_of(config.dtype, config.dim) + words_of(state_dtype(config), optimizer.state_width(config.dim));
  return sizeof(RowHeader) + sizeof(float) * words;
}

// Of the rows in memory.
std::uint64_t capacity_of(const TableConfig& config, std::uint32_t shard) {
  const std::uint64_t total = total_of(config, shard);
  const std::uint64_t rows = config.tiered() ? share_of(config.tier.memory_rows, config.shards, shard) : total;
  // Of the records on disk, half may be dead.
  if ((config.tiered() ? rows + 2 * total : rows) > kMaxRows)
    throw std::invalid_argument("a shard holds at most " + std::to_string(kMaxRows) +
                                " rows, or half as many where some are on disk: use more shards");
  return rows;
}

std::uint64_t sketch_width_of(const TableConfig& config, std::uint64_t capacity) {
  if (config.admission == Admission::kAll) return 0;
  return std::clamp<std::uint64_t>(std::bit_ceil(capacity), 1u << 10, 1u << 20);
}

std::uint64_t hash_bytes(const void* bytes, std::size_t count, std::uint64_t seed) {
  std::uint64_t hash = mix64(seed + count);
  for (std::size_t i = 0; i < count; ++i) hash = mix64(hash ^ static_cast<const unsigned char*>(bytes)[i]);
  return hash;
}

template <class... Values>
std::uint64_t hash_of(const Values&... values) {
  std::uint64_t hash = 0;
  ((hash = hash_bytes(&values, sizeof(values), hash)), ...);
  return hash;
}

std::uint64_t check_of(const Header& h) {
  constexpr std::size_t first = offsetof(Header, format);
  return hash_bytes(reinterpret_cast<const std::byte*>(&h) + first, offsetof(Header, check) - first, kMagic);
}

// What a region of this table has in its header for good.
Header identity_of(const TableConfig& c, const Optimizer& optimizer, std::uint32_t shard) {
  Header h{};
  h.magic = kMagic;
  h.format = kFormat;
  h.durable = c.durable || !c.files.path.empty() || c.tiered();
  h.name_hash = hash_name(c.name);
  std::memcpy(h.name, c.name.data(), std::min(c.name.size(), kNameBytes));
  h.dim = static_cast<std::uint32_t>(c.dim);
  h.optimizer = static_cast<std::uint32_t>(c.optimizer.kind);
  h.state_width = static_cast<std::uint32_t>(optimizer.state_width(c.dim));
  h.row_stride = static_cast<std::uint32_t>(stride_of(c, optimizer));
  h.capacity = capacity_of(c, shard);
  h.seed = c.seed;
  h.shard = shard;
  h.shards = c.shards;
  h.sketch_width = sketch_width_of(c, total_of(c, shard));
  const auto& o = c.optimizer;
  h.settings = hash_of(o.momentum, o.weight_decay, o.initial_accumulator, o.eps, o.beta1, o.beta2, o.beta, o.l1, o.l2,
                       o.bound, c.initializer.kind, c.initializer.a, c.initializer.b, c.admission, c.admission_value);
  // Regions of float32 tables are as they were before there were others.
  if (c.dtype != Dtype::kFloat32) h.settings = hash_of(h.settings, c.dtype);
  if (c.tiered()) h.settings = hash_of(h.settings, total_of(c, shard));
  // Regions of tables without these are as they were before there were any.
  if (o.clip_row_norm != 0.0f || o.decoupled_weight_decay != 0.0f)
    h.settings = hash_of(h.settings, o.clip_row_norm, o.decoupled_weight_decay);
  h.check = check_of(h);
  return h;
}

std::string name_in(const Header& h) { return {h.name, strnlen(h.name, kNameBytes)}; }

}  // namespace

RowStore::RowStore(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard)
    : config_(&config),
      optimizer_(&optimizer),
      values_(config.dtype),
      states_(state_dtype(config)),
      shard_(shard),
      tiered_(config.tiered()),
      dim_(config.dim),
      words_(values_.words(config.dim)),
      stride_(stride_of(config, optimizer)) {
  if (values_.narrow()) scratch_.resize(dim_ + optimizer.state_width(dim_));
  open_region();
  header_ = reinterpret_cast<Header*>(region_.base());
  rows_ = section(layout_.rows);
  if (config.files.attach) {
    check_identity();
    check_counts();
    back_all();
  } else {
    format();
  }
  capacity_ = header_->capacity;
}

void RowStore::open_region() {
  const std::uint64_t capacity = capacity_of(*config_, shard_);
  const std::uint64_t total = total_of(*config_, shard_);
  layout_ = Layout::of(capacity, stride_, sketch_width_of(*config_, total), total);
  const auto& files = config_->files;
  const std::string path = files.path + "." + std::to_string(shard_);
  if (files.path.empty()) {
    region_ = Region::anonymous(layout_.total);
  } else if (files.attach) {
    region_ = Region::attach(path, layout_.total, files.lock_seconds);
  } else {
    region_ = Region::create(path, layout_.total, files.lock_seconds);
  }
  region_.advise_huge(layout_.index + kHugePage, layout_.index_bytes - std::min(layout_.index_bytes, kHugePage));
  region_.advise_huge(layout_.rows + kHugePage, layout_.rows_bytes - std::min(layout_.rows_bytes, kHugePage));
}

// A new region. It is one only when the magic number is there.
void RowStore::format() {
  if (region_.is_file()) region_.back(0, layout_.sketch + layout_.sketch_bytes);
  Header identity = identity_of(*config_, *optimizer_, shard_);
  identity.magic = 0;
  std::memcpy(region_.base(), &identity, sizeof(identity));
  header_->snapshot = 1;
}

// All that there should be memory for: a copy of a file may have left out zeros.
void RowStore::back_all() {
  const std::size_t first = layout_.sketch + layout_.sketch_bytes,
                    slots = header_->index_backed * sizeof(std::uint64_t);
  const std::size_t rows = header_->rows_backed * stride_;
  const std::size_t steps = header_->keeps_last_steps != 0 ? header_->rows_backed * sizeof(std::uint32_t) : 0;
  std::size_t wanted = 0;
  for (const std::size_t bytes : {first, slots, rows, steps}) wanted += align_up(bytes, kPage);
  if (region_.backed_bytes() >= wanted) return;
  region_.back(0, first);
  region_.back(layout_.index, slots);
  if (rows > 0) region_.back(layout_.rows, rows);
  if (steps > 0) region_.back(layout_.last_steps, steps);
}

// Whether it is the region of this shard of this table, written by a version that we understand.
void RowStore::check_identity() const {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error(where() + ": " + what +
                             ". Give another directory, or remove what is left there with `persia cluster regions "
                             "--clean`, and go on from a checkpoint");
  };
  region_.back(0, kHeaderBytes);
  const Header& h = *header_;
  if (h.magic == 0) refuse("it was never completed");
  if (h.magic != kMagic) refuse("it is no region of an embedding store");
  if (h.format != kFormat) {
    refuse("it has format " + std::to_string(h.format) + ", and this version of persia reads format " +
           std::to_string(kFormat));
  }
  if (h.check != check_of(h)) refuse("its header is damaged");
  const Header wanted = identity_of(*config_, *optimizer_, shard_);
  if (h.name_hash != wanted.name_hash || h.shard != wanted.shard) {
    refuse("it is shard " + std::to_string(h.shard) + " of table '" + name_in(h) + "', not shard " +
           std::to_string(shard_) + " of '" + config_->name + "'");
  }
  const auto same = [&](const char* what, std::uint64_t found, std::uint64_t expected) {
    if (found == expected) return;
    refuse("it was made for another " + std::string(what) + ": " + std::to_string(found) + ", not " +
           std::to_string(expected));
  };
  same("dim", h.dim, wanted.dim);
  same("optimizer", h.optimizer, wanted.optimizer);
  same("width of optimizer state", h.state_width, wanted.state_width);
  same("dtype (bytes of a row)", h.row_stride, wanted.row_stride);
  same("capacity", h.capacity, wanted.capacity);
  same("number of shards", h.shards, wanted.shards);
  same("seed", h.seed, wanted.seed);
  same("admission", h.sketch_width, wanted.sketch_width);
  if (h.settings != wanted.settings) {
    refuse("dtype, the optimizer's parameters, initializer, admission or spill were others");
  }
  if ((h.tier.log != 0) != config_->tiered()) refuse("it was made with another spill");
}

// Whether what changes is within bounds: nothing read from here on may lead out of the region.
void RowStore::check_counts() const {
  const Header& h = *header_;
  const bool rows = h.rows_used <= h.rows_backed && h.rows_backed <= h.capacity && h.tier.move_row <= h.rows_used;
  const bool slots = h.index_slots >= std::min(Index::kFirstSlots, layout_.max_slots) &&
                     h.index_slots <= layout_.max_slots && h.index_slots % Index::kLineSlots == 0 &&
                     h.index_backed >= h.index_slots + kIndexTail && h.index_backed <= layout_.max_slots + kIndexTail &&
                     (h.rows_used * 5 <= h.index_slots * 4 || h.index_slots == layout_.max_slots) &&
                     h.index_old_slots <= h.index_slots && h.index_old_slots % Index::kLineSlots == 0;
  const std::uint64_t last = h.removing >> 32;  // in its place, or gone
  const bool removal = h.removing == 0 || (static_cast<std::uint32_t>(h.removing) < last &&
                                           (last == h.rows_used || last + 1 == h.rows_used));
  if (rows && slots && removal && h.undo_row <= h.rows_used && h.commit_slot <= kClients && h.keeps_last_steps <= 1)
    return;
  throw std::runtime_error(where() + ": its header is damaged: it says " + std::to_string(h.rows_used) + " rows of " +
                           std::to_string(h.rows_backed) + " of " + std::to_string(h.capacity) + ", " +
                           std::to_string(h.index_slots) + " slots of " + std::to_string(h.index_backed) +
                           ". Remove it with `persia cluster regions --clean`, and go on from a checkpoint");
}

}  // namespace persia
