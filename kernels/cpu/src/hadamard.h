// Hadamard transform of vectors, as workers/kv/dtypes.py says why.
#pragma once

#include "simd.h"

namespace DIPTYCH_ISA {

// Number of neighbours that it is taken of at a time.
inline int64_t transform_size(int64_t dim) { return dim / 2 & -(dim / 2); }

// Lane i: lane i ^ at of v.
inline f32x16 partners(f32x16 v, int at) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_permutexvar_ps((__m512i)(kLaneIds ^ at), (__m512)v);
#else
  f32x16 swapped;
  for (int i = 0; i < kLanes; i++) swapped[i] = v[i ^ at];
  return swapped;
#endif
}

// x: [dim], a multiple of 16, becomes its transform, not divided by anything. A sum's terms are added in one order, the
// nearest first, as kernels/kv/kv_scales.py adds them.
inline void hadamard(float *x, int64_t dim) {
  const int64_t size = transform_size(dim);
  for (int64_t i = 0; i < dim; i += kLanes) {
    f32x16 v = load(x + i);
    for (int at = 1; at < kLanes && at < size; at *= 2) {
      const f32x16 other = partners(v, at);
      v = choose((kLaneIds & at) == 0, v + other, other - v);
    }
    store(x + i, v);
  }
  for (int64_t at = kLanes; at < size; at *= 2)
    for (int64_t begin = 0; begin < dim; begin += 2 * at)
      for (int64_t i = begin; i < begin + at; i += kLanes) {
        const f32x16 first = load(x + i), second = load(x + i + at);
        store(x + i, first + second);
        store(x + i + at, first - second);
      }
}

// The inverse: of a transform, what it was taken of; of a query, what a stored key is multiplied by.
inline void hadamard_inverse(float *x, int64_t dim) {
  hadamard(x, dim);
  const float share = 1.0f / float(transform_size(dim));  // a power of two
  for (int64_t i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * share);
}

}  // namespace DIPTYCH_ISA
