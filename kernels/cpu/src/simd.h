// Sixteen lanes at a time, for every instruction set: compiler vectors, and an intrinsic where one matters.
//
// Included once for each instruction set (see build.py), in a namespace of its own: nothing here may be shared.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct bf16 {
  uint16_t bits;
};

namespace DIPTYCH_ISA {

constexpr int kLanes = 16;
using f32x16 = float __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

// A comparison gives -1 in each lane that holds and 0 in the others: an i32x16 mask.
constexpr i32x16 kLaneIds = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <class V>
inline V load_raw(const void *from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Vectors of the processor's own width: comparisons and choices between wider ones would be made lane by lane.
#if defined(__AVX512F__)
constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
constexpr int kNativeBytes = 32;
#else
constexpr int kNativeBytes = 16;
#endif
using native_floats = float __attribute__((vector_size(kNativeBytes)));
using native_words = int32_t __attribute__((vector_size(kNativeBytes)));

template <class Native>
inline Native part_of(const void *vector, int part) {
  return load_raw<Native>(static_cast<const char *>(vector) + part * kNativeBytes);
}

// One vector of the natives that work(0), work(1), ... return.
template <class V, class Work>
__attribute__((always_inline)) inline V by_parts(Work &&work) {
  V whole;
#pragma GCC unroll 4
  for (int part = 0; part < int(sizeof(V)) / kNativeBytes; part++) {
    auto native = work(part);
    std::memcpy(reinterpret_cast<char *>(&whole) + part * kNativeBytes, &native, kNativeBytes);
  }
  return whole;
}

// Lanes where a > b, a >= b, a == b.
inline i32x16 above(f32x16 a, f32x16 b) {
  return by_parts<i32x16>([&](int i) { return part_of<native_floats>(&a, i) > part_of<native_floats>(&b, i); });
}

inline i32x16 at_least(f32x16 a, f32x16 b) {
  return by_parts<i32x16>([&](int i) { return part_of<native_floats>(&a, i) >= part_of<native_floats>(&b, i); });
}

inline i32x16 equal(f32x16 a, f32x16 b) {
  return by_parts<i32x16>([&](int i) { return part_of<native_floats>(&a, i) == part_of<native_floats>(&b, i); });
}

inline i32x16 at_most(i32x16 a, i32x16 b) {
  return by_parts<i32x16>([&](int i) { return part_of<native_words>(&a, i) <= part_of<native_words>(&b, i); });
}

// a in the lanes that the mask holds, b in the others.
inline f32x16 choose(i32x16 mask, f32x16 a, f32x16 b) {
  return by_parts<f32x16>([&](int i) {
    return part_of<native_words>(&mask, i) ? part_of<native_floats>(&a, i) : part_of<native_floats>(&b, i);
  });
}

// b where either is NaN.
inline f32x16 max(f32x16 a, f32x16 b) {
  return by_parts<f32x16>([&](int i) {
    auto x = part_of<native_floats>(&a, i), y = part_of<native_floats>(&b, i);
    return x > y ? x : y;
  });
}

inline f32x16 min(f32x16 a, f32x16 b) {
  return by_parts<f32x16>([&](int i) {
    auto x = part_of<native_floats>(&a, i), y = part_of<native_floats>(&b, i);
    return x < y ? x : y;
  });
}

inline f32x16 splat(float x) { return x - f32x16{}; }  // x - 0 is x, also of -0: no addition is left

inline f32x16 load(const float *from) { return load_raw<f32x16>(from); }

inline f32x16 load(const bf16 *from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
  return (f32x16)(__builtin_convertvector(load_raw<u16x16>(from), u32x16) << 16);
#endif
}

inline void store(float *to, f32x16 v) { std::memcpy(to, &v, sizeof v); }

// To the nearest, ties to even.
inline u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  __m256bh packed = _mm512_cvtneps_pbh((__m512)v);
  return load_raw<u16x16>(&packed);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  i32x16 is_number = at_most((i32x16)(bits & 0x7fffffff), i32x16{} + 0x7f800000);
  return __builtin_convertvector((u32x16)choose(is_number, (f32x16)rounded, (f32x16)quiet), u16x16);
#endif
}

inline void store(bf16 *to, f32x16 v) {
  u16x16 packed = to_bf16(v);
  std::memcpy(to, &packed, sizeof packed);
}

// The first `count` lanes, at most all; the others are 0.
template <class T>
inline f32x16 load_some(const T *from, int64_t count) {
  T lanes[kLanes]{};
  std::memcpy(lanes, from, (count < kLanes ? count : kLanes) * sizeof(T));
  return load(lanes);
}

template <class T>
inline void store_some(T *to, f32x16 v, int64_t count) {
  T lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, (count < kLanes ? count : kLanes) * sizeof(T));
}

// to[i] = work(to[i], from[i]), by sixteen; T and From: float or bf16.
template <class T, class From, class Work>
inline void update(T *to, const From *from, int64_t count, Work &&work) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, work(load(to + i), load(from + i)));
  if (i < count) store_some(to + i, work(load_some(to + i, count - i), load_some(from + i, count - i)), count - i);
}

inline float widen(float x) { return x; }

inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline void narrow(float *to, float x) { *to = x; }

inline void narrow(bf16 *to, float x) { to->bits = to_bf16(splat(x))[0]; }

// acc + a.even * b.even + a.odd * b.odd, where a lane of a and b holds two bf16: even in its low half.
inline f32x16 dot2(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc += (f32x16)(a << 16) * (f32x16)(b << 16);
  return acc + (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}

// The order of the additions is fixed: halves, quarters, eighths, pairs.
inline float sum(f32x16 v) {
#if defined(__AVX512F__)
  const __m256 eight = _mm512_castps512_ps256((__m512)v) + _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)v, 1));
  const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  const __m128 two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
#else
  alignas(64) float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

inline float largest(f32x16 v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  float best = lanes[0];
  for (int i = 1; i < kLanes; i++) best = lanes[i] > best ? lanes[i] : best;
  return best;
}

// Bit i: lane i of the mask.
inline uint32_t bits(i32x16 mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  __m256 low, high;
  std::memcpy(&low, &mask, sizeof low);
  std::memcpy(&high, (const char *)&mask + sizeof low, sizeof high);
  return uint32_t(_mm256_movemask_ps(low)) | uint32_t(_mm256_movemask_ps(high)) << 8;
#else
  uint32_t set = 0;
  int32_t lanes[kLanes];
  std::memcpy(lanes, &mask, sizeof mask);
  for (int i = 0; i < kLanes; i++) set |= uint32_t(lanes[i] & 1) << i;
  return set;
#endif
}

// The lanes that the mask holds, in order, then anything: up to sixteen in all. Returns how many it holds.
inline int64_t store_held(float *to, f32x16 v, i32x16 mask) {
  uint32_t held = bits(mask);
#if defined(__AVX512F__)
  store(to, (f32x16)_mm512_maskz_compress_ps((__mmask16)held, (__m512)v));
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0, n = 0; i < kLanes; n += held >> i++ & 1) to[n] = lanes[i];
#endif
  return __builtin_popcount(held);
}

// e^x to within 2 units in the last place; 0 below -87, e^88 above 88, NaN of NaN.
// Cody-Waite reduction; 1 + r + r^2 q(r) with q of degree 4 fitted to the least relative error, 3e-9, on |r| <= ln(2) / 2.
inline f32x16 exp(f32x16 x) {
  constexpr float log2e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;
  constexpr float to_whole = 0x1.8p23f;  // added, it leaves a whole number in the last bits
  f32x16 clamped = min(splat(88.0f), max(splat(-87.0f), x));
  f32x16 power = clamped * log2e + to_whole, whole = power - to_whole;
  f32x16 r = clamped - whole * ln2_high - whole * ln2_low;
  f32x16 p = splat(0.00138146f);
  p = p * r + 0.008368715f;
  p = p * r + 0.04166839f;
  p = p * r + 0.1666652f;
  p = p * r + 0.49999994f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  f32x16 scaled = p * (f32x16)(((u32x16)power + 127) << 23);
  return choose(above(splat(-87.0f), x), splat(0.0f), scaled);
}

// 2^x for x <= 0, to 1e-7 of itself; 0 below -126. 2^0 is 1 exactly. Minimax polynomial of degree 5 on [-1/2, 1/2].
inline native_floats exp2_below_native(native_floats x) {
  native_floats lowest = native_floats{} - 126.0f, clamped = x > lowest ? x : lowest;
  native_floats shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the whole part lands in the lowest bits
  native_floats r = clamped - (shifted - 12582912.0f);
  native_floats p = 0.001326472731f * r + 0.009671512991f;
  p = p * r + 0.05550733581f;
  p = p * r + 0.2402224243f;
  p = p * r + 0.6931470037f;
  p = p * r + 1.0f;
  native_floats scaled = (native_floats)((native_words)p + ((native_words)shifted << 23));
  return x >= lowest ? scaled : native_floats{};
}

inline f32x16 exp2_below(f32x16 x) {
  return by_parts<f32x16>([&](int i) { return exp2_below_native(part_of<native_floats>(&x, i)); });
}

// Of |x| below 60; its error is relative to 1.
inline f32x16 tanh(f32x16 x) {
  f32x16 decay = exp2_below(max(x, -x) * -2.88539008f);  // e^(-2 |x|)
  f32x16 size = (1.0f - decay) / (1.0f + decay);
  return choose(above(splat(0.0f), x), -size, size);
}

}  // namespace DIPTYCH_ISA
