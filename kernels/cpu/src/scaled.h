// Numbers of a KV cache of 8 bits. Each vector of them, a key or a value, has a scale, a float: a number is scale x stored,
// scale = the vector's largest magnitude / the largest number that is stored (workers/kv/dtypes.py).
#pragma once

#include <cmath>

#include "simd.h"

namespace DIPTYCH_ISA {

struct Int8 {
  int8_t bits;
};

// e4m3 (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").
struct Fp8 {
  uint8_t bits;
};

enum KVFormat : int64_t { kKVAsComputed = 0, kKVInt8 = 1, kKVFp8 = 2 };

template <class S>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<Int8> = true;
template <>
constexpr bool kIsScaled<Fp8> = true;

constexpr float kSmallest = 1e-33f;  // a vector whose numbers are all below it is stored as zeros, with a scale of zero

template <class S>
constexpr float kLargest = 0.0f;
template <>
constexpr float kLargest<Int8> = 127.0f;
template <>
constexpr float kLargest<Fp8> = 448.0f;

// A stored number is kUnit times what `load` makes of it.
template <class S>
constexpr float kUnit = 1.0f;
template <>
constexpr float kUnit<Fp8> = 256.0f;

using i8x16 = int8_t __attribute__((vector_size(16)));
using u8x16 = uint8_t __attribute__((vector_size(16)));

inline f32x16 load(const Int8 *from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
  return by_parts<f32x16>([&](int part) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8 * part))));
  });
#else
  return __builtin_convertvector(load_raw<i8x16>(from), f32x16);
#endif
}

// The bits of a half of the same sign whose value is 1 / 256 of it: its exponents begin 8 lower.
inline f32x16 load(const Fp8 *from) {
#if defined(__AVX2__)
  __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
  __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16((short)0xbfff));
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(halves);
#else
  return by_parts<f32x16>([&](int part) {
    return _mm256_cvtph_ps(part ? _mm256_extracti128_si256(halves, 1) : _mm256_castsi256_si128(halves));
  });
#endif
#else
  u32x16 wide = __builtin_convertvector(load_raw<u8x16>(from), u32x16);
  f32x16 magnitude = (f32x16)((wide & 0x7f) << 20) * 0x1p112f;
  return (f32x16)((u32x16)magnitude | (wide & 0x80) << 24);
#endif
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

// Stores `dim` numbers, a multiple of 16, and returns their scale: NaN where one of them is not finite.
template <class T, class S>
inline float quantise(const T *from, int64_t dim, S *to) {
  f32x16 highest{}, poison{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    f32x16 x = load(from + i);
    highest = max(highest, max(x, -x));
    poison += x * 0.0f;
  }
  float magnitude = largest(highest), spoilt = sum(poison);
  bool is_zero = magnitude < kSmallest;
  float inverse = is_zero || spoilt != 0.0f ? 0.0f : kLargest<S> / magnitude;
  for (int64_t i = 0; i < dim; i += kLanes) store(to + i, load(from + i) * inverse);
  return (is_zero ? 0.0f : magnitude / kLargest<S>) + spoilt;
}

}  // namespace DIPTYCH_ISA
