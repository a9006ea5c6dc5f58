// Numbers of a KV cache of 8 or 4 bits. Each vector of them, a key or a value, has a scale, a bf16: a number is scale x
// stored, scale = the vector's largest magnitude / the largest number that is stored, rounded up (workers/kv/dtypes.py).
#pragma once

#include <cmath>
#include <type_traits>

#include "hadamard.h"

namespace DIPTYCH_ISA {

struct Int8 {
  int8_t bits;
};

// e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
struct Fp8 {
  uint8_t bits;
};

// Two numbers of a vector's Hadamard transform: of its first half, in the low bits, and in the same place of the second.
// Code c is the odd number 2 c - 15.
struct Int4 {
  uint8_t bits;
};

// Two numbers of a group with a scale and a least number: see kivi.h, which has all that is done with them.
struct Kivi {
  uint8_t bits;
};

enum KVFormat : int64_t { kKVAsComputed = 0, kKVInt8 = 1, kKVFp8 = 2, kKVInt4 = 3, kKVKivi = 4 };

template <class S>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<Int8> = true;
template <>
constexpr bool kIsScaled<Fp8> = true;
template <>
constexpr bool kIsScaled<Int4> = true;

// Numbers that one S holds.
template <class S>
constexpr int64_t kNumbersIn = std::is_same_v<S, Int4> ? 2 : 1;

// Whether vectors are stored as their Hadamard transforms.
template <class S>
constexpr bool kIsTransformed = std::is_same_v<S, Int4>;

constexpr float kSmallest = 1e-33f;  // a vector whose numbers are all below it is stored as zeros, with a scale of zero

template <class S>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<Int8> = 127.0f;
template <>
constexpr float kLargest<Fp8> = 448.0f;
template <>
constexpr float kLargest<Int4> = 15.0f;

// A stored number is kUnit times what `load_native` makes of it.
template <class S>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Fp8> = 256.0f;

using i8x16 = int8_t __attribute__((vector_size(16)));
using u8x16 = uint8_t __attribute__((vector_size(16)));

// As many numbers as a vector of the processor's own width has lanes.
inline native_floats load_native(const Int8 *from) {
#if defined(__AVX512F__)
  return (native_floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
  return (native_floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
  using few = int8_t __attribute__((vector_size(kNativeBytes / 4)));
  return __builtin_convertvector(load_raw<few>(from), native_floats);
#endif
}

// The bits of a half of the same sign whose value is 1 / 256 of it: its exponents begin 8 lower.
inline native_floats load_native(const Fp8 *from) {
#if defined(__AVX512F__)
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
  return (native_floats)_mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff)));
#elif defined(__AVX2__)
  __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from));
  return (native_floats)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff)));
#else
  using few = uint8_t __attribute__((vector_size(kNativeBytes / 4)));
  native_words wide = __builtin_convertvector(load_raw<few>(from), native_words);
  native_floats magnitude = (native_floats)((wide & 0x7f) << 20) * 0x1p112f;
  return (native_floats)((native_words)magnitude | (wide & 0x80) << 24);
#endif
}

// Odd numbers that codes stand for.
inline native_floats of_codes(native_words codes) {
#if defined(__AVX512F__)
  const __m512 odd = _mm512_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15);
  return (native_floats)_mm512_permutexvar_ps((__m512i)codes, odd);  // by the four lowest bits
#else
  return __builtin_convertvector(codes & 15, native_floats) * 2.0f - 15.0f;
#endif
}

// As many bytes as a vector of the processor's own width has lanes.
inline native_words load_bytes(const void *from) {
#if defined(__AVX512F__)
  return (native_words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
  return (native_words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
  using few = uint8_t __attribute__((vector_size(kNativeBytes / 4)));
  return __builtin_convertvector(load_raw<few>(from), native_words);
#endif
}

// One number of each of these bytes: the first, or the second.
inline native_floats load_one_of_each(const Int4 *from, bool is_second) {
  const native_words bytes = load_bytes(from);
  return of_codes(is_second ? bytes >> 4 : bytes);
}

// To whole numbers, to nearest, ties to even. Not by an addition: it could be fused with the product before it.
inline i32x16 to_whole(f32x16 v) {
#if defined(__AVX512F__)
  return (i32x16)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return by_parts<i32x16>([&](int part) { return _mm256_cvtps_epi32(part_of<__m256>(&v, part)); });
#else
  i32x16 whole;
  for (int i = 0; i < kLanes; i++) whole[i] = int32_t(std::nearbyint(v[i]));
  return whole;
#endif
}

inline void store(Int8 *to, f32x16 v) {
  i8x16 narrow = __builtin_convertvector(to_whole(v), i8x16);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline void store(Fp8 *to, f32x16 v) {
  u32x16 bits = (u32x16)v & 0x7fffffffu, sign = (u32x16)v >> 24 & 0x80;
  u32x16 normal = ((bits + (0x7ffff + (bits >> 20 & 1))) >> 20) - ((127 - 7) << 3);
  i32x16 tiny = to_whole((f32x16)bits * 512.0f);  // below 2^-6 numbers are multiples of 2^-9
  f32x16 code = choose(above(splat(0x1p-6f), (f32x16)bits), (f32x16)tiny, (f32x16)normal);
  u8x16 narrow = __builtin_convertvector((u32x16)code | sign, u8x16);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline i32x16 codes_of(f32x16 v) {
#if defined(__AVX512F__)
  const f32x16 lower = (f32x16)_mm512_floor_ps((__m512)(v * 0.5f));
#else
  f32x16 lower;
  for (int i = 0; i < kLanes; i++) lower[i] = std::floor(v[i] * 0.5f);
#endif
  return to_whole(lower) + 8 & 15;
}

inline void store(Int4 *to, f32x16 first, f32x16 second) {
  const u8x16 bytes = __builtin_convertvector(codes_of(first) | codes_of(second) << 4, u8x16);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Stores `dim` numbers, a multiple of 16 (of 32, where two are in one S), and returns their scale: NaN where one of them is not finite.
template <class T, class S>
inline bf16 quantise(const T *from, int64_t dim, S *to) {
  f32x16 highest{}, poison{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    f32x16 x = load(from + i);
    highest = max(highest, max(x, -x));
    poison += x * 0.0f;
  }
  float magnitude = largest(highest), spoilt = sum(poison);
  if (spoilt != 0.0f) magnitude = 0.0f;
  float exact = magnitude / kLargest<S>;
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  bf16 scale{uint16_t(magnitude < kSmallest ? 0 : (bits + 0xffff) >> 16)};
  float inverse = scale.bits ? 1.0f / widen(scale) : 0.0f;
  for (int64_t i = 0; i < dim / kNumbersIn<S>; i += kLanes) {
    if constexpr (kNumbersIn<S> == 2) store(to + i, load(from + i) * inverse, load(from + dim / 2 + i) * inverse);
    else store(to + i, load(from + i) * inverse);
  }
  if (spoilt != 0.0f) scale.bits = 0x7fc0;
  return scale;
}

}  // namespace DIPTYCH_ISA
