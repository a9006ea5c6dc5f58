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
constexpr int kVectors = kIsScaled<S> ? 1 : 2;
#endif

// What is multiplied by numbers of S.
template <class T, class S>
using Factor = std::conditional_t<kIsScaled<S>, float, T>;

inline u32x16 broadcast(const void *from) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  return u32x16{} + bits;
}

inline f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, const float *) { return acc + (f32x16)a * (f32x16)b; }
inline f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, const bf16 *) { return dot2(acc, a, b); }

// Runs of memory are read in the order of a list, and while one is, the one so far behind it is fetched, at the same
// pace: the processor does not see what follows in a table of blocks, and many fetches at once would stop it.
constexpr int64_t kAhead = 4;

// acc[m][n] += sum over `steps` of a[m][i] * b[n][i]: kPack numbers of a row of `a`, and as many in each lane of b.
// next: what is fetched, at the same pace as b is read.
template <class T, int M, int N>
__attribute__((always_inline)) inline void accumulate(f32x16 (&acc)[M][N], const T *a, int64_t a_stride,
                                                      const T *const (&b)[N], const T *const (&next)[N],
                                                      int64_t b_step, int64_t steps) {
  for (int64_t i = 0; i < steps; i++) {
    u32x16 right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      __builtin_prefetch(next[n] + i * b_step);
      right[n] = load_raw<u32x16>(b[n] + i * b_step);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) {
      u32x16 left = broadcast(a + m * a_stride + i * kPack<T>);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) acc[m][n] = multiply_add(acc[m][n], left, right[n], a);
    }
  }
}

// The same of scaled numbers, without their scales: one number of a row of `a`, and one in each lane of b. Lines of
// kLine are fetched once; `steps` is a multiple of 4.
template <class S, int M, int N>
  requires kIsScaled<S>
__attribute__((always_inline)) inline void accumulate(f32x16 (&acc)[M][N], const float *a, int64_t a_stride,
                                                      const S *const (&b)[N], const S *const (&next)[N],
                                                      int64_t b_step, int64_t steps) {
  for (int64_t i = 0; i < steps; i += 4) {
#pragma GCC unroll 4
    for (int64_t j = i; j < i + 4; j++) {
      f32x16 right[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        if (j == i || b_step > kGroup) __builtin_prefetch(next[n] + j * b_step);
        right[n] = load(b[n] + j * b_step);
      }
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) {
        f32x16 left = splat(a[m * a_stride + j]);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) acc[m][n] += left * right[n];
      }
    }
  }
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
    f32x16 acc[M][N] = {};
    const S *groups[N], *next[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) groups[n] = keys[n], next[n] = keys[n + kAhead];
    accumulate<S, M, N>(acc, q, dim, groups, next, kGroup * kPack<S>, dim / kPack<S>);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      f32x16 each = splat(factor);
      if constexpr (kIsScaled<S>) each *= load_scales(groups[n], dim);
#pragma GCC unroll 6
      for (int m = 0; m < M; m++) store(scores + m * kTile + n * kGroup, acc[m][n] * each);
    }
  }
};

// out[m, 16 n ..] = sum over the slots of `num_groups` groups, and kAhead runs more, of probs[m] * v[from + 16 n ..].
// probs: rows of kTile floats' size.
template <class S, int M, int N>
struct Weigh {
  template <class T>
  static void run(const T *probs, const S *const *values, int64_t num_groups, int64_t dim, int64_t from, float *out) {
    f32x16 acc[M][N] = {};
    for (int64_t g = 0; g < num_groups; g++) {
      const S *columns[N], *next[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        int64_t column = (from + n * kLanes) * kPack<S>;
        columns[n] = values[g] + column, next[n] = values[g + kAhead] + column;
      }
      accumulate<S, M, N>(acc, probs + g * kGroup, kTile * kPack<T>, columns, next, dim * kPack<S>, kGroup / kPack<S>);
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) store(out + m * dim + n * kLanes, acc[m][n]);
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

// A row's scores in `groups` become 2^(score - their maximum), of T, those outside slots [begin, end) 0.
// cap: 0, or what tanh of the scores is multiplied by first.
template <class T>
__attribute__((noinline)) void soften_row(float *scores, Span groups, int64_t begin, int64_t end, float cap,
                                          float &maximum, float &sum_out) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  f32x16 highest = splat(-INFINITY);
  for (int64_t g = groups.first; g < groups.last; g++) {
    f32x16 score = load(scores + g * kGroup);
    if (cap != 0.0f) score = tanh(score) * cap;
    int64_t first = begin - g * kGroup, last = end - g * kGroup;
    if (first > 0 || last < kGroup) {
      i32x16 low = i32x16{} + int32_t(first < 0 ? 0 : first < kGroup ? first : kGroup);
      i32x16 high = i32x16{} + int32_t(last < 0 ? 0 : last < kGroup ? last : kGroup);
      score = choose(at_most(low, lanes) & at_most(lanes, high - 1), score, splat(-INFINITY));
    }
    store(scores + g * kGroup, score);
    highest = max(highest, score);
  }
  maximum = largest(highest);
  float base = maximum == -INFINITY ? 0.0f : maximum;
  f32x16 sums{};
  T *probs = reinterpret_cast<T *>(scores);
  for (int64_t g = groups.first; g < groups.last; g++) {
    f32x16 weight = exp2_below(load(scores + g * kGroup) - base);
    store(probs + g * kGroup, weight);
    sums += weight;
  }
  sum_out = sum(sums);
}

// Multiplies a row's probabilities in `groups` by the scales of their values. values: of the tile's groups from `first`.
template <class S>
inline void scale_row(float *probs, Span groups, const S *const *values, int64_t dim) {
  for (int64_t g = groups.first; g < groups.last; g++)
    store(probs + g * kGroup, load(probs + g * kGroup) * load_scales(values[g - groups.first], dim));
}

}  // namespace DIPTYCH_ISA
