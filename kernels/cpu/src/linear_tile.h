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
constexpr int kUnitBytes = kPanel * 4;  // of weights that are read at once, whatever their format: a word an output
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
  static floats add(floats acc, Vector a, Vector b) { return acc + a * b; }
};

template <>
struct Dot<bf16> {
  static constexpr int kStep = 2;
  using Vector = words;
  static Vector broadcast(const bf16 *a) { return words{} + load_raw<uint32_t>(a); }
  static floats add(floats acc, Vector a, Vector b) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += (floats)(a << 16) * (floats)(b << 16);
    return acc + (floats)(a & 0xffff0000u) * (floats)(b & 0xffff0000u);
#endif
  }
};

// What a tile multiplies by, and what becomes of the products.
struct Units {
  const char *first;  // k / Source::kInputs of them, the last padded with zeros
  int64_t k;
  const float *table;                // of kTable4
  const float *scales, *offsets;     // [kPanel] each, or null
  const char *fetch;                 // what to have in cache soon: two cache lines at each unit,
  int64_t fetch_step;                // so many bytes further on
};

// acc[r] = a[r] b, for Rows rows, of weights as Source reads them (linear_source.h); where there are scales, acc[r] +=
// scales * (a[r] b), and where there are offsets too, + offsets * totals[r], which is the sum of a[r].
// a: a_stride elements from row to row; totals: totals_stride; acc: [Rows][kPanel].
template <class T, class Source, int Rows>
void tile(const T *__restrict a, int64_t a_stride, const Units &of, const float *totals, int64_t totals_stride,
          float *__restrict acc) {
  const char *b = of.first, *fetch = of.fetch;
  const int64_t k = of.k, fetch_step = of.fetch_step;
  using D = Dot<T>;
  constexpr int kInputs = Source::kInputs, kSteps = kInputs / D::kStep;
  floats sum[Rows][kVectors] = {};
  auto units = [&](const T *from, int64_t stride, int64_t count) __attribute__((always_inline)) {
    // Three rows from one address: the processor has few registers for those.
    constexpr int kBases = (Rows + 2) / 3;
    const T *base[kBases];
    for (int i = 0; i < kBases; i++) base[i] = from + 3 * i * stride;
    for (int64_t unit = 0; unit < count; unit++) {
      __builtin_prefetch(fetch, 0, 2);
      __builtin_prefetch(fetch + 64, 0, 2);
      fetch += fetch_step;
      const Source source(b, of.table);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; s++) {
        typename D::Vector column[kVectors];
        for (int v = 0; v < kVectors; v++) column[v] = source.column(s, v);
        for (int r = 0; r < Rows; r++) {
          typename D::Vector row = D::broadcast(base[r / 3] + (r % 3) * stride + s * D::kStep);
          for (int v = 0; v < kVectors; v++) sum[r][v] = D::add(sum[r][v], row, column[v]);
        }
      }
      b += kUnitBytes;
      for (int i = 0; i < kBases; i++) base[i] += kInputs;
    }
  };
  units(a, a_stride, k / kInputs);
  if (const int64_t last = k % kInputs) {
    T tail[Rows][kInputs] = {};
    for (int r = 0; r < Rows; r++) std::memcpy(tail[r], a + r * a_stride + k - last, last * sizeof(T));
    units(tail[0], kInputs, 1);
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) {
      float *to = acc + r * kPanel + v * kWidth;
      if (of.scales) sum[r][v] = load_raw<floats>(to) + load_raw<floats>(of.scales + v * kWidth) * sum[r][v];
      if (of.offsets) sum[r][v] += load_raw<floats>(of.offsets + v * kWidth) * totals[r * totals_stride];
      std::memcpy(to, &sum[r][v], sizeof(floats));
    }
}

}  // namespace DIPTYCH_ISA
