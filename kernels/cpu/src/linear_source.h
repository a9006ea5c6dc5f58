// How packed weights are read: a unit is one word for each output of a panel, a column what one step multiplies.
//
// Word of a unit: plain, one float or two bf16; int8, four inputs; int4, eight. Of a quantised word's inputs the even ones
// are in the low half and the odd ones in the high half, in order from its low bits, because two neighbours make a step.
#pragma once

#include <cstdint>

#include "linear_tile.h"

namespace DIPTYCH_ISA {

template <class T>
struct Plain {
  static constexpr Format kFormat = kPlain;
  static constexpr int kInputs = Dot<T>::kStep;
  const char *from;
  explicit Plain(const char *b) : from(b) {}
  typename Dot<T>::Vector column(int, int v) const {
    return load_raw<typename Dot<T>::Vector>(from + v * kVectorBytes);
  }
};

// Where input `i` of a word with `bits` an input begins.
constexpr int bit_of(int i, int bits) { return i % 2 * 16 + i / 2 * bits; }

using signed_words = int32_t __attribute__((vector_size(kVectorBytes)));

// Input `i` of each word, as a float.
inline floats input_of(words from, int i, int bits) {
  signed_words high = (signed_words)(from << (32 - bits - bit_of(i, bits)));
  return __builtin_convertvector(high >> (32 - bits), floats);
}

template <class T, Format F>
struct Quantised {
  static constexpr Format kFormat = F;
  static constexpr int kBits = F == kInt8 ? 8 : 4, kInputs = 32 / kBits;
  words unit[kVectors];
  explicit Quantised(const char *b) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  floats column(int s, int v) const { return input_of(unit[v], s, kBits); }
};

// Of bf16 the two neighbours; small whole numbers are exact in it.
template <Format F>
struct Quantised<bf16, F> {
  static constexpr Format kFormat = F;
  static constexpr int kBits = F == kInt8 ? 8 : 4, kInputs = 32 / kBits;
  words unit[kVectors];
  explicit Quantised(const char *b) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  words column(int s, int v) const {
    words even = (words)input_of(unit[v], 2 * s, kBits), odd = (words)input_of(unit[v], 2 * s + 1, kBits);
    return (even >> 16) | (odd & 0xffff0000u);
  }
};

#if defined(__AVX512BW__)
// The sixteen values of an int4 as bf16, twice: vpermw takes them by the low five bits of each half word.
alignas(64) constexpr uint16_t kInt4AsBf16[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
    0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};

template <>
struct Quantised<bf16, kInt4> {
  static constexpr Format kFormat = kInt4;
  static constexpr int kInputs = 8;
  words unit[kVectors];
  explicit Quantised(const char *b) {
    for (int v = 0; v < kVectors; v++) unit[v] = load_raw<words>(b + v * kVectorBytes);
  }
  words column(int s, int v) const {
    __m512i table = _mm512_load_si512(kInt4AsBf16);
    return (words)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)unit[v], 4 * s), table);
  }
};
#endif

#if defined(__AVX512VBMI__)
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

template <>
struct Quantised<bf16, kInt8> {
  static constexpr Format kFormat = kInt8;
  static constexpr int kInputs = 4;
  words low[kVectors], high[kVectors];  // bytes of each input's bf16
  explicit Quantised(const char *b) {
    const __m512i *l = (const __m512i *)kInt8AsBf16.low, *h = (const __m512i *)kInt8AsBf16.high;
    for (int v = 0; v < kVectors; v++) {
      __m512i bytes = _mm512_loadu_si512(b + v * kVectorBytes), size = _mm512_abs_epi8(bytes);
      __m512i signs = _mm512_and_si512(bytes, _mm512_set1_epi8(char(0x80)));
      low[v] = (words)_mm512_permutex2var_epi8(l[0], size, l[1]);
      high[v] = (words)_mm512_or_si512(_mm512_permutex2var_epi8(h[0], size, h[1]), signs);
    }
  }
  words column(int s, int v) const {
    constexpr __mmask64 kOdd = 0xaaaaaaaaaaaaaaaaull;
    __m512i l = (__m512i)low[v], h = (__m512i)high[v];
    if (s == 0) return (words)_mm512_mask_blend_epi8(kOdd, l, _mm512_slli_epi16(h, 8));
    return (words)_mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(l, 8), h);
  }
};
#endif

}  // namespace DIPTYCH_ISA
