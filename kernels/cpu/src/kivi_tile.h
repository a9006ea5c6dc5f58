// What attention computes within a tile of blocks of kivi.h: scores of a block's keys, and the values that a tile's
// probabilities weigh. A number is code * scale + least of its group, so a group's scale multiplies the query, or the
// probability, instead of its codes, and what is multiplied by its least number is added once:
//
//     q . k     = sum over d of (q[d] scale[d]) code[d, slot]  +  sum over d of q[d] least[d]
//     p . v[d]  = sum over slots of (p[slot] scale[slot]) code[slot, d]  +  sum over slots of p[slot] least[slot]
//
// Every sum goes over channels or slots in one order for each number of the result, however many rows are beside it.
#pragma once

#include "attention_tile.h"
#include "kivi.h"

namespace DIPTYCH_ISA {

// Rows at once: two registers of results each.
#if defined(__AVX512F__)
constexpr int kKiviRows = 12;
#else
constexpr int kKiviRows = 4;
#endif

constexpr int64_t kTileBlocks = kTile / kKiviSlots;
constexpr int64_t kKiviAhead = 4;  // as kAhead, in heads of blocks

// Codes in the low, or the high, four bits of bytes.
inline native_floats codes_in(native_words bytes, bool are_high) {
  if (are_high) bytes >>= 4;
#if defined(__AVX512F__)
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (native_floats)_mm512_permutexvar_ps((__m512i)bytes, codes);  // by the four lowest bits
#else
  return __builtin_convertvector(bytes & 15, native_floats);
#endif
}

inline native_floats broadcast_float(const float *from) { return (native_floats)broadcast(from); }

// to: queries times the scales of a block's channels, [num_rows, dim]; starts: queries . least numbers, [num_rows].
__attribute__((noinline)) inline void scale_queries(const float *queries, int64_t num_rows,
                                                    const KiviHead<const uint8_t> &keys, const uint8_t *next, float *to,
                                                    float *starts) {
  const int64_t dim = keys.dim;
  const bf16 *scales = keys.scales(), *leasts = keys.leasts();
  native_floats sums[kKiviRows][kParts] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    __builtin_prefetch(next + 16 * dim + 2 * d);
    __builtin_prefetch(next + 18 * dim + 2 * d);
    const f32x16 scale = load(scales + d), least = load(leasts + d);
    for (int64_t m = 0; m < num_rows; m++)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; p++) {
        const native_floats q = part_of<native_floats>(queries + m * dim + d, p);
        put_part(to + m * dim + d, p, q * part_of<native_floats>(&scale, p));
        sums[m][p] += q * part_of<native_floats>(&least, p);
      }
  }
  for (int64_t m = 0; m < num_rows; m++) starts[m] = sum(load_raw<f32x16>(sums[m]));
}

// scores[m, ..] = factor * (starts[m] + queries[m] . codes), of as many slots as two vectors have lanes. queries:
// [M, dim]; scores: rows of kTile. apart: bytes from one vector's codes to the other's.
template <int M>
struct ScoreCodes {
  static void run(const float *queries, const float *starts, int64_t dim, const uint8_t *codes, int64_t apart,
                  const uint8_t *next, float factor, float *scores) {
    native_floats acc[M][2];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = native_floats{} + starts[m];
    for (int64_t j = 0; j < dim; j += 2) {
      if (j % 8 == 0) __builtin_prefetch(next + 8 * j), __builtin_prefetch(next + apart + 8 * j);
      const native_words bytes[2] = {load_bytes(codes + 8 * j), load_bytes(codes + apart + 8 * j)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const native_floats one = codes_in(bytes[0], half), two = codes_in(bytes[1], half);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const native_floats q = broadcast_float(queries + m * dim + j + half);
          acc[m][0] += q * one;
          acc[m][1] += q * two;
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int n = 0; n < 2; n++) put_part(scores + m * kTile, n, acc[m][n] * factor);
  }
};

// to: probabilities times the scales of their slots, of the g-th 32 numbers of values; starts: probabilities . least
// numbers. probs, to: rows of kTile, from the first block's first slot on.
__attribute__((noinline)) inline void scale_probabilities(const float *probs, int64_t num_rows,
                                                          const uint8_t *const *values, int64_t num_blocks, int64_t dim,
                                                          int64_t g, float *to, float *starts) {
  native_floats sums[kKiviRows][kParts] = {};
  for (int64_t b = 0; b < num_blocks; b++) {
    const KiviHead<const uint8_t> own{values[b], dim};
    __builtin_prefetch(values[b + kKiviAhead] + 16 * dim + 2 * g * kKiviSlots);
    __builtin_prefetch(values[b + kKiviAhead] + 18 * dim + 2 * g * kKiviSlots);
    for (int64_t s = 0; s < kKiviSlots; s += kLanes) {
      const f32x16 scale = load(own.scales() + g * kKiviSlots + s), least = load(own.leasts() + g * kKiviSlots + s);
      for (int64_t m = 0; m < num_rows; m++) {
        const int64_t at = m * kTile + b * kKiviSlots + s;
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++) {
          const native_floats probability = part_of<native_floats>(probs + at, p);
          put_part(to + at, p, probability * part_of<native_floats>(&scale, p));
          sums[m][p] += probability * part_of<native_floats>(&least, p);
        }
      }
    }
  }
  for (int64_t m = 0; m < num_rows; m++) starts[m] = sum(load_raw<f32x16>(sums[m]));
}

// out[m, ..] and out[m, 16 + ..] = starts[m] + probs[m] . codes, in the low and in the high bits of the bytes `at` of
// every slot, as many as a vector has lanes. probs: rows of kTile; out: [M, dim].
template <int M>
struct WeighCodes {
  static void run(const float *probs, const float *starts, const uint8_t *const *values, int64_t num_blocks, int64_t dim,
                  int64_t at, float *out) {
    native_floats acc[M][2];
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = native_floats{} + starts[m];
    for (int64_t b = 0; b < num_blocks; b++) {
      const uint8_t *codes = values[b] + at, *next = values[b + kKiviAhead] + at;
      for (int64_t slot = 0; slot < kKiviSlots; slot++, codes += dim / 2, next += dim / 2) {
        __builtin_prefetch(next);
        const native_words bytes = load_bytes(codes);
        const native_floats low = codes_in(bytes, false), high = codes_in(bytes, true);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const native_floats p = broadcast_float(probs + m * kTile + b * kKiviSlots + slot);
          acc[m][0] += p * low;
          acc[m][1] += p * high;
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      std::memcpy(out + m * dim, &acc[m][0], kNativeBytes);
      std::memcpy(out + m * dim + kLanes, &acc[m][1], kNativeBytes);
    }
  }
};

// Kernel's function for `rows`, 1 to kKiviRows.
template <template <int> class Kernel, int M = kKiviRows>
auto codes_kernel(int64_t rows) -> decltype(&Kernel<1>::run) {
  if constexpr (M > 1)
    if (rows < M) return codes_kernel<Kernel, M - 1>(rows);
  return Kernel<M>::run;
}

// Scores of a block's 32 slots.
inline void score_block(const float *queries, int64_t num_rows, const KiviHead<const uint8_t> &keys, const uint8_t *next,
                        float factor, float *scores) {
  alignas(64) float scaled[kKiviRows * kLargestDim];
  float starts[kKiviRows];
  scale_queries(queries, num_rows, keys, next, scaled, starts);
  const auto run = codes_kernel<ScoreCodes>(num_rows);
  constexpr int64_t kAtOnce = 2 * kPartLanes;
  const int64_t half = 8 * keys.dim, apart = kPartLanes == kGroup ? half : kPartLanes;
  for (int64_t slot = 0; slot < kKiviSlots; slot += kAtOnce) {
    const int64_t from = slot / kGroup * half + slot % kGroup;
    run(scaled, starts, keys.dim, keys.codes + from, apart, next + from, factor, scores + slot);
  }
}

// out: [num_rows, dim], of some blocks of a tile, and kKiviAhead runs more. probs: rows of kTile, from the first of these
// blocks' slots on.
inline void weigh_blocks(const float *probs, int64_t num_rows, const uint8_t *const *values, int64_t num_blocks,
                         int64_t dim, float *out) {
  alignas(64) float scaled[kKiviRows * kTile];
  float starts[kKiviRows];
  const auto run = codes_kernel<WeighCodes>(num_rows);
  for (int64_t g = 0; g < dim / kKiviSlots; g++) {
    scale_probabilities(probs, num_rows, values, num_blocks, dim, g, scaled, starts);
    for (int64_t i = 0; i < kGroup; i += kPartLanes)
      run(scaled, starts, values, num_blocks, dim, g * kGroup + i, out + g * kKiviSlots + i);
  }
}

}  // namespace DIPTYCH_ISA
