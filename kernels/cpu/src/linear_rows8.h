// Products of whole numbers of 8 bits: rows are quantised as they come, each by its own scale, and sums are exact in
// int32, so that no order of additions matters. The twin is workers/models/quant/w8a8.py.
//
//     scale = max |x| / 127,   q = x * (127 / max |x|) to the nearest, ties to even,   y = (q . w) * scale * scale of w
//
// With VNNI a number of a row is stored from 0, 128 too many, in the order of a word's bytes; 128 times the sum of an
// output's weights is taken away. Else it is stored in 16 bits, whose products two by two fit in 32.
#pragma once

#include <cstdint>
#include <vector>

#include "linear_source.h"

namespace DIPTYCH_ISA {

#if defined(__AVX512VNNI__)
using Row8 = uint8_t;
constexpr int32_t kRowBias = 128;
#else
using Row8 = int16_t;
constexpr int32_t kRowBias = 0;
#endif

using u8x16 = uint8_t __attribute__((vector_size(16)));
using i16x16 = int16_t __attribute__((vector_size(32)));

// The nearest whole numbers, of two as near the even one. Not by adding and taking away a large number: a product before
// would be fused with that, and not rounded.
inline i32x16 nearest(f32x16 v) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return by_parts<i32x16>([&](int i) { return (native_words)_mm256_cvtps_epi32((__m256)part_of<native_floats>(&v, i)); });
#else
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: no bit is left for a fraction; there is no fused operation here
  return __builtin_convertvector((v + kRound) - kRound, i32x16);
#endif
}

inline void store_numbers(Row8 *to, i32x16 whole) {
  const i32x16 numbers = whole + kRowBias;
#if defined(__AVX512VNNI__)
  const u8x16 bytes = __builtin_convertvector(numbers, u8x16);
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8((__m128i)bytes, order));
#else
  const i16x16 narrow = __builtin_convertvector(numbers, i16x16);
  std::memcpy(to, &narrow, sizeof narrow);
#endif
}

// out: as many numbers as x has, and up to fifteen more. Returns the scale; NaN where x has a number that is not finite.
template <class T>
float quantise_row(const T *x, int64_t k, Row8 *out) {
  f32x16 high{}, not_finite{};
  for (int64_t i = 0; i < k; i += kLanes) {
    const f32x16 v = k - i < kLanes ? load_some(x + i, k - i) : load(x + i);
    high = max(max(v, -v), high);
    not_finite += v * 0.0f;
  }
  const float most = largest(high), inverse = most > 0.0f ? 127.0f / most : 0.0f;
  for (int64_t i = 0; i < k; i += kLanes) {
    const f32x16 v = (k - i < kLanes ? load_some(x + i, k - i) : load(x + i)) * inverse;
    store_numbers(out + i, nearest(v));
  }
  return most / 127.0f + sum(not_finite);
}

// Rows of a block, quantised, in a thread's own memory.
struct Rows8 {
  const Row8 *first;
  int64_t stride;
  const float *scales;
};

template <class T>
Rows8 quantise_rows(const T *x, int64_t x_stride, int64_t num_rows, int64_t k) {
  constexpr int64_t kLine = 64;
  thread_local std::vector<Row8> numbers;
  thread_local std::vector<float> scales;
  const int64_t stride = (k + kLine - 1) / kLine * kLine + kLine;  // rows do not meet in the same few sets of a cache
  if (int64_t(numbers.size()) < num_rows * stride) numbers.resize(num_rows * stride);
  if (int64_t(scales.size()) < num_rows) scales.resize(num_rows);
  for (int64_t row = 0; row < num_rows; row++)
    scales[row] = quantise_row(x + row * x_stride, k, numbers.data() + row * stride);
  return {numbers.data(), stride, scales.data()};
}

// sum + the products of one word of each output and four numbers of a row.
inline signed_words add_products(signed_words sum, const Row8 *row, words weights) {
#if defined(__AVX512VNNI__)
  const words four = words{} + load_raw<uint32_t>(row);
  return (signed_words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)four, (__m512i)weights);
#elif defined(__AVX512BW__)
  const __m512i first = _mm512_set1_epi32(load_raw<int32_t>(row)), last = _mm512_set1_epi32(load_raw<int32_t>(row + 2));
  const __m512i low = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)weights, 8), 8);
  const __m512i high = _mm512_srai_epi16((__m512i)weights, 8);
  return sum + (signed_words)_mm512_madd_epi16(low, first) + (signed_words)_mm512_madd_epi16(high, last);
#elif defined(__AVX2__)
  const __m256i first = _mm256_set1_epi32(load_raw<int32_t>(row)), last = _mm256_set1_epi32(load_raw<int32_t>(row + 2));
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)weights, 8), 8);
  const __m256i high = _mm256_srai_epi16((__m256i)weights, 8);
  return sum + (signed_words)_mm256_madd_epi16(low, first) + (signed_words)_mm256_madd_epi16(high, last);
#else
  for (int i = 0; i < 4; i++) sum += ((signed_words)(weights << (24 - bit_of(i, 8))) >> 24) * int32_t(row[i]);
  return sum;
#endif
}

// acc[r] += a[r] b. a: Rows rows; b: `num_units` units; fetch: as a Units has it.
template <int Rows>
void tile8(const Row8 *a, int64_t a_stride, const char *b, int64_t num_units, int32_t *acc, const char *fetch,
           int64_t fetch_step) {
  signed_words sum[Rows][kVectors];
  std::memcpy(sum, acc, sizeof sum);
  for (int64_t unit = 0; unit < num_units; unit++) {
    __builtin_prefetch(fetch, 0, 2);
    __builtin_prefetch(fetch + 64, 0, 2);
    fetch += fetch_step;
    for (int v = 0; v < kVectors; v++) {
      const words weights = load_raw<words>(b + v * kVectorBytes);
      for (int r = 0; r < Rows; r++) sum[r][v] = add_products(sum[r][v], a + r * a_stride, weights);
    }
    b += kUnitBytes;
    a += 4;
  }
  std::memcpy(acc, sum, sizeof sum);
}

}  // namespace DIPTYCH_ISA
