// How packed weights are read: a unit is one word for each output of a panel, a column what one step multiplies.
//
// Word of a unit: plain, one float or two bf16; of 8 bits, four inputs; of 4, eight. Of a quantised word's inputs the even ones
// are in the low half and the odd ones in the high half, in order from its low bits, because two neighbours make a step.
#pragma once

#include <cstdint>

#include "linear_tile.h"

namespace DIPTYCH_ISA {

template <class T>
struct Plain {
  static constexpr Format kFormat = kPlain;
  static constexpr int kInputs = Dot<T>::kStep, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  const char *from;
  Plain(const char *b, const float *) : from(b) {}
  typename Dot<T>::Column column(int, int v) const {
    return Dot<T>::column_of(load_raw<typename Dot<T>::Stored>(from + v * kVectorBytes));
  }
};

// Columns as they are multiplied, in scratch.
template <class T>
struct Columns {
  using Column = typename Dot<T>::Column;
  static constexpr Format kFormat = kPlain;
  static constexpr int kInputs = Dot<T>::kStep, kBytes = kVectors * sizeof(Column);
  static constexpr bool kByGroup = false;
  const char *from;
  Columns(const char *b, const float *) : from(b) {}
  Column column(int, int v) const { return Dot<T>::load(from + v * sizeof(Column)); }
};

// Whether weights with a scale for each group are scaled before they are multiplied, and not the sums of each group: where
// they are multiplied as floats.
template <class T>
constexpr bool kScalesColumns = Dot<T>::kStep == 1 || !kDotsBf16;

// Weights of which each group of inputs has a scale and an offset.
template <class Of>
struct ByGroup : Of {
  static constexpr bool kByGroup = true;
  using Of::Of;
};

// Where input `i` of a word with `bits` an input begins.
constexpr int bit_of(int i, int bits) { return i % 2 * 16 + i / 2 * bits; }

using signed_words = int32_t __attribute__((vector_size(kVectorBytes)));

// The table's number for the four highest bits of each word.
inline floats look_up(const float *table, words codes) {
#if defined(__AVX512F__)
  return (floats)_mm512_permutexvar_ps((__m512i)(codes >> 28), (__m512)load_raw<floats>(table));
#elif defined(__AVX2__)
  const __m256i within = (__m256i)(codes >> 28);  // its low three bits choose of eight, the sign chooses the eight
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), within);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), within);
  return (floats)_mm256_blendv_ps(low, high, (__m256)codes);
#else
  floats found;
  for (int i = 0; i < kWidth; i++) found[i] = table[codes[i] >> 28];
  return found;
#endif
}

// Input `i` of each word, as a float.
template <Format F>
inline floats input_of(words from, int i, const float *table) {
  constexpr int kBits = is_of_4_bits(F) ? 4 : 8;
  const words high = from << (32 - kBits - bit_of(i, kBits));
  if constexpr (F == kTable4) return look_up(table, high);
  if constexpr (F == kFp8)  // its bits where a float has them, with an exponent that is 120 too small
    return (floats)((words)((signed_words)high >> 4) & 0x87f00000u) * 0x1p120f;
  return __builtin_convertvector((signed_words)high >> (32 - kBits), floats);
}

template <class T, Format F>
struct Quantised {
  static constexpr Format kFormat = F;
  static constexpr int kInputs = is_of_4_bits(F) ? 8 : 4, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  words unit[kVectors];
  const float *table;
  Quantised(const char *b, const float *of) : table(of) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  floats column(int s, int v) const { return input_of<F>(unit[v], s, table); }
};

// Of bf16 the two neighbours; small whole numbers, floats of 8 bits and the tables' numbers are exact in it.
template <Format F>
struct Quantised<bf16, F> {
  static constexpr Format kFormat = F;
  static constexpr int kInputs = is_of_4_bits(F) ? 8 : 4, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  words unit[kVectors];
  const float *table;
  Quantised(const char *b, const float *of) : table(of) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  Dot<bf16>::Column column(int s, int v) const {
    const floats even = input_of<F>(unit[v], 2 * s, table), odd = input_of<F>(unit[v], 2 * s + 1, table);
#if defined(__AVX512BF16__)
    return ((words)even >> 16) | ((words)odd & 0xffff0000u);
#else
    return {even, odd};
#endif
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// By bytes of the sixteen bf16, of which a table has the low ones and then the high ones behind its floats.
template <>
struct Quantised<bf16, kTable4> {
  static constexpr Format kFormat = kTable4;
  static constexpr int kInputs = 8, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  __m256i unit[kVectors], low, high;
  Quantised(const char *b, const float *table) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<__m256i>(b + v * kVectorBytes);
    low = _mm256_broadcastsi128_si256(load_raw<__m128i>(table + 16));
    high = _mm256_broadcastsi128_si256(load_raw<__m128i>(table + 20));
  }
  // Inputs 2 s and 2 s + 1 have the nibbles of even bytes for s = 0 and 1, and else of odd ones.
  Dot<bf16>::Column column(int s, int v) const {
    const __m256i nibbles = _mm256_and_si256(s % 2 ? _mm256_srli_epi32(unit[v], 4) : unit[v], _mm256_set1_epi8(15));
    const __m256i lows = _mm256_shuffle_epi8(low, nibbles), highs = _mm256_shuffle_epi8(high, nibbles);
    const __m256i even = _mm256_set1_epi16(0xff);
    const __m256i both = s < 2 ? _mm256_or_si256(_mm256_and_si256(lows, even), _mm256_slli_epi16(highs, 8))
                               : _mm256_or_si256(_mm256_srli_epi16(lows, 8), _mm256_andnot_si256(even, highs));
    return Dot<bf16>::column_of((words)both);
  }
};
#endif

#if defined(__AVX512BF16__)
// The sixteen values of an int4 as bf16, twice: vpermw takes them by the low five bits of each half word.
alignas(64) constexpr uint16_t kInt4AsBf16[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
    0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

// Numbers of 4 bits by the low five bits of each half word, of a table of sixteen bf16, twice.
template <Format F>
struct InTableOfBf16 {
  static constexpr Format kFormat = F;
  static constexpr int kInputs = 8, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  words unit[kVectors];
  __m512i table;
  InTableOfBf16(const char *b, __m512i of) : table(of) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  words column(int s, int v) const {
    return (words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)unit[v], 4 * s), table);
  }
};

template <>
struct Quantised<bf16, kInt4> : InTableOfBf16<kInt4> {
  Quantised(const char *b, const float *) : InTableOfBf16(b, _mm512_load_si512(kInt4AsBf16)) {}
};

template <>
struct Quantised<bf16, kTable4> : InTableOfBf16<kTable4> {
  Quantised(const char *b, const float *table) : InTableOfBf16(b, twice(table)) {}

  static __m512i twice(const float *table) {
    const __m256i once = _mm512_cvtepi32_epi16(_mm512_srli_epi32(load_raw<__m512i>(table), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
  }
};
#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
// Bytes of 0 to 127 as bf16: the low ones, then the high ones.
struct Int8AsBf16 {
  alignas(64) uint8_t low[128], high[128];
  constexpr Int8AsBf16() : low{}, high{} {
    for (uint32_t n = 1; n < 128; n++) {
      uint32_t power = 31 - __builtin_clz(n);
      uint32_t bits = (127 + power) << 7 | ((n << 7 >> power) & 0x7f);
      low[n] = uint8_t(bits);
      high[n] = uint8_t(bits >> 8);
    }
  }
};
constexpr Int8AsBf16 kInt8AsBf16;

// The same of e4m3: four bits of the exponent, which 7 is the bias of, three of the fraction.
struct Fp8AsBf16 {
  alignas(64) uint8_t low[128], high[128];
  constexpr Fp8AsBf16() : low{}, high{} {
    for (uint32_t n = 1; n < 128; n++) {
      uint32_t power = n >> 3, fraction = n & 7;
      if (power == 0) {  // subnormal: fraction * 2^-9
        power = 31 - __builtin_clz(fraction);
        fraction = (fraction << 3 >> power) & 7;
        power -= 2;
      }
      uint32_t bits = (power + 120) << 7 | fraction << 4;
      low[n] = uint8_t(bits);
      high[n] = uint8_t(bits >> 8);
    }
  }
};
constexpr Fp8AsBf16 kFp8AsBf16;

// Numbers of 8 bits: a sign, and a size that the tables have as bf16.
template <Format F>
struct InTablesOfBytes {
  static constexpr Format kFormat = F;
  static constexpr int kInputs = 4, kBytes = kUnitBytes;
  static constexpr bool kByGroup = false;
  words low[kVectors], high[kVectors];  // bytes of each input's bf16
  InTablesOfBytes(const char *b, const uint8_t *lows, const uint8_t *highs) {
    const __m512i *l = (const __m512i *)lows, *h = (const __m512i *)highs;
    for (int v = 0; v < kVectors; v++) {
      __m512i bytes = _mm512_loadu_si512(b + v * kVectorBytes), sign = _mm512_set1_epi8(char(0x80));
      __m512i size = F == kInt8 ? _mm512_abs_epi8(bytes) : _mm512_andnot_si512(sign, bytes);
      low[v] = (words)_mm512_permutex2var_epi8(l[0], size, l[1]);
      __m512i signed_high = _mm512_or_si512(_mm512_permutex2var_epi8(h[0], size, h[1]), _mm512_and_si512(bytes, sign));
      if (F == kInt8)  // -128 has no size of seven bits
        signed_high = _mm512_mask_mov_epi8(signed_high, _mm512_cmpeq_epi8_mask(bytes, sign), _mm512_set1_epi8(char(0xc3)));
      high[v] = (words)signed_high;
    }
  }
  words column(int s, int v) const {
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaaull;
    __m512i l = (__m512i)low[v], h = (__m512i)high[v];
    if (s == 0) return (words)_mm512_mask_blend_epi8(kOdd, l, _mm512_slli_epi16(h, 8));
    return (words)_mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(l, 8), h);
  }
};

template <>
struct Quantised<bf16, kInt8> : InTablesOfBytes<kInt8> {
  Quantised(const char *b, const float *) : InTablesOfBytes(b, kInt8AsBf16.low, kInt8AsBf16.high) {}
};

template <>
struct Quantised<bf16, kFp8> : InTablesOfBytes<kFp8> {
  Quantised(const char *b, const float *) : InTablesOfBytes(b, kFp8AsBf16.low, kFp8AsBf16.high) {}
};
#endif

}  // namespace DIPTYCH_ISA
