// The inner loop of linear: a few rows by one panel, accumulators in registers.
//
// It uses vectors of the processor's own width: wider ones would live in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear.h"
#include "simd.h"

namespace DIPTYCH_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 12;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 2;
#else
constexpr int kVectorBytes = 16, kTileRows = 1;
#endif
constexpr int kWidth = kVectorBytes / 4, kVectors = kPanel / kWidth;
using floats = float __attribute__((vector_size(kVectorBytes)));
using words = uint32_t __attribute__((vector_size(kVectorBytes)));

// How many k one step takes, and the step itself.
template <class T>
struct Dot;

template <>
struct Dot<float> {
  static constexpr int kStep = 1;
  using Vector = floats;
  static Vector broadcast(const float *a) { return floats{} + *a; }
  static Vector broadcast_last(const float *a) { return broadcast(a); }
  static floats add(floats acc, Vector a, Vector b) { return acc + a * b; }
};

template <>
struct Dot<bf16> {
  static constexpr int kStep = 2;
  using Vector = words;
  static Vector broadcast(const bf16 *a) { return words{} + load_raw<uint32_t>(a); }
  static Vector broadcast_last(const bf16 *a) { return words{} + uint32_t(a->bits); }
  static floats add(floats acc, Vector a, Vector b) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (floats)(a << 16) * (floats)(b << 16);
    return acc + (floats)(a & 0xffff0000u) * (floats)(b & 0xffff0000u);
#endif
  }
};

// sums[r] = a[r] b over `k` inputs, for Rows rows.
// a: a_stride elements from row to row; b: [k / step][kPanel][step]; sums: [Rows][kPanel].
// fetch: what to have in cache soon, fetch_step bytes further on at each step: two cache lines.
template <class T, int Rows>
void tile(const T *__restrict a, int64_t a_stride, const T *__restrict b, int64_t k, float *__restrict sums,
          const char *fetch, int64_t fetch_step) {
  using D = Dot<T>;
  constexpr int kStep = D::kStep, kBases = (Rows + 2) / 3;
  floats sum[Rows][kVectors] = {};
  // Three rows from one address: the processor has few registers for those.
  const T *base[kBases];
  for (int i = 0; i < kBases; i++) base[i] = a + 3 * i * a_stride;
  auto step = [&](auto broadcast) {
    typename D::Vector column[kVectors];
    for (int v = 0; v < kVectors; v++) column[v] = load_raw<typename D::Vector>(b + v * kWidth * kStep);
    for (int r = 0; r < Rows; r++) {
      typename D::Vector row = broadcast(base[r / 3] + (r % 3) * a_stride);
      for (int v = 0; v < kVectors; v++) sum[r][v] = D::add(sum[r][v], row, column[v]);
    }
  };
  for (int64_t i = 0; i < k / kStep; i++) {
    __builtin_prefetch(fetch, 0, 2);
    __builtin_prefetch(fetch + 64, 0, 2);
    fetch += fetch_step;
    step([](const T *at) { return D::broadcast(at); });
    b += kPanel * kStep;
    for (int j = 0; j < kBases; j++) base[j] += kStep;
  }
  if (k % kStep) step([](const T *at) { return D::broadcast_last(at); });
  std::memcpy(sums, sum, sizeof sum);
}

}  // namespace DIPTYCH_ISA
