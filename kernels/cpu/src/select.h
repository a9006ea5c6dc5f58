// The largest of a row of floats, without sorting it.
//
// Rows are of whole vectors here: `padded` is their length in a multiple of kLanes, and what pads them is -inf.
#pragma once

#include <cfloat>
#include <cmath>

#include "simd.h"

// glibc's log by its first name: the newer one, which does not set errno, is in none before 2.29, and what serves beside
// us (torch, Ray) asks for 2.28 at most. Both compute the same.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver log, log@GLIBC_2.2.5");
#endif

namespace DIPTYCH_ISA {

constexpr int64_t kBlock = 64 * kLanes;  // summed in float, and then in double

// The first `count` of sixteen lanes, at most all.
inline i32x16 first_lanes(int64_t count) {
  return at_most(kLaneIds, i32x16{} + int32_t((count < kLanes ? count : kLanes) - 1));
}

inline int64_t whole_vectors(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The first `count` of sixteen floats, the others -inf.
inline f32x16 load_or_least(const float *from, int64_t count) {
  return choose(first_lanes(count), load_some(from, count), splat(-INFINITY));
}

// The largest of any number of floats; -inf where there is none.
inline float largest_of(const float *x, int64_t n) {
  f32x16 best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) best = max(load(x + i), best);
  if (i < n) best = max(load_or_least(x + i, n - i), best);
  return largest(best);
}

// The id of the largest of any number of floats, the lowest among equals.
inline int64_t argmax_of(const float *x, int64_t n) {
  float best = largest_of(x, n);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    if (uint32_t held = bits(equal(load(x + i), splat(best)))) return i + __builtin_ctz(held);
  for (; i < n; i++)
    if (x[i] == best) return i;
  return 0;  // all NaN
}

// Sum of weight(x[i]) over those in `mask(x)`.
template <class Weight, class Mask>
double sum_of(const float *x, int64_t padded, Weight &&weight, Mask &&mask) {
  double total = 0.0;
  for (int64_t start = 0; start < padded; start += kBlock) {
    f32x16 part{};
    for (int64_t i = start; i < padded && i < start + kBlock; i += kLanes) {
      f32x16 v = load(x + i);
      part += choose(mask(v), weight(v), splat(0.0f));
    }
    total += double(sum(part));
  }
  return total;
}

// Those in `mask(x)`, in order, into `to` (which may be `x`), padded. Returns how many they are.
template <class Mask>
int64_t keep(const float *x, int64_t padded, float *to, Mask &&mask) {
  int64_t n = 0;
  for (int64_t i = 0; i < padded; i += kLanes) {
    f32x16 v = load(x + i);
    n += store_held(to + n, v, mask(v));
  }
  for (int64_t i = n; i < whole_vectors(n); i++) to[i] = -INFINITY;
  return n;
}

// The largest value v of x such that the weights of all values >= v reach `wanted`; the smallest where none does.
// Splits the range of values in two until it holds one value. x: n > 0 finite values, padded; overwritten.
template <class Weight>
float end_of(float *x, int64_t n, double wanted, Weight &&weight) {
  int64_t padded = whole_vectors(n);
  f32x16 lows = splat(FLT_MAX), highs = splat(-FLT_MAX);
  for (int64_t i = 0; i < padded; i += kLanes) {
    f32x16 v = load(x + i);
    lows = choose(above(v, splat(-INFINITY)), min(v, lows), lows);
    highs = max(v, highs);
  }
  float low = -largest(-lows), high = largest(highs);
  while (low < high) {
    float middle = low * 0.5f + high * 0.5f;
    if (!(low <= middle && middle < high)) middle = low;
    f32x16 over = splat(FLT_MAX), under = splat(-FLT_MAX);  // the values on either side that are next to it
    double upper = sum_of(x, padded, weight, [&](f32x16 v) {
      i32x16 is_upper = above(v, splat(middle));
      over = choose(is_upper, min(v, over), over);
      under = choose(is_upper, under, max(v, under));
      return is_upper;
    });
    if (upper >= wanted) {
      n = keep(x, padded, x, [&](f32x16 v) { return above(v, splat(middle)); });
      low = -largest(-over);
    } else {
      wanted -= upper;
      n = keep(x, padded, x, [&](f32x16 v) { return at_least(splat(middle), v) & at_least(v, splat(low)); });
      high = largest(under);
    }
    padded = whole_vectors(n);
  }
  return low;
}

}  // namespace DIPTYCH_ISA
