// What attention computes within one tile of the context: scores, their softmax, and the values that they weigh.
//
// Every sum goes over head_dim or slots in one order for each number of the result, however many rows are beside it.
//
// S is what the cache stores. T is what is multiplied by it: S itself, or floats beside scaled numbers, which are widened
// in registers; a key's scale multiplies its scores, a value's the probability that it is weighed by.
#pragma once

#include <cmath>
#include <cstring>

#include "attention.h"
#include "team.h"

namespace DIPTYCH_ISA {

// Registers of results: kRows x kVectors, beside kVectors that are multiplied. Numbers that are to be widened first are
// for as many rows as there may be.
#if defined(__AVX512F__)
template <class S>
constexpr int kRows = 6;
template <class S>
constexpr int kVectors = 4;
#else
template <class S>
constexpr int kRows = kIsScaled<S> ? 4 : 2;
template <class S>
constexpr int kVectors = kIsScaled<S> && kNumbersIn<S> == 1 ? 1 : 2;
#endif

// What is multiplied by numbers of S.
template <class T, class S>
using Factor = std::conditional_t<kIsScaled<S> || std::is_same_v<S, Kivi>, float, T>;

inline f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, const float *) { return acc + (f32x16)a * (f32x16)b; }
inline f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, const bf16 *) { return dot2(acc, a, b); }

// Vectors of the processor's own width, kParts for sixteen lanes: wider ones would be kept in memory between products.
constexpr int kParts = int(sizeof(f32x16)) / kNativeBytes;
constexpr int kPartLanes = kLanes / kParts;

inline native_words broadcast(const void *from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return native_words{} + bits;
}

// acc + a * b, of floats; of bf16, in pairs.
template <class S>
inline native_floats multiply_add(native_floats acc, native_words a, native_words b) {
  if constexpr (sizeof(S) != sizeof(bf16)) return acc + (native_floats)a * (native_floats)b;
#if defined(__AVX512BF16__)
  return (native_floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  constexpr int32_t kHigh = int32_t(0xffff0000u);
  acc += (native_floats)(a << 16) * (native_floats)(b << 16);
  return acc + (native_floats)(a & kHigh) * (native_floats)(b & kHigh);
#endif
}

// Some of sixteen lanes: as they are stored, or the floats that scaled numbers are, without their scale.
template <class S>
inline native_words load_part(const S *from, int part) {
  if constexpr (kIsScaled<S>) return (native_words)load_native(from + part * kPartLanes);
  else return part_of<native_words>(from, part);
}

// Where one S has a number of each half of a vector, tiles have the halves of queries in turn, number by number, and those
// of results in turn, sixteen at a time: so what is next to each other is of the same bytes.

// Numbers of a group of keys: of step j, kPack dims, those of all slots.
template <class S>
struct OfKeys {
  static const S *at(const S *group, int64_t j, int64_t) { return group + j / kNumbersIn<S> * kGroup * kPack<S>; }
  static native_words load(const S *from, int64_t j, int, int part) {
    if constexpr (kNumbersIn<S> == 2) return (native_words)load_one_of_each(from + part * kPartLanes, j % 2);
    else return load_part(from, part);
  }
};

// Numbers of a group of values: of step j, kPack slots, those of sixteen dims, the n-th sixteen. step: between slots.
template <class S>
struct OfValues {
  static const S *at(const S *columns, int64_t j, int64_t step) { return columns + j * step; }
  static native_words load(const S *from, int64_t, int n, int part) {
    if constexpr (kNumbersIn<S> == 2) return (native_words)load_one_of_each(from + part * kPartLanes, n % 2);
    else return load_part(from, part);
  }
};

// x: [dim], of a query: its halves in turn, number by number.
inline void interleave_halves(float *x, int64_t dim) {
  alignas(64) float halves[kLargestDim];
  std::memcpy(halves, x, dim * sizeof(float));
  for (int64_t i = 0; i < dim / 2; i++) x[2 * i] = halves[i], x[2 * i + 1] = halves[dim / 2 + i];
}

// x: [dim], of a result, whose halves are in turn, sixteen at a time: one after the other.
inline void part_halves(float *x, int64_t dim) {
  alignas(64) float turns[kLargestDim];
  std::memcpy(turns, x, dim * sizeof(float));
  for (int64_t i = 0; i < dim / 2; i += kLanes) {
    store(x + i, load(turns + 2 * i));
    store(x + dim / 2 + i, load(turns + 2 * i + kLanes));
  }
}

// Runs of memory are read in the order of a list, and while one is, the one so far behind it is fetched, at the same
// pace: the processor does not see what follows in a table of blocks, and many fetches at once would stop it.
constexpr int64_t kAhead = 8;

// acc[m][n] += sum over `steps` of a[m][i] * b[n][i]: kPack numbers of a row of `a`, and as many in each lane of b, which
// Of reads. next: what is fetched, at the same pace as b is read, a line of memory once.
template <class Of, class S, class T, int M, int N>
__attribute__((always_inline)) inline void accumulate(native_floats (&acc)[M][N][kParts], const T *a, int64_t a_stride,
                                                      const S *const (&b)[N], const S *const (&next)[N],
                                                      int64_t b_step, int64_t steps) {
  constexpr int kSteps = kIsScaled<S> ? 4 : 1;  // whose numbers fill a line, where they are side by side
  for (int64_t i = 0; i < steps; i += kSteps) {
#pragma GCC unroll 4
    for (int64_t j = 0; j < kSteps; j++) {
      native_words right[N][kParts];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        if (j == 0 || b_step > kGroup) __builtin_prefetch(Of::at(Of::at(next[n], i, b_step), j, b_step));
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++) right[n][p] = Of::load(Of::at(Of::at(b[n], i, b_step), j, b_step), j, n, p);
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        native_words left = broadcast(a + m * a_stride + (i + j) * kPack<S>);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
          for (int p = 0; p < kParts; p++) acc[m][n][p] = multiply_add<S>(acc[m][n][p], left, right[n][p]);
      }
    }
  }
}

// The part of sixteen lanes at `to`.
inline void put_part(float *to, int part, native_floats v) { std::memcpy(to + part * kPartLanes, &v, sizeof v); }

template <int M, int N>
__attribute__((always_inline)) inline void clear(native_floats (&acc)[M][N][kParts]) {
#pragma GCC unroll 6
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
      for (int p = 0; p < kParts; p++) acc[m][n][p] = native_floats{};
}

// The scales of a group's slots.
template <class S>
inline f32x16 load_scales(const S *group, int64_t dim) {
  return load(scales_of(group, dim)) * kUnit<S>;
}

// scores[m, 16 n ..] = factor * q[m] . k of N groups, and kAhead runs more. q: [M, dim]; scores: rows of kTile.
template <class S, int M, int N>
struct Score {
  template <class T>
  static void run(const T *q, int64_t dim, const S *const *keys, float factor, float *scores) {
    native_floats acc[M][N][kParts];
    clear(acc);
    const S *groups[N], *next[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) groups[n] = keys[n], next[n] = keys[n + kAhead];
    accumulate<OfKeys<S>, S, T, M, N>(acc, q, dim, groups, next, kGroup * kPack<S>, dim / kPack<S>);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      f32x16 each = splat(factor);
      if constexpr (kIsScaled<S>) each *= load_scales(groups[n], dim);
#pragma GCC unroll 6
      for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++)
          put_part(scores + m * kTile + n * kGroup, p, acc[m][n][p] * part_of<native_floats>(&each, p));
    }
  }
};

// out[m, 16 n ..] = sum over the slots of `num_groups` groups, and kAhead runs more, of probs[m] * v[from + 16 n ..].
// probs: rows of kTile floats' size.
template <class S, int M, int N>
struct Weigh {
  template <class T>
  static void run(const T *probs, const S *const *values, int64_t num_groups, int64_t dim, int64_t from, float *out) {
    native_floats acc[M][N][kParts];
    clear(acc);
    for (int64_t g = 0; g < num_groups; g++) {
      const S *columns[N], *next[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        int64_t column = (from / kNumbersIn<S> + n / kNumbersIn<S> * kLanes) * kPack<S>;
        columns[n] = values[g] + column, next[n] = values[g + kAhead] + column;
      }
      accumulate<OfValues<S>, S, T, M, N>(acc, probs + g * kGroup, kTile * kPack<T>, columns, next,
                                          dim * kPack<S> / kNumbersIn<S>, kGroup / kPack<S>);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int p = 0; p < kParts; p++) put_part(out + m * dim + n * kLanes, p, acc[m][n][p]);
  }
};

// Kernel's function for `rows` (1 to kRows) and `vectors` (1 to kVectors).
template <template <class, int, int> class Kernel, class T, class S, int M = kRows<S>, int N = kVectors<S>>
auto kernel_for(int64_t rows, int64_t vectors) -> decltype(&Kernel<S, 1, 1>::template run<T>) {
  if constexpr (M > 1)
    if (rows < M) return kernel_for<Kernel, T, S, M - 1, N>(rows, vectors);
  if constexpr (N > 1)
    if (vectors < N) return kernel_for<Kernel, T, S, M, N - 1>(rows, vectors);
  return Kernel<S, M, N>::template run<T>;
}

// Scores of a group: capped, and those outside slots [begin, end) of it -infinity.
inline void limit_scores(float *scores, int64_t begin, int64_t end, float cap) {
  f32x16 score = load(scores);
  if (cap != 0.0f) score = tanh(score) * cap;
  i32x16 low = i32x16{} + int32_t(begin < 0 ? 0 : begin < kGroup ? begin : kGroup);
  i32x16 high = i32x16{} + int32_t(end < 0 ? 0 : end < kGroup ? end : kGroup);
  store(scores, choose(at_most(low, kLaneIds) & at_most(kLaneIds, high - 1), score, splat(-INFINITY)));
}

// A row's scores in `groups` become 2^(score - their maximum), of T, those outside slots [begin, end) 0.
// cap: 0, or what tanh of the scores is multiplied by first.
template <class T>
__attribute__((noinline)) void soften_row(float *scores, Span groups, int64_t begin, int64_t end, float cap,
                                          float &maximum, float &sum_out) {
  native_floats highest[kParts], sums[kParts] = {};
  for (native_floats &part : highest) part = native_floats{} - INFINITY;
  for (int64_t g = groups.first; g < groups.last; g++) {
    int64_t first = begin - g * kGroup, last = end - g * kGroup;
    if (cap != 0.0f || first > 0 || last < kGroup) limit_scores(scores + g * kGroup, first, last, cap);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; p++) {
      native_floats score = part_of<native_floats>(scores + g * kGroup, p);
      highest[p] = highest[p] > score ? highest[p] : score;
    }
  }
  maximum = largest(load_raw<f32x16>(highest));
  float base = maximum == -INFINITY ? 0.0f : maximum;
  T *probs = reinterpret_cast<T *>(scores);
  for (int64_t g = groups.first; g < groups.last; g++) {
    native_floats weights[kParts];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; p++) {
      weights[p] = exp2_below_native(part_of<native_floats>(scores + g * kGroup, p) - base);
      sums[p] += weights[p];
    }
    store(probs + g * kGroup, load_raw<f32x16>(weights));
  }
  sum_out = sum(load_raw<f32x16>(sums));
}

// Multiplies a row's probabilities in `groups` by the scales of their values. values: of the tile's groups from `first`.
template <class S>
inline void scale_row(float *probs, Span groups, const S *const *values, int64_t dim) {
  for (int64_t g = groups.first; g < groups.last; g++) {
    f32x16 scales = load_scales(values[g - groups.first], dim);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; p++)
      put_part(probs + g * kGroup, p,
               part_of<native_floats>(probs + g * kGroup, p) * part_of<native_floats>(&scales, p));
  }
}

}  // namespace DIPTYCH_ISA
