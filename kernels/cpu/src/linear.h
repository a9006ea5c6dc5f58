// x W^T with weights packed for the dot instruction, and what follows it in the same pass.
//
// Packed: panels of 32 outputs; within a panel, pairs of k (single ones for float): [n/32][k/2][32][2], zeros beyond n
// and k. One panel is one run of memory, read once and in order: a few rows take as long as reading the weights does.
// For a gated MLP a panel is 16 outputs of gate and the 16 of up that they meet.
//
// Quantised (linear_source.h): [n/32][k/4 or k/8][32] words of four or eight inputs of an output, multiplied as the
// numbers that they stand for; sums are scaled, by output, or by output and group of inputs. With offsets a weight is
// number * scale + offset: the offset is multiplied by the sum of a row's inputs.
#pragma once

#include <cstdint>

#include "simd.h"
#include "team.h"

namespace DIPTYCH_ISA {

constexpr int kPanel = 32;

enum Format : int32_t {
  kPlain = 0,   // weights of T
  kInt8 = 1,    // whole numbers
  kInt4 = 2,    // from -8 to 7
  kTable4 = 3,  // of 4 bits, each of which stands for one of 16 floats of a table
  kFp8 = 4,     // e4m3, none of them NaN (arXiv 2209.05433)
  kW8A8 = 5,    // whole numbers, as kInt8, that rows of whole numbers are multiplied by (linear_rows8.h)
};

// What is done with y = x W^T + bias, in float; rounded once.
enum EpilogueKind : int32_t {
  kStore = 0,
  kAdd = 1,      // out += y
  kSiluMul = 2,  // out[:, i] = silu(y[:, gate i]) * y[:, up i]: half as wide as y
  kGeluMul = 3,  // the same with GELU's tanh form
  kClampedMul = 4,  // gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), gate at most `limit`, up within +-limit
};

struct Epilogue {
  EpilogueKind what;
  float alpha, limit;  // of kClampedMul
  Epilogue(EpilogueKind of, float with_alpha = 0.0f, float with_limit = 0.0f)
      : what(of), alpha(with_alpha), limit(with_limit) {}
};

// Mirrored by linear.py. Made by its `pack`.
struct Linear {
  const void *weight;   // packed
  const float *scales;   // [n/32][k/group][32], as pack_ratios makes them; null for kPlain
  const float *offsets;  // as scales, or null: 0
  const float *table;    // [16], for kTable4, then of the same as bf16 16 low bytes and 16 high ones
  const int32_t *sums;   // [n/32][32]: of each output's numbers, for kW8A8
  const float *bias;     // in packed order, [n rounded up to 32], or null
  int64_t n, k;          // outputs (gate and up both), inputs
  int32_t format, is_gated;
  int64_t group;  // inputs that share a scale: k or more, or a multiple of 8, at most 512; the last may be shorter
  const int32_t *order;  // [k]: the input of a row that has each place, or null: each has its own; not of kW8A8
  // Inputs that are summed at once where groups' sums are scaled: whole groups, and one alone where an output's scales are
  // too far apart for a common sum.
  int64_t at_once;
  int64_t are_powers;  // 1: scales are powers of two, so that what is unpacked can be scaled exactly
  int64_t by_tiles;    // 1: the matrix unit multiplies (linear_tiles.h), weights of bf16 and those of kW8A8
};

constexpr int64_t kMostInGroup = 512;

constexpr bool is_of_4_bits(int32_t format) { return format == kInt4 || format == kTable4; }

// Whether each group's sums are scaled before they are added, and not the sum of all.
inline bool is_by_group(const Linear &of) {
  return is_of_4_bits(of.format) || (of.format != kPlain && (of.group < of.k || of.offsets));
}

inline int64_t num_groups(const Linear &of) { return (of.k + of.group - 1) / of.group; }

// Consecutive rows of a weight that is to be packed. Mirrored by linear.py.
struct WeightRows {
  const void *rows;
  int64_t num_rows, stride;  // elements from row to row
};

// `count` panels of it, or those that there are, beginning with the `first`; not of a gate.
template <class T>
Linear panels_of(const Linear &of, int64_t first, int64_t count) {
  const int64_t inputs = is_of_4_bits(of.format) ? 8 : of.format != kPlain ? 4 : 4 / sizeof(T);  // of a word
  const int64_t skipped = first * kPanel, left = of.n - skipped;
  Linear some = of;
  some.weight = (const uint32_t *)of.weight + skipped * ((of.k + inputs - 1) / inputs);
  if (of.scales) some.scales = of.scales + skipped * num_groups(of);
  if (of.offsets) some.offsets = of.offsets + skipped * num_groups(of);
  some.sums = of.sums ? of.sums + skipped : nullptr;
  some.bias = of.bias ? of.bias + skipped : nullptr;
  some.n = left < count * kPanel ? left : count * kPanel;
  return some;
}

// The part of it that thread `index` of `size` does: whole panels. No barrier at the end.
// x: [num_rows, k], x_stride elements from row to row; out: [num_rows, n], or n / 2 for a gate; they do not overlap.
// Each output is summed over k in chunks whose places k alone decides, each in order and in one accumulator: it depends on
// its own row alone, bit for bit.
// T: float or bf16; Out: T, or float.
template <class T, class Out>
void linear(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
            Epilogue epilogue, int index, int size);

// `panels` of it alone: of 32 outputs each, 16 of a gate. Otherwise the same.
template <class T, class Out>
void linear_panels(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
                   const Epilogue &epilogue, Span panels);

int64_t num_panels(const Linear &of);

// Rows, at most, that are multiplied by a panel before the next panel: they stay in cache. More are as many times that.
template <class T>
int64_t rows_at_once(const Linear &of);

constexpr int64_t kMostRowsAtOnce = 240;

}  // namespace DIPTYCH_ISA
