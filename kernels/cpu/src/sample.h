// A token of one row of logits: the twin of workers/sampling/choice.py, and of kernels/sampling/gumbel.py.
#pragma once

#include "select.h"

struct Draw {
  float temperature;  // 0: greedy
  float log_min_p;    // -inf: off
  float top_p;        // >= 1: off
  int32_t top_k;      // 0: off
  uint64_t key;       // of the noise: stream_key(seed, position)
};

namespace DIPTYCH_ISA {

using u64x8 = uint64_t __attribute__((vector_size(64)));
using u32x8 = uint32_t __attribute__((vector_size(32)));

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;

// SplitMix64's finaliser (Steele, Lea & Flood 2014); X is uint64_t or u64x8.
template <class X>
X mix(X x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Standard Gumbel noise of a token under a key, its logarithms taken in double and rounded to float as the twin's are.
inline float gumbel(uint64_t key, int64_t id) {
  float uniform = float(int64_t(mix(key + uint64_t(id) * kGolden) >> 11)) * 0x1p-53f;
  if (uniform < 0x1p-54f) uniform = 0x1p-54f;
  float exponential = float(-std::log1p(-double(uniform)));
  return float(-std::log(double(exponential)));
}

constexpr float kLargestNoise = 37.5f;  // -log(2^-54), and some

// Lower bounds, within 2^-24, of the uniforms of sixteen tokens; x: key + id * kGolden of the first.
inline f32x16 uniforms_from(uint64_t x) {
  constexpr u64x8 ids = {0, 1, 2, 3, 4, 5, 6, 7};
  u64x8 low = mix(ids * kGolden + x) >> 40, high = mix((ids + 8) * kGolden + x) >> 40;
  i32x16 both;
  u32x8 halves[] = {__builtin_convertvector(low, u32x8), __builtin_convertvector(high, u32x8)};
  std::memcpy(&both, halves, sizeof both);
  return __builtin_convertvector(both, f32x16) * 0x1p-24f;
}

// Lanes where logit + noise may exceed `best`: where uniform <= exponential < e^(logit - best).
// 2^n (1 + f) bounds 2^(n + f) from above, so the power's bits are a product; positive floats compare as their bits do.
inline i32x16 may_win(f32x16 logits, f32x16 uniforms, float best) {
  constexpr float one = 0x1p23f, log2e = 1.44269504f, rounding = 1024.0f;
  f32x16 exponent = min(max(logits - best, splat(-100.0f)), splat(0.0f));
  i32x16 limit = __builtin_convertvector(exponent * (log2e * one) + (127 * one + rounding), i32x16);
  return at_most((i32x16)uniforms, limit);
}

// argmax of logits + noise over the logits >= threshold, the lowest id among equals (Gumbel-max; Maddison et al. 2014).
// Noise is computed where it may decide: a logarithm is worth more than the rest of a token's work.
inline int64_t draw(const float *logits, int64_t padded, float threshold, uint64_t key) {
  float best = -INFINITY;
  int64_t id = -1;
  for (int64_t i = 0; i < padded; i += kLanes) {
    f32x16 v = load(logits + i);
    float least = best - kLargestNoise > threshold ? best - kLargestNoise : threshold;
    i32x16 is_in = at_least(v, splat(least));
    if (!bits(is_in)) continue;
    uint32_t held = bits(is_in & may_win(v, uniforms_from(key + uint64_t(i) * kGolden), best));
    for (; held; held &= held - 1) {
      int64_t at = i + __builtin_ctz(held);
      float score = logits[at] + gumbel(key, at);
      if (id < 0 || score > best) {
        best = score;
        id = at;
      }
    }
  }
  return id < 0 ? 0 : id;
}

// The smallest logit that min-p, top-k and top-p keep: each sees what the one before it left; ties with the last one
// kept are kept. logits: at most 0. scratch: `padded` floats.
inline float threshold_of(const float *logits, int64_t padded, const Draw &of, float *scratch) {
  float threshold = of.log_min_p > -FLT_MAX ? of.log_min_p : -FLT_MAX;
  auto is_kept = [&](f32x16 v) { return at_least(v, splat(threshold)); };
  if (of.top_k > 0) {
    int64_t n = keep(logits, padded, scratch, is_kept);
    if (n > of.top_k) threshold = end_of(scratch, n, of.top_k, [](f32x16) { return splat(1.0f); });
  }
  if (of.top_p < 1.0f) {
    // Holtzman et al. 2020, section 3.1.
    auto mass = [](f32x16 v) { return exp(v); };
    int64_t n = keep(logits, padded, scratch, is_kept);
    double total = sum_of(scratch, whole_vectors(n), mass, is_kept);
    if (n > 0) threshold = end_of(scratch, n, of.top_p * total, mass);
  }
  return threshold;
}

// Floats that sample_row needs.
inline int64_t sample_scratch(int64_t vocab_size) { return 2 * whole_vectors(vocab_size); }

inline int64_t sample_row(const float *logits, int64_t vocab_size, const Draw &of, float *scratch) {
  if (of.temperature == 0.0f) return argmax_of(logits, vocab_size);
  int64_t padded = whole_vectors(vocab_size), i = 0;
  float *scaled = scratch, *rest = scratch + padded;
  float best = largest_of(logits, vocab_size);
  auto scale = [&](f32x16 v) { return of.temperature == 1.0f ? v - best : (v - best) / of.temperature; };
  for (; i + kLanes <= vocab_size; i += kLanes) store(scaled + i, scale(load(logits + i)));
  if (i < vocab_size) store(scaled + i, scale(load_or_least(logits + i, vocab_size - i)));
  return draw(scaled, padded, threshold_of(scaled, padded, of, rest), of.key);
}

}  // namespace DIPTYCH_ISA
