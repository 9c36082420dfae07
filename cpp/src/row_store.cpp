#include "persia/row_store.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "persia/memory.hpp"
#include "persia/mix.hpp"

namespace persia {
namespace {

// Memory comes in pieces of an eighth of what there is, from here to kFilePiece, or a huge page: often enough to waste
// little, and so small that no request waits long for one. A huge page takes 0.25 ms.
constexpr std::size_t kLeastPiece = std::size_t{64} << 10;

}  // namespace

void RowStore::complete() {
  if (header_->magic == 0) {
    barrier();
    header_->magic = kMagic;
  }
  header_->owner = static_cast<std::uint64_t>(getpid());
}

std::string RowStore::where() const {
  const auto& path = config_->files.path;
  return path.empty() ? "table '" + config_->name + "'" : "region " + path + "." + std::to_string(shard_);
}

std::runtime_error RowStore::damaged(std::uint32_t number) const {
  return std::runtime_error(where() + ": row " + std::to_string(number) + " is damaged: the index has no such id");
}

// The memory is zeros, published when it is there.
void RowStore::keep_last_steps() {
  if (header_->keeps_last_steps != 0) return;
  if (header_->rows_backed > 0) back(layout_.last_steps, header_->rows_backed * sizeof(std::uint32_t));
  barrier();
  header_->keeps_last_steps = 1;
}

void RowStore::initialize(std::uint32_t number, std::uint64_t id) {
  const std::uint64_t random = row_key(header_->seed, header_->name_hash, id);
  if (values_.narrow()) {
    persia::initialize(config_->initializer, scratch_.data(), dim_, random);
    write(number, scratch_.data(), nullptr);
  } else {
    persia::initialize(config_->initializer, embedding(number), dim_, random);
  }
  // Moments begin with zeros, which are zeros in each dtype.
  optimizer_->initialize_state(state(number), states_.words(header_->state_width));
}

// 16-bit values are not rounded beyond the bound.
void RowStore::write(std::uint32_t number, const float* values, const float* state_values) {
  const float bound = optimizer_->bound();
  if (values_.narrow() && bound < std::numeric_limits<float>::infinity()) {
    std::transform(values, values + dim_, scratch_.begin(), [&](float v) { return std::clamp(v, -bound, bound); });
    values = scratch_.data();
  }
  values_.store_nearest(values, embedding(number), dim_);
  if (state_values != nullptr && header_->state_width > 0) {
    states_.store_nearest(state_values, state(number), header_->state_width);
  }
}

// In float32 for a row of 16-bit values, which are rounded at the end: a finite value stays finite.
bool RowStore::update_narrow(std::uint32_t number, const RowUpdate& update) {
  const RowHeader& r = *row(number);
  float* const values = scratch_.data();
  float* const moments = states_.narrow() ? values + dim_ : state(number);
  const std::uint64_t key =
      Rounding::key_of(header_->seed, header_->name_hash, r.key(), update.step, embedding(number), words_);
  values_.load(embedding(number), values, dim_);
  if (states_.narrow()) states_.load(state(number), moments, header_->state_width);
  if (!optimizer_->apply({values, moments, update.gradient, dim_, update.lr, r.update_count, update.before})) {
    return false;
  }
  values_.store_stochastic(values, embedding(number), dim_, Rounding::of(key, r.update_count, 0));
  crash_point();
  if (states_.narrow()) {
    states_.store_stochastic(moments, state(number), header_->state_width, Rounding::of(key, r.update_count, 1));
  }
  return true;
}

void RowStore::read_embedding(const std::byte* row, float* values) const {
  values_.load(row + sizeof(RowHeader), values, dim_);
}

void RowStore::read_state(const std::byte* row, float* values) const {
  if (header_->state_width == 0) return;
  states_.load(row + sizeof(RowHeader) + words_ * sizeof(float), values, header_->state_width);
}

void RowStore::append(const std::byte* row, std::uint32_t last_step, RowBatch& rows) const {
  const auto& r = *reinterpret_cast<const RowHeader*>(row);
  const auto* values = reinterpret_cast<const float*>(row + sizeof(RowHeader));
  rows.ids.push_back(r.key());
  rows.update_counts.push_back(r.update_count);
  rows.last_steps.push_back(last_step);
  rows.stamps.push_back(r.stamp);
  const std::size_t width = header_->state_width;
  if (!values_.narrow()) {
    rows.embeddings.insert(rows.embeddings.end(), values, values + dim_);
    rows.states.insert(rows.states.end(), values + dim_, values + dim_ + width);
    return;
  }
  rows.embeddings.resize(rows.embeddings.size() + dim_);
  read_embedding(row, rows.embeddings.data() + rows.embeddings.size() - dim_);
  rows.states.resize(rows.states.size() + width);
  read_state(row, rows.states.data() + rows.states.size() - width);
}

void RowStore::write_undo(std::uint32_t number) {
  std::byte* const undo = section(layout_.undo);
  std::memcpy(undo, row_bytes(number), stride_);
  const std::uint32_t step = last_step(number);
  std::memcpy(undo + stride_, &step, sizeof(step));
  header_->undo_mark = header_->push.rows_applied;
  barrier();
  header_->undo_row = std::uint64_t{number} + 1;
  barrier();
}

void RowStore::erase_undo() {
  barrier();
  header_->undo_row = 0;
  barrier();
}

bool RowStore::roll_back() {
  const bool undone = header_->undo_row != 0 && header_->undo_mark == header_->push.rows_applied;
  if (undone) {
    const auto number = static_cast<std::uint32_t>(header_->undo_row - 1);
    const std::byte* const undo = section(layout_.undo);
    std::uint32_t step = 0;
    std::memcpy(row_bytes(number), undo, stride_);
    std::memcpy(&step, undo + stride_, sizeof(step));
    set_last_step(number, step);
  }
  barrier();
  header_->undo_row = 0;
  barrier();
  return undone;
}

void RowStore::move_last_to(std::uint32_t number) {
  header_->removing = (header_->rows_used - 1) << 32 | number;
  barrier();
  finish_removal();
}

// The last row stays as it is until the other is complete, so this can be repeated.
void RowStore::finish_removal() {
  const std::uint64_t last = header_->removing >> 32;
  if (header_->removing != 0 && header_->rows_used == last + 1) {
    const auto from = static_cast<std::uint32_t>(last), to = static_cast<std::uint32_t>(header_->removing);
    std::memcpy(row_bytes(to), row_bytes(from), stride_);
    crash_point();
    set_last_step(to, last_step(from));
    barrier();
    header_->rows_used = last;
    barrier();
  }
  header_->removing = 0;
  barrier();
}

void RowStore::release_unused() {
  const std::uint64_t before = header_->rows_backed;
  const std::uint64_t kept = std::min(before, header_->rows_used + kFilePiece / stride_ + 1);
  header_->rows_backed = kept;
  barrier();
  region_.discard(layout_.rows + kept * stride_, (before - kept) * stride_);
  if (header_->keeps_last_steps == 0) return;
  region_.discard(layout_.last_steps + kept * sizeof(std::uint32_t), (before - kept) * sizeof(std::uint32_t));
}

void RowStore::back(std::size_t offset, std::size_t bytes) const {
  try {
    region_.back(offset, bytes);
  } catch (const RegionFull&) {
    region_.discard(offset, bytes);
    throw;
  }
}

// Published when it is there.
void RowStore::back_rows() {
  const std::size_t piece =
      std::clamp(header_->rows_backed * stride_ / 8, kLeastPiece, in_file() ? kFilePiece : kHugePage);
  rows_ahead_ = ahead(piece) / stride_;
  const std::uint64_t more = std::max<std::uint64_t>(1, piece / stride_);
  const std::uint64_t rows = std::min(header_->capacity, header_->rows_backed + more);
  const auto back_section = [&](std::size_t offset, std::size_t stride) {
    back(offset + header_->rows_backed * stride, (rows - header_->rows_backed) * stride);
  };
  back_section(layout_.rows, stride_);
  try {
    if (header_->keeps_last_steps != 0) back_section(layout_.last_steps, sizeof(std::uint32_t));
  } catch (const RegionFull&) {
    region_.discard(layout_.rows + header_->rows_backed * stride_, (rows - header_->rows_backed) * stride_);
    throw;
  }
  barrier();
  header_->rows_backed = rows;
  barrier();
}

std::uint64_t RowStore::memory_bytes() const {
  return layout_.sketch + layout_.sketch_bytes +
         header_->rows_used * (stride_ + (header_->keeps_last_steps != 0 ? sizeof(std::uint32_t) : 0));
}

void RowStore::clear() {
  header_->rows_used = 0;
  barrier();
  header_->rows_backed = 0;
  barrier();
  region_.discard(layout_.rows, layout_.total - layout_.rows);
  std::memset(section(layout_.sketch), 0, layout_.sketch_bytes);
}

}  // namespace persia
