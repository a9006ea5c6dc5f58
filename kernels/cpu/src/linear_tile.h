// The inner loop of linear: a few rows by one panel, accumulators in registers.
//
// It uses vectors of the processor's own width: wider ones would live in memory.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear.h"
#include "simd.h"

namespace DIPTYCH_ISA {

// kTileRows: at most, in a tile. kDirectRows: up to so many, quantised weights are unpacked in registers, by each tile anew.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 12, kDirectRows = 16;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 2, kDirectRows = 4;
#else
constexpr int kVectorBytes = 16, kTileRows = 1, kDirectRows = 2;
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
  const float *table;  // of kTable4
  bool continues;      // the sums are added to those of the inputs before
  // [kPanel] for each group, of so many inputs: a weight is number * scale + offset. offset_step: 0 where all groups have
  // the same offsets. Of a Source by group, and of tile_of_groups, where `scales` are as pack_ratios makes them.
  const float *scales, *offsets;
  int64_t group, offset_step;
  const char *fetch;  // what to have in cache soon: two cache lines at each unit,
  int64_t fetch_step;  // so many bytes further on
};

// Sums of products of Rows rows and one panel, in registers, and where the weights are read.
template <class T, class Source, int Rows>
struct Sums {
  using D = Dot<T>;
  static constexpr int kInputs = Source::kInputs, kSteps = kInputs / D::kStep;
  const char *b, *fetch;
  const int64_t fetch_step;
  const float *const table;
  floats of[Rows][kVectors], scale[kVectors], offset[kVectors];  // the last two: of a Source by group

  __attribute__((always_inline)) explicit Sums(const Units &by)
      : b(by.first), fetch(by.fetch), fetch_step(by.fetch_step), table(by.table), of{} {}

  // Adds a[r] b of the next k inputs. a: a_stride elements from row to row.
  __attribute__((always_inline)) void add(const T *a, int64_t a_stride, int64_t k) {
    add_units(a, a_stride, k / kInputs);
    add_rest(a, a_stride, k);
  }

  // Of k inputs, those that are no whole unit, once the others were added.
  __attribute__((always_inline)) void add_rest(const T *a, int64_t a_stride, int64_t k) {
    if (const int64_t last = k % kInputs) {
      T tail[Rows][kInputs] = {};
      for (int r = 0; r < Rows; r++) std::memcpy(tail[r], a + r * a_stride + k - last, last * sizeof(T));
      add_units(tail[0], kInputs, 1);
    }
  }

  __attribute__((always_inline)) void add_units(const T *from, int64_t stride, int64_t count) {
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
          for (int v = 0; v < kVectors; v++) of[r][v] = D::add(of[r][v], row, column[v]);
        }
      }
      b += Source::kBytes;
      for (int i = 0; i < kBases; i++) base[i] += kInputs;
    }
  }
};

// acc[r] = a[r] b, or acc[r] += a[r] b, for Rows rows, of weights as Source reads them (linear_source.h).
// a: a_stride elements from row to row; acc: [Rows][kPanel].
template <class T, class Source, int Rows>
void tile(const T *__restrict a, int64_t a_stride, const Units &by, const float *, int64_t, float *__restrict acc) {
  Sums<T, Source, Rows> sums(by);
  const int64_t group = Source::kByGroup ? by.group : by.k;
  for (int64_t i = 0, g = 0; i < by.k; i += group, g++) {
    if constexpr (Source::kByGroup)
      for (int v = 0; v < kVectors; v++) {
        sums.scale[v] = load_raw<floats>(by.scales + g * kPanel + v * kWidth);
        sums.offset[v] = load_raw<floats>(by.offsets + g * by.offset_step + v * kWidth);
      }
    sums.add(a + i, a_stride, by.k - i < group ? by.k - i : group);
  }
  for (int r = 0; r < Rows; r++)
    for (int v = 0; v < kVectors; v++) {
      float *to = acc + r * kPanel + v * kWidth;
      if (by.continues) sums.of[r][v] += load_raw<floats>(to);
      std::memcpy(to, &sums.of[r][v], sizeof(floats));
    }
}

// The same of weights whose groups' sums are scaled: acc[r] = sum of scales * (a[r] b), and of offsets * totals[r].
// totals: of each row and group the sum of its inputs, totals_stride from row to row; null where there are no offsets.
// Sums stay in registers: they are in units of their group's scale, and before the next group become ones of its own.
template <class T, class Source, int Rows>
void tile_of_groups(const T *__restrict a, int64_t a_stride, const Units &by, const float *totals, int64_t totals_stride,
                    float *__restrict acc) {
  Sums<T, Source, Rows> sums(by);
  const T *from = a;
  const float *ratios = by.scales;
  for (int64_t left = by.k;;) {
    sums.add_units(from, a_stride, (left < by.group ? left : by.group) / Sums<T, Source, Rows>::kInputs);
    left -= by.group;
    if (left <= 0) break;
    from += by.group;
    ratios += kPanel;
    for (int v = 0; v < kVectors; v++) {
      const floats ratio = load_raw<floats>(ratios + v * kWidth);
      for (int r = 0; r < Rows; r++) sums.of[r][v] *= ratio;
    }
  }
  sums.add_rest(from, a_stride, a + by.k - from);
  for (int v = 0; v < kVectors; v++) {
    const floats scale = load_raw<floats>(by.scales + v * kWidth);
    for (int r = 0; r < Rows; r++) {
      const floats before = by.continues ? load_raw<floats>(acc + r * kPanel + v * kWidth) : floats{};
      sums.of[r][v] = multiply_add(scale, sums.of[r][v], before);
    }
  }
  if (totals)
    for (int64_t g = 0; g * by.group < by.k; g++)
      for (int v = 0; v < kVectors; v++) {
        const floats offset = load_raw<floats>(by.offsets + g * kPanel + v * kWidth);
        for (int r = 0; r < Rows; r++)
          sums.of[r][v] = multiply_add(offset, floats{} + totals[r * totals_stride + g], sums.of[r][v]);
      }
  std::memcpy(acc, sums.of, sizeof sums.of);
}

}  // namespace DIPTYCH_ISA
