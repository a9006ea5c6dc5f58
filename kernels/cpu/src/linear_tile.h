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

#if defined(__AVX512BF16__)
constexpr bool kDotsBf16 = true;
#else
constexpr bool kDotsBf16 = false;
#endif

// a * b + c, rounded once where the processor can, and never otherwise there.
inline floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

template <>
struct Dot<float> {
  static constexpr int kStep = 1;
  using Vector = floats;  // of rows, one number in each lane
  using Column = floats;  // of weights
  using Stored = floats;  // the same in memory, of plain weights
  static Vector broadcast(const float *a) { return floats{} + *a; }
  static Column column_of(floats stored) { return stored; }
  static Column load(const char *from) { return load_raw<floats>(from); }  // `load`, `store`: as they are
  static void store(char *to, Column column) { std::memcpy(to, &column, sizeof column); }
  static Column scaled(Column of, floats scale, floats offset) { return multiply_add(of, scale, offset); }
  static floats add(floats acc, Vector a, Column b) { return acc + a * b; }
};

template <>
struct Dot<bf16> {
  static constexpr int kStep = 2;
  using Vector = words;
  using Stored = words;
  static Vector broadcast(const bf16 *a) { return words{} + load_raw<uint32_t>(a); }
#if defined(__AVX512BF16__)
  using Column = words;
  static Column column_of(words stored) { return stored; }
  static void store(char *to, Column column) { std::memcpy(to, &column, sizeof column); }
  static floats add(floats acc, Vector a, Column b) {
    return (floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
  }
#else
  struct Column {
    floats even, odd;
  };
  static Column column_of(words stored) { return {(floats)(stored << 16), (floats)(stored & 0xffff0000u)}; }
  static Column load(const char *from) { return {load_raw<floats>(from), load_raw<floats>(from + kVectorBytes)}; }
  static void store(char *to, Column column) {
    std::memcpy(to, &column.even, sizeof column.even);
    std::memcpy(to + kVectorBytes, &column.odd, sizeof column.odd);
  }
  static Column scaled(Column of, floats scale, floats offset) {
    return {multiply_add(of.even, scale, offset), multiply_add(of.odd, scale, offset)};
  }
  static floats add(floats acc, Vector a, Column b) {
    acc += (floats)(a << 16) * b.even;
    return acc + (floats)(a & 0xffff0000u) * b.odd;
  }
#endif
};

// What a tile multiplies by, and what becomes of the products.
struct Units {
  const char *first;  // k / Source::kInputs of them, the last padded with zeros
  int64_t k;
  const float *table;                // of kTable4
  // Of a Source by group, [kPanel] for each group, of so many inputs: a weight is number * scale + offset. offset_step: 0
  // where all groups have the same offsets.
  const float *scales, *offsets;
  int64_t group, offset_step;
  const float *sum_scales, *sum_offsets;  // [kPanel] each, or null
  const char *fetch;                 // what to have in cache soon: two cache lines at each unit,
  int64_t fetch_step;                // so many bytes further on
};

// acc[r] = a[r] b, for Rows rows, of weights as Source reads them (linear_source.h); where there are sum_scales, acc[r] +=
// scales * (a[r] b), and where there are sum_offsets too, + offsets * totals[r], which is the sum of a[r].
// a: a_stride elements from row to row; totals: totals_stride; acc: [Rows][kPanel].
template <class T, class Source, int Rows>
void tile(const T *__restrict a, int64_t a_stride, const Units &of, const float *totals, int64_t totals_stride,
          float *__restrict acc) {
  using D = Dot<T>;
  constexpr int kInputs = Source::kInputs, kSteps = kInputs / D::kStep;
  const char *b = of.first, *fetch = of.fetch;
  const int64_t fetch_step = of.fetch_step;
  const float *const table = of.table;
  floats sum[Rows][kVectors] = {}, scale[kVectors], offset[kVectors];
  auto units = [&](const T *from, int64_t stride, int64_t count) __attribute__((always_inline)) {
    // Three rows from one address: the processor has few registers for those.
    constexpr int kBases = (Rows + 2) / 3;
    const T *base[kBases];
    for (int i = 0; i < kBases; i++) base[i] = from + 3 * i * stride;
    for (int64_t unit = 0; unit < count; unit++) {
      __builtin_prefetch(fetch, 0, 2);
      __builtin_prefetch(fetch + 64, 0, 2);
      fetch += fetch_step;
      const Source source(b, table);
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; s++) {
        typename D::Column column[kVectors];
        for (int v = 0; v < kVectors; v++) {
          column[v] = source.column(s, v);
          if constexpr (Source::kByGroup) column[v] = D::scaled(column[v], scale[v], offset[v]);
        }
        for (int r = 0; r < Rows; r++) {
          typename D::Vector row = D::broadcast(base[r / 3] + (r % 3) * stride + s * D::kStep);
          for (int v = 0; v < kVectors; v++) sum[r][v] = D::add(sum[r][v], row, column[v]);
        }
      }
      b += Source::kBytes;
      for (int i = 0; i < kBases; i++) base[i] += kInputs;
    }
  };
  const int64_t group = Source::kByGroup ? of.group : of.k;
  for (int64_t i = 0, g = 0; i < of.k; i += group, g++) {
    const int64_t k = of.k - i < group ? of.k - i : group;
    if constexpr (Source::kByGroup)
      for (int v = 0; v < kVectors; v++) {
        scale[v] = load_raw<floats>(of.scales + g * kPanel + v * kWidth);
        offset[v] = load_raw<floats>(of.offsets + g * of.offset_step + v * kWidth);
      }
    units(a + i, a_stride, k / kInputs);
    if (const int64_t last = k % kInputs) {
      T tail[Rows][kInputs] = {};
      for (int r = 0; r < Rows; r++) std::memcpy(tail[r], a + r * a_stride + i + k - last, last * sizeof(T));
      units(tail[0], kInputs, 1);
    }
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) {
      float *to = acc + r * kPanel + v * kWidth;
      if (of.sum_scales) sum[r][v] = load_raw<floats>(to) + load_raw<floats>(of.sum_scales + v * kWidth) * sum[r][v];
      if (of.sum_offsets) sum[r][v] += load_raw<floats>(of.sum_offsets + v * kWidth) * totals[r * totals_stride];
      std::memcpy(to, &sum[r][v], sizeof(floats));
    }
}

}  // namespace DIPTYCH_ISA
