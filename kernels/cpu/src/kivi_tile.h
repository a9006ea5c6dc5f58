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
constexpr int64_t kKiviAhead = 8;  // as kAhead, in heads of blocks
constexpr int64_t kLine = 64;      // bytes that are fetched at once

// Of bytes, the codes in their low four bits. The high ones are not made, for a byte is low + 16 high:
//
//     a low + b high = (a - b / 16) low + (b / 16) byte
inline native_floats low_codes(native_words bytes) {
#if defined(__AVX512F__)
  const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return (native_floats)_mm512_permutexvar_ps((__m512i)bytes, codes);  // by the four lowest bits
#else
  return __builtin_convertvector(bytes & 15, native_floats);
#endif
}

inline native_floats whole_bytes(native_words bytes) { return __builtin_convertvector(bytes, native_floats); }

// Lanes 2 j: lanes 2 j + 1 of v; the others 0.
inline native_floats odd_lanes(native_floats v) {
  using pairs = uint64_t __attribute__((vector_size(kNativeBytes)));
  return (native_floats)((pairs)v >> 32);
}

inline native_floats broadcast_float(const float *from) { return (native_floats)broadcast(from); }

// to: what the codes of a block's keys are multiplied by, [M, dim], in pairs of the low ones and the whole bytes; rest:
// queries . least numbers, [M].
template <int M>
struct ScaleQueries {
  static constexpr f32x16 kShares = {1, 0x1p-4f, 1, 0x1p-4f, 1, 0x1p-4f, 1, 0x1p-4f,
                                     1, 0x1p-4f, 1, 0x1p-4f, 1, 0x1p-4f, 1, 0x1p-4f};

  static void run(const float *queries, const KiviHead<const uint8_t> &keys, const uint8_t *next, float *to,
                  float *rest) {
    const int64_t dim = keys.dim;
    const bf16 *scales = keys.scales(), *leasts = keys.leasts();
    native_floats sums[M][kParts] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      __builtin_prefetch(next + 16 * dim + 2 * d);
      __builtin_prefetch(next + 18 * dim + 2 * d);
      const f32x16 scale = load(scales + d) * kShares, least = load(leasts + d);
#pragma GCC unroll 12
      for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++) {
          const native_floats q = part_of<native_floats>(queries + m * dim + d, p);
          const native_floats scaled = q * part_of<native_floats>(&scale, p);
          put_part(to + m * dim + d, p, scaled - odd_lanes(scaled));
          sums[m][p] += q * part_of<native_floats>(&least, p);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) rest[m] = sum(load_raw<f32x16>(sums[m]));
  }
};

// scores[m, ..] = factor * (rest[m] + queries[m] . codes), of as many slots as two vectors have lanes. queries: as
// ScaleQueries makes them; scores: rows of kTile. apart: bytes from one vector's codes to the other's.
template <int M>
struct ScoreCodes {
  static void run(const float *queries, const float *rest, int64_t dim, const uint8_t *codes, int64_t apart,
                  const uint8_t *next, float factor, float *scores) {
    native_floats acc[M][2] = {};
    for (int64_t j = 0; j < dim; j += 2) {
      if (j % 8 == 0) __builtin_prefetch(next + 8 * j), __builtin_prefetch(next + apart + 8 * j);
      const native_words bytes[2] = {load_bytes(codes + 8 * j), load_bytes(codes + apart + 8 * j)};
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        const native_floats one = half ? whole_bytes(bytes[0]) : low_codes(bytes[0]);
        const native_floats two = half ? whole_bytes(bytes[1]) : low_codes(bytes[1]);
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
      for (int n = 0; n < 2; n++) put_part(scores + m * kTile, n, (acc[m][n] + rest[m]) * factor);
  }
};

// to: probabilities times the scales of their slots, of the g-th 32 numbers of values; rest: probabilities . least
// numbers. probs, to: rows of kTile, from the first block's first slot on.
template <int M>
struct ScaleProbabilities {
  static void run(const float *probs, const uint8_t *const *values, int64_t num_blocks, int64_t dim, int64_t g,
                  float *to, float *rest) {
    native_floats sums[M][kParts] = {};
    for (int64_t b = 0; b < num_blocks; b++) {
      const int64_t place = 16 * dim + 2 * g * kKiviSlots;
      const uint8_t *scales = values[b] + place, *next = values[b + kKiviAhead] + place;
      __builtin_prefetch(next);
      __builtin_prefetch(next + 2 * dim);
#pragma GCC unroll 2
      for (int64_t s = 0; s < kKiviSlots; s += kLanes) {
        const auto *from = reinterpret_cast<const bf16 *>(scales) + s;
        const f32x16 scale = load(from), least = load(from + dim);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
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
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) rest[m] = sum(load_raw<f32x16>(sums[m]));
  }
};

// out[m, ..] and out[m, 16 + ..] = rest[m] + probs[m] . codes, in the low and in the high bits of the bytes `at` of
// every slot, as many as a vector has lanes. probs: rows of kTile; out: [M, dim].
template <int M>
struct WeighCodes {
  static void run(const float *probs, const float *rest, const uint8_t *const *values, int64_t num_blocks, int64_t dim,
                  int64_t at, float *out) {
    native_floats acc[M][2] = {};
    for (int64_t b = 0; b < num_blocks; b++) {
      // All D / 32 calls have as many bytes to read, so each fetches as many of the next run.
      const uint8_t *codes = values[b] + at, *next = values[b + kKiviAhead] + at / kGroup * kGroup * kKiviSlots;
      for (int64_t slot = 0; slot < kKiviSlots; slot++, codes += dim / 2) {
        if (slot % 4 == 0) __builtin_prefetch(next + slot / 4 * kLine);
        const native_words bytes = load_bytes(codes);
        const native_floats low = low_codes(bytes), whole = whole_bytes(bytes);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const native_floats p = broadcast_float(probs + m * kTile + b * kKiviSlots + slot);
          acc[m][0] += p * low;
          acc[m][1] += p * whole;
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) {
      const native_floats low = acc[m][0] + rest[m], high = (acc[m][1] - acc[m][0]) * 0x1p-4f + rest[m];
      std::memcpy(out + m * dim, &low, kNativeBytes);
      std::memcpy(out + m * dim + kLanes, &high, kNativeBytes);
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
inline void score_block(const float *queries, int64_t num_rows, const KiviHead<const uint8_t> &keys,
                        const uint8_t *next, float factor, float *scores) {
  alignas(64) float scaled[kKiviRows * kLargestDim];
  float rest[kKiviRows];
  codes_kernel<ScaleQueries>(num_rows)(queries, keys, next, scaled, rest);
  const auto run = codes_kernel<ScoreCodes>(num_rows);
  constexpr int64_t kAtOnce = 2 * kPartLanes;
  const int64_t half = 8 * keys.dim, apart = kPartLanes == kGroup ? half : kPartLanes;
  for (int64_t slot = 0; slot < kKiviSlots; slot += kAtOnce) {
    const int64_t from = slot / kGroup * half + slot % kGroup;
    run(scaled, rest, keys.dim, keys.codes + from, apart, next + from, factor, scores + slot);
  }
}

// out: [num_rows, dim], of some blocks of a tile, and kKiviAhead runs more. probs: rows of kTile, from the first
// block's first slot on.
inline void weigh_blocks(const float *probs, int64_t num_rows, const uint8_t *const *values, int64_t num_blocks,
                         int64_t dim, float *out) {
  alignas(64) float scaled[kKiviRows * kTile];
  float rest[kKiviRows];
  const auto run = codes_kernel<WeighCodes>(num_rows);
  for (int64_t g = 0; g < dim / kKiviSlots; g++) {
    codes_kernel<ScaleProbabilities>(num_rows)(probs, values, num_blocks, dim, g, scaled, rest);
    for (int64_t i = 0; i < kGroup; i += kPartLanes)
      run(scaled, rest, values, num_blocks, dim, g * kGroup + i, out + g * kKiviSlots + i);
  }
}

}  // namespace DIPTYCH_ISA
