// How a shard comes by its region: makes one, or attaches to what another process has left, and mends that.
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

#include "persia/memory.hpp"
#include "persia/mix.hpp"
#include "persia/shard.hpp"

namespace persia {
namespace {

// Memory comes in pieces of an eighth of what there is, within these bytes: often enough to waste little, and so small
// that no request waits long for one. Memory of this process comes in huge pages, which take 0.25 ms each.
constexpr std::size_t kGrowLeast = std::size_t{64} << 10;
constexpr std::size_t kGrowMostOfFile = std::size_t{256} << 10;
// Slots of a growing index that get memory ahead of growth, for each row that still fits. Between two growths there are
// 1.7 such slots for each row that comes, so this begins past halfway, and the last ones have memory in time.
constexpr std::uint64_t kAheadSlots = 4;

constexpr std::size_t kPage = 4096;  // the smallest that a file has memory in

std::size_t stride_of(const TableConfig& config, const Optimizer& optimizer) {
  const std::size_t words =
      words_of(config.dtype, config.dim) + words_of(state_dtype(config), optimizer.state_width(config.dim));
  return sizeof(RowHeader) + sizeof(float) * words;
}

bool spills(const TableConfig& config) { return !config.spill.path.empty(); }

// Of the rows in memory.
std::uint64_t capacity_of(const TableConfig& config, std::uint32_t shard) {
  const std::uint64_t total = total_of(config, shard);
  const std::uint64_t rows = spills(config) ? share_of(config.spill.memory_rows, config.shards, shard) : total;
  // Of the records on disk, half may be dead.
  if ((spills(config) ? rows + 2 * total : rows) > kMaxRows)
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
  h.durable = c.durable || !c.files.path.empty() || spills(c);
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
  if (spills(c)) h.settings = hash_of(h.settings, total_of(c, shard));
  h.check = check_of(h);
  return h;
}

std::string name_in(const Header& h) { return {h.name, strnlen(h.name, kNameBytes)}; }

}  // namespace

Shard::Shard(const TableConfig& config, const Optimizer& optimizer, std::uint32_t shard, DiskReader* reader)
    : config_(&config),
      optimizer_(&optimizer),
      values_(config.dtype),
      states_(state_dtype(config)),
      dim_(config.dim),
      words_(values_.words(config.dim)),
      stride_(stride_of(config, optimizer)),
      number_(shard) {
  before_.resize(dim_ + optimizer.state_width(dim_));
  if (values_.narrow()) scratch_.resize(before_.size());
  open_region();
  header_ = reinterpret_cast<Header*>(region_.base());
  rows_ = region_.base() + layout_.rows;
  if (config.files.attach) {
    check_identity();
    check_state();
    back_all();
    open_tier(reader);
  } else {
    format();
    open_tier(reader);
    barrier();
    header_->magic = kMagic;
  }
  header_->owner = static_cast<std::uint64_t>(getpid());
  index_ =
      Index(reinterpret_cast<std::uint64_t*>(region_.base() + layout_.index), header_->index_slots, layout_.max_slots,
            header_->index_old_slots, header_->index_frontier, tier_ ? Index::kEighth : Index::kThird);
  sketch_ = Sketch(reinterpret_cast<std::uint16_t*>(region_.base() + layout_.sketch), header_->sketch_width);
}

std::string Shard::where() const {
  const auto& path = config_->files.path;
  return path.empty() ? "table '" + config_->name + "'" : "region " + path + "." + std::to_string(number_);
}

void Shard::open_region() {
  const std::uint64_t capacity = capacity_of(*config_, number_);
  const std::uint64_t total = total_of(*config_, number_);
  layout_ = Layout::of(capacity, stride_, sketch_width_of(*config_, total), total);
  const auto& files = config_->files;
  const std::string path = files.path + "." + std::to_string(number_);
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
void Shard::format() {
  if (region_.is_file()) region_.back(0, layout_.sketch + layout_.sketch_bytes);
  Header identity = identity_of(*config_, *optimizer_, number_);
  identity.magic = 0;
  std::memcpy(region_.base(), &identity, sizeof(identity));
  Header& h = *header_;
  h.index_slots = std::min(Index::kFirstSlots, layout_.max_slots);
  h.epoch = 1;
  back_index(h.index_slots + kIndexTail);
}

// Memory that nothing lies in yet. Where there is not enough, none is taken: others may need less.
void Shard::back_more(std::size_t offset, std::size_t bytes) const {
  try {
    region_.back(offset, bytes);
  } catch (const RegionFull&) {
    region_.discard(offset, bytes);
    throw;
  }
}

std::size_t Shard::piece(std::size_t backed) const {
  return std::clamp(backed / 8, kGrowLeast, region_.is_file() ? kGrowMostOfFile : kHugePage);
}

// All shards of a table fill alike. Each asks for a piece this much earlier than it needs it, so that no request waits
// for those of all shards. Pieces of files are small, and must not be refused before they are needed.
std::size_t Shard::ahead(std::size_t piece) const { return region_.is_file() ? 0 : piece * number_ / header_->shards; }

// All that there should be memory for: a copy of a file may have left out zeros.
void Shard::back_all() {
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

// Room for at least one more row; published when it is there.
void Shard::back_rows() {
  const std::size_t bytes = piece(header_->rows_backed * stride_);
  rows_ahead_ = ahead(bytes) / stride_;
  const std::uint64_t more = std::max<std::uint64_t>(1, bytes / stride_);
  const std::uint64_t rows = std::min(header_->capacity, header_->rows_backed + more);
  const auto back = [&](std::size_t section, std::size_t stride) {
    back_more(section + header_->rows_backed * stride, (rows - header_->rows_backed) * stride);
  };
  back(layout_.rows, stride_);
  try {
    if (header_->keeps_last_steps != 0) back(layout_.last_steps, sizeof(std::uint32_t));
  } catch (const RegionFull&) {
    region_.discard(layout_.rows + header_->rows_backed * stride_, (rows - header_->rows_backed) * stride_);
    throw;
  }
  barrier();
  header_->rows_backed = rows;
  barrier();
}

// The memory is zeros, published when it is there.
void Shard::keep_last_steps() {
  const std::lock_guard lock(mutex_);
  if (header_->keeps_last_steps != 0) return;
  if (header_->rows_backed > 0) back_more(layout_.last_steps, header_->rows_backed * sizeof(std::uint32_t));
  barrier();
  header_->keeps_last_steps = 1;
}

// Room for so many index slots, the tail included; published when it is there.
void Shard::back_index(std::uint64_t slots) {
  constexpr std::size_t size = sizeof(std::uint64_t);
  back_more(layout_.index + header_->index_backed * size, (slots - header_->index_backed) * size);
  barrier();
  header_->index_backed = slots;
  barrier();
}

// Room for the slots of the next growth, piece by piece while rows come: growth uses the last of them first.
void Shard::back_index_ahead(std::uint64_t rows) {
  const std::uint64_t needed = index_.grown() + kIndexTail;
  while (header_->index_backed < needed) {
    const std::uint64_t missing = needed - header_->index_backed;
    const std::size_t bytes = region_.is_file() ? kGrowMostOfFile : kHugePage;
    if (missing + ahead(bytes) / sizeof(std::uint64_t) <= kAheadSlots * index_.room(rows)) return;
    back_index(header_->index_backed + std::min<std::uint64_t>(missing, bytes / sizeof(std::uint64_t)));
  }
}

// Whether it is the region of this shard of this table, written by a version that we understand.
void Shard::check_identity() const {
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
  const Header wanted = identity_of(*config_, *optimizer_, number_);
  if (h.name_hash != wanted.name_hash || h.shard != wanted.shard) {
    refuse("it is shard " + std::to_string(h.shard) + " of table '" + name_in(h) + "', not shard " +
           std::to_string(number_) + " of '" + config_->name + "'");
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
  if ((h.cold.log != 0) != spills(*config_)) refuse("it was made with another spill");
}

// Whether what changes is within bounds: nothing read from here on may lead out of the region.
void Shard::check_state() const {
  const Header& h = *header_;
  const bool rows = h.rows_used <= h.rows_backed && h.rows_backed <= h.capacity && h.cold.move_row <= h.rows_used;
  const bool slots = h.index_slots >= std::min(Index::kFirstSlots, layout_.max_slots) &&
                     h.index_slots <= layout_.max_slots && h.index_slots % Index::kLineSlots == 0 &&
                     h.index_backed >= h.index_slots + kIndexTail && h.index_backed <= layout_.max_slots + kIndexTail &&
                     (h.rows_used * 5 <= h.index_slots * 4 || h.index_slots == layout_.max_slots) &&
                     h.index_old_slots <= h.index_slots && h.index_old_slots % Index::kLineSlots == 0;
  if (rows && slots && h.undo_row <= h.rows_used && h.commit_slot <= kClients && h.keeps_last_steps <= 1) return;
  throw std::runtime_error(where() + ": its header is damaged: it says " + std::to_string(h.rows_used) + " rows of " +
                           std::to_string(h.rows_backed) + " of " + std::to_string(h.capacity) + ", " +
                           std::to_string(h.index_slots) + " slots of " + std::to_string(h.index_backed) +
                           ". Remove it with `persia cluster regions --clean`, and go on from a checkpoint");
}

Recovery Shard::recover() {
  const std::lock_guard lock(mutex_);
  Recovery found;
  found.busy = header_->busy != 0;
  found.undone = header_->undo_row != 0 && header_->undo_mark == header_->push.rows_applied;
  if (found.undone) {
    const auto number = static_cast<std::uint32_t>(header_->undo_row - 1);
    const std::byte* const undo = region_.base() + layout_.undo;
    std::uint32_t step = 0;
    std::memcpy(row_bytes(number), undo, stride_);
    std::memcpy(&step, undo + stride_, sizeof(step));
    set_last_step(number, step);
  }
  barrier();
  header_->undo_row = 0;
  barrier();
  // Rows stay for another time to live, if a process died while it set these.
  if (!sound(header_->ages, header_->clock)) header_->ages = {};
  found.open = header_->commit_slot == 0 && header_->push.client != 0;
  PushLog(*header_).recover();
  if (tier_) {
    found.rebuilt = recover_tier();
  } else {
    found.rebuilt = (header_->busy & kIndexBusy) != 0 || !index_.sound(header_->rows_used);
    if (found.rebuilt) rebuild_index();
  }
  index_.clear_behind(region_.is_file() ? header_->index_backed : 0);
  make_eviction_ready();
  barrier();
  header_->busy = 0;
  return found;
}

std::uint32_t Shard::checked_tag(std::uint32_t number) const {
  const std::uint64_t hash = hash_id(row(number)->key());
  if (shard_of_hash(hash, header_->shards) != number_) {
    throw std::runtime_error(where() + ": row " + std::to_string(number) +
                             " belongs to another shard, so its rows are damaged. Remove it with `persia cluster "
                             "regions --clean`, and go on from a checkpoint");
  }
  crash_point();
  return Index::tag_of(hash);
}

void Shard::rebuild_index() {
  header_->busy |= kIndexBusy;
  barrier();
  index_.build(header_->rows_used,
               [&](std::uint64_t number) { return checked_tag(static_cast<std::uint32_t>(number)); });
  barrier();
  header_->index_old_slots = 0;
  header_->index_frontier = 0;
}

}  // namespace persia
