// 1-bit compression of APMSqueeze (arXiv 2008.11343, Algorithm 1): one bit per value and a scale per block. Also the
// other steps of the algorithm, each in one pass over memory, as memory bandwidth bounds them.
//
// Payload of `count` values: the scales of the blocks, float32, then the signs, value i in bit i % 8 of byte i / 8, 1
// for values >= 0 (also -0). Bits past the last value are 0. Results are bit-identical on every machine.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "persia/thread_pool.hpp"

namespace persia {

struct OneBitFormat {
  std::size_t block = 2048;  // values that share a scale, a multiple of 64
  bool l2 = false;           // ||block|| / sqrt(count) in place of the mean magnitude

  // Returns the number of blocks of `count` values.
  std::size_t blocks(std::size_t count) const { return (count + block - 1) / block; }
  // Returns the bytes of the payload of `count` values: scales and signs.
  std::size_t payload_bytes(std::size_t count) const { return 4 * blocks(count) + (count + 7) / 8; }
};

// Compresses values into a payload; leaves the error in `values`.
void onebit_pack(const OneBitFormat& format, float* values, std::size_t count, std::uint8_t* payload);

// Decompresses a payload into `out`.
void onebit_unpack(const OneBitFormat& format, const std::uint8_t* payload, std::size_t count, float* out);

// Line 9: compresses the mean of all workers' payloads (`stride` bytes apart, in the order of ranks) plus the error;
// leaves the new error in `error`.
void onebit_average(const OneBitFormat& format, const std::uint8_t* payloads, std::size_t stride, std::size_t workers,
                    float* error, std::size_t count, std::uint8_t* payload, ThreadPool& pool);

// The values of a bucket and their chunks, one per worker: row k has the payload of values [k * chunk, (k + 1) *
// chunk).
struct OneBitRows {
  std::uint8_t* data;
  std::size_t stride;  // bytes from row to row
  std::size_t chunk;   // values
};

// A run of one parameter in a bucket, and its update in a step. Runs are contiguous.
struct MomentumRun {
  std::size_t begin = 0, end = 0;   // within the bucket
  const float* gradient = nullptr;  // of value `begin`; none: zeros
  float* parameter = nullptr;       // of value `begin`; none: not updated
  float keep = 0, take = 0;         // momentum = keep * momentum + take * gradient
  float rate = 0, shrink = 1, eps = 0;
  float beta2 = 0, rest2 = 1, bias2 = 1;  // rest2 = 1 - beta2, from more digits than float32 has
};

// Lines 6 and 7: compresses each run's momentum plus the error into rows; leaves the new error in `error`. The momentum
// is an array, or decoded from the rows `previous`, or absent: then only the gradient is sent.
void onebit_compress(const OneBitFormat& format, std::span<const MomentumRun> runs, const float* momentum,
                     const OneBitRows* previous, float* error, std::size_t count, const OneBitRows& rows,
                     ThreadPool& pool);

// Lines 10 and 11: updates parameters by the decoded rows, x = x * shrink - rate * m / (sqrt(v) + eps). With
// `momentum`, m is that array after keep * momentum + take * rows; without, m is the decoded rows.
void onebit_apply(const OneBitFormat& format, std::span<const MomentumRun> runs, const OneBitRows& rows,
                  float* momentum, const float* variance, std::size_t count, ThreadPool& pool);

// Line 2: a step of Adam with gradient * factor: m = keep * m + take * g, v = beta2 * v + rest2 * g^2, and
// x = x * shrink - rate * m / (sqrt(v / bias2) + eps). Runs without parameter are skipped.
void adam_step(std::span<const MomentumRun> runs, const float* gradient, float factor, float* momentum, float* variance,
               std::size_t count, ThreadPool& pool);

// Returns the sum of squares in float64, in a fixed order. NaN or infinite if and only if a value is.
double sum_of_squares(const float* values, std::size_t count, ThreadPool& pool);

}  // namespace persia
