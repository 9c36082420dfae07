#include "persia/onebit.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "persia/isa.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace persia {
namespace {

// Sums run in 16 lanes, value i in lane i % 16, which are added in halves: any vector width can do that.
constexpr std::size_t kLanes = 16;
constexpr std::size_t kTask = 1 << 16;  // values that a thread takes at once

float halves(const float* lanes) {
  float sums[kLanes];
  std::copy(lanes, lanes + kLanes, sums);
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

// --- loops of one block, for any machine; compiled again for wider vectors below
// -----------------------------------------

#define PERSIA_INLINE [[gnu::always_inline]] inline

PERSIA_INLINE float magnitude_loop(const float* values, std::size_t count, bool l2) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const float value = values[i + j];
      lanes[j] += l2 ? value * value : std::fabs(value);
    }
  }
  for (; i < count; ++i) lanes[i % kLanes] += l2 ? values[i] * values[i] : std::fabs(values[i]);
  return halves(lanes);
}

// error = keep * momentum + take * gradient + error, without what is null
PERSIA_INLINE void fold_loop(float* error, const float* momentum, const float* gradient, float keep, float take,
                             std::size_t count) {
  if (momentum != nullptr && gradient != nullptr) {
    for (std::size_t i = 0; i < count; ++i) error[i] = (keep * momentum[i] + take * gradient[i]) + error[i];
  } else if (momentum != nullptr) {
    for (std::size_t i = 0; i < count; ++i) error[i] = keep * momentum[i] + error[i];
  } else if (gradient != nullptr) {
    for (std::size_t i = 0; i < count; ++i) error[i] = take * gradient[i] + error[i];
  }
}

PERSIA_INLINE void mix_loop(float* momentum, const float* values, float keep, float take, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) momentum[i] = keep * momentum[i] + take * values[i];
}

PERSIA_INLINE void move_loop(float* parameter, const float* momentum, const float* variance, const MomentumRun& run,
                             std::size_t count) {
  const float rate = run.rate, shrink = run.shrink, eps = run.eps;
  for (std::size_t i = 0; i < count; ++i) {
    parameter[i] = shrink * parameter[i] - rate * momentum[i] / (std::sqrt(variance[i]) + eps);
  }
}

PERSIA_INLINE void adam_loop(float* parameter, const float* gradient, float factor, float* momentum, float* variance,
                             const MomentumRun& run, std::size_t count) {
  const float keep = run.keep, take = run.take, beta2 = run.beta2, rest = run.rest2;
  const float rate = run.rate, shrink = run.shrink, eps = run.eps, unbias = 1.0f / run.bias2;
  for (std::size_t i = 0; i < count; ++i) {
    const float g = factor * gradient[i];
    const float m = keep * momentum[i] + take * g;
    const float v = beta2 * variance[i] + rest * (g * g);
    momentum[i] = m;
    variance[i] = v;
    parameter[i] = shrink * parameter[i] - rate * m / (std::sqrt(v * unbias) + eps);
  }
}

PERSIA_INLINE double squares_loop(const float* values, std::size_t count) {
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double value = values[i + j];
      lanes[j] += value * value;
    }
  }
  for (; i < count; ++i) lanes[i % kLanes] += static_cast<double>(values[i]) * values[i];
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

PERSIA_INLINE void pack_rest(float* values, std::size_t begin, std::size_t count, float scale, std::uint8_t* bits) {
  for (std::size_t i = begin; i < count; i += 8) {
    unsigned byte = 0;
    for (std::size_t j = 0; j < 8 && i + j < count; ++j) {
      const bool positive = values[i + j] >= 0.0f;
      byte |= static_cast<unsigned>(positive) << j;
      values[i + j] -= positive ? scale : -scale;
    }
    bits[i / 8] = static_cast<std::uint8_t>(byte);
  }
}

PERSIA_INLINE void unpack_rest(const std::uint8_t* bits, std::size_t begin, std::size_t count, float scale, float* out,
                               bool add) {
  for (std::size_t i = begin; i < count; ++i) {
    const float value = (bits[i / 8] >> (i % 8) & 1) != 0 ? scale : -scale;
    out[i] = add ? out[i] + value : value;
  }
}

struct Loops {
  float (*magnitude)(const float*, std::size_t, bool);
  void (*fold)(float*, const float*, const float*, float, float, std::size_t);
  void (*mix)(float*, const float*, float, float, std::size_t);
  void (*move)(float*, const float*, const float*, const MomentumRun&, std::size_t);
  void (*adam)(float*, const float*, float, float*, float*, const MomentumRun&, std::size_t);
  double (*squares)(const float*, std::size_t);
  void (*pack)(float*, std::size_t, float, std::uint8_t*);  // subtracts what the bits stand for
  void (*unpack)(const std::uint8_t*, std::size_t, float, float*, bool add);
};

// The loops above compiled with the instructions `target`; pack and unpack are written for each.
#define PERSIA_LOOPS(name, target)                                                                               \
  target float magnitude_##name(const float* v, std::size_t n, bool l2) { return magnitude_loop(v, n, l2); }     \
  target void fold_##name(float* e, const float* m, const float* g, float k, float t, std::size_t n) {           \
    fold_loop(e, m, g, k, t, n);                                                                                 \
  }                                                                                                              \
  target void mix_##name(float* m, const float* v, float k, float t, std::size_t n) { mix_loop(m, v, k, t, n); } \
  target void move_##name(float* p, const float* m, const float* v, const MomentumRun& run, std::size_t n) {     \
    move_loop(p, m, v, run, n);                                                                                  \
  }                                                                                                              \
  target void adam_##name(float* p, const float* g, float f, float* m, float* v, const MomentumRun& run,         \
                          std::size_t n) {                                                                       \
    adam_loop(p, g, f, m, v, run, n);                                                                            \
  }                                                                                                              \
  target double squares_##name(const float* v, std::size_t n) { return squares_loop(v, n); }                     \
  constexpr Loops k_##name = {magnitude_##name, fold_##name,    mix_##name,  move_##name,                        \
                              adam_##name,      squares_##name, pack_##name, unpack_##name};

void pack_base(float* values, std::size_t count, float scale, std::uint8_t* bits) {
  pack_rest(values, 0, count, scale, bits);
}

void unpack_base(const std::uint8_t* bits, std::size_t count, float scale, float* out, bool add) {
  unpack_rest(bits, 0, count, scale, out, add);
}

PERSIA_LOOPS(base, )

#if defined(__x86_64__)
[[gnu::target("avx2")]] void pack_avx2(float* values, std::size_t count, float scale, std::uint8_t* bits) {
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale), zero = _mm256_setzero_ps();
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const __m256 positive = _mm256_cmp_ps(value, zero, _CMP_GE_OQ);
    bits[i / 8] = static_cast<std::uint8_t>(_mm256_movemask_ps(positive));
    _mm256_storeu_ps(values + i, _mm256_sub_ps(value, _mm256_blendv_ps(minus, plus, positive)));
  }
  pack_rest(values, i, count, scale, bits);
}

[[gnu::target("avx2")]] void unpack_avx2(const std::uint8_t* bits, std::size_t count, float scale, float* out,
                                         bool add) {
  const __m256 plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
  const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(bits[i / 8]), lanes);
    __m256 value = _mm256_blendv_ps(minus, plus, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lanes)));
    if (add) value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
    _mm256_storeu_ps(out + i, value);
  }
  unpack_rest(bits, i, count, scale, out, add);
}

PERSIA_LOOPS(avx2, [[gnu::target("avx2")]])

PERSIA_AVX512 void pack_avx512(float* values, std::size_t count, float scale, std::uint8_t* bits) {
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale), zero = _mm512_setzero_ps();
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 value = _mm512_loadu_ps(values + i);
    const __mmask16 positive = _mm512_cmp_ps_mask(value, zero, _CMP_GE_OQ);
    std::memcpy(bits + i / 8, &positive, 2);
    _mm512_storeu_ps(values + i, _mm512_sub_ps(value, _mm512_mask_blend_ps(positive, minus, plus)));
  }
  pack_rest(values, i, count, scale, bits);
}

PERSIA_AVX512 void unpack_avx512(const std::uint8_t* bits, std::size_t count, float scale, float* out, bool add) {
  const __m512 plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
  std::size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    __mmask16 positive;
    std::memcpy(&positive, bits + i / 8, 2);
    __m512 value = _mm512_mask_blend_ps(positive, minus, plus);
    if (add) value = _mm512_add_ps(_mm512_loadu_ps(out + i), value);
    _mm512_storeu_ps(out + i, value);
  }
  unpack_rest(bits, i, count, scale, out, add);
}

PERSIA_LOOPS(avx512, PERSIA_AVX512)
#endif

const Loops& loops_for([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return k_avx512;
  if (isa == Isa::kAvx2) return k_avx2;
#endif
  return k_base;
}

// --- blocks
// --------------------------------------------------------------------------------------------------------------

// Where a block of a payload of `count` values is.
struct Block {
  std::size_t begin, length;
  std::size_t scale_at, bits_at;  // bytes
};

Block block_at(const OneBitFormat& format, std::size_t count, std::size_t number) {
  const std::size_t begin = number * format.block;
  return {begin, std::min(format.block, count - begin), 4 * number, 4 * format.blocks(count) + begin / 8};
}

void pack_block(const Loops& loops, const OneBitFormat& format, const Block& block, float* values,
                std::uint8_t* payload) {
  const float mean = loops.magnitude(values, block.length, format.l2) / static_cast<float>(block.length);
  const float scale = format.l2 ? std::sqrt(mean) : mean;
  std::memcpy(payload + block.scale_at, &scale, 4);
  loops.pack(values, block.length, scale, payload + block.bits_at);
}

void unpack_block(const Loops& loops, const Block& block, const std::uint8_t* payload, float* out, bool add) {
  float scale;
  std::memcpy(&scale, payload + block.scale_at, 4);
  loops.unpack(payload + block.bits_at, block.length, scale, out, add);
}

// Calls body(chunk k, its first value, its values, block) for all blocks of all chunks.
template <class Body>
void for_blocks(const OneBitFormat& format, std::size_t count, std::size_t chunk, ThreadPool& pool, const Body& body) {
  if (count == 0) return;
  const std::size_t each = std::max<std::size_t>(1, kTask / format.block);
  const std::size_t tasks = (format.blocks(chunk) + each - 1) / each;  // of a chunk
  const std::size_t chunks = (count + chunk - 1) / chunk;
  pool.parallel_for(chunks * tasks, [&](std::size_t task) {
    const std::size_t k = task / tasks, length = std::min(chunk, count - k * chunk);
    const std::size_t first = task % tasks * each, last = std::min(format.blocks(length), first + each);
    std::vector<float> room(first < last ? format.block : 0);
    for (std::size_t b = first; b < last; ++b) body(k, k * chunk, length, block_at(format, length, b), room.data());
  });
}

// Calls body(run, first value, values) for the parts of runs within [begin, end).
template <class Body>
void for_runs(std::span<const MomentumRun> runs, std::size_t begin, std::size_t end, const Body& body) {
  auto run = std::upper_bound(runs.begin(), runs.end(), begin,
                              [](std::size_t at, const MomentumRun& r) { return at < r.end; });
  for (; run != runs.end() && run->begin < end; ++run) {
    const std::size_t from = std::max(begin, run->begin), to = std::min(end, run->end);
    if (from < to) body(*run, from, to - from);
  }
}

}  // namespace

void onebit_pack(const OneBitFormat& format, float* values, std::size_t count, std::uint8_t* payload) {
  const Loops& loops = loops_for(isa());
  for (std::size_t b = 0; b < format.blocks(count); ++b) {
    const Block block = block_at(format, count, b);
    pack_block(loops, format, block, values + block.begin, payload);
  }
}

void onebit_unpack(const OneBitFormat& format, const std::uint8_t* payload, std::size_t count, float* out) {
  const Loops& loops = loops_for(isa());
  for (std::size_t b = 0; b < format.blocks(count); ++b) {
    const Block block = block_at(format, count, b);
    unpack_block(loops, block, payload, out + block.begin, false);
  }
}

void onebit_average(const OneBitFormat& format, const std::uint8_t* payloads, std::size_t stride, std::size_t workers,
                    float* error, std::size_t count, std::uint8_t* payload, ThreadPool& pool) {
  const Loops& loops = loops_for(isa());
  const float share = 1.0f / static_cast<float>(workers);
  for_blocks(format, count, count, pool, [&](std::size_t, std::size_t, std::size_t, const Block& block, float* sum) {
    for (std::size_t w = 0; w < workers; ++w) unpack_block(loops, block, payloads + w * stride, sum, w != 0);
    loops.fold(error + block.begin, sum, nullptr, share, 0.0f, block.length);
    pack_block(loops, format, block, error + block.begin, payload);
  });
}

void onebit_compress(const OneBitFormat& format, std::span<const MomentumRun> runs, const float* momentum,
                     const OneBitRows* previous, float* error, std::size_t count, const OneBitRows& rows,
                     ThreadPool& pool) {
  const Loops& loops = loops_for(isa());
  for_blocks(
      format, count, rows.chunk, pool,
      [&](std::size_t k, std::size_t start, std::size_t, const Block& block, float* room) {
        const std::size_t begin = start + block.begin;
        const float* source = momentum == nullptr ? nullptr : momentum + begin;
        if (previous != nullptr) {
          unpack_block(loops, block, previous->data + k * previous->stride, room, false);
          source = room;
        }
        for_runs(runs, begin, begin + block.length, [&](const MomentumRun& run, std::size_t at, std::size_t length) {
          loops.fold(error + at, source == nullptr ? nullptr : source + (at - begin),
                     run.gradient == nullptr ? nullptr : run.gradient + (at - run.begin), run.keep, run.take, length);
        });
        pack_block(loops, format, block, error + begin, rows.data + k * rows.stride);
      });
}

void onebit_apply(const OneBitFormat& format, std::span<const MomentumRun> runs, const OneBitRows& rows,
                  float* momentum, const float* variance, std::size_t count, ThreadPool& pool) {
  const Loops& loops = loops_for(isa());
  for_blocks(format, count, rows.chunk, pool,
             [&](std::size_t k, std::size_t start, std::size_t, const Block& block, float* room) {
               const std::size_t begin = start + block.begin;
               unpack_block(loops, block, rows.data + k * rows.stride, room, false);
               for_runs(runs, begin, begin + block.length,
                        [&](const MomentumRun& run, std::size_t at, std::size_t length) {
                          const float* source = room + (at - begin);
                          if (momentum != nullptr) {
                            loops.mix(momentum + at, source, run.keep, run.take, length);
                            source = momentum + at;
                          }
                          if (run.parameter != nullptr) {
                            loops.move(run.parameter + (at - run.begin), source, variance + at, run, length);
                          }
                        });
             });
}

void adam_step(std::span<const MomentumRun> runs, const float* gradient, float factor, float* momentum, float* variance,
               std::size_t count, ThreadPool& pool) {
  const Loops& loops = loops_for(isa());
  pool.parallel_for((count + kTask - 1) / kTask, [&](std::size_t task) {
    for_runs(runs, task * kTask, std::min(count, (task + 1) * kTask),
             [&](const MomentumRun& run, std::size_t at, std::size_t length) {
               if (run.parameter == nullptr) return;
               loops.adam(run.parameter + (at - run.begin), gradient + at, factor, momentum + at, variance + at, run,
                          length);
             });
  });
}

double sum_of_squares(const float* values, std::size_t count, ThreadPool& pool) {
  const Loops& loops = loops_for(isa());
  std::vector<double> sums((count + kTask - 1) / kTask);
  pool.parallel_for(sums.size(), [&](std::size_t task) {
    sums[task] = loops.squares(values + task * kTask, std::min(kTask, count - task * kTask));
  });
  double sum = 0.0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace persia
