// What follows x W^T in the same pass (Epilogue of linear.h): scales, bias, gates, what is added.
#pragma once

#include "linear.h"

namespace DIPTYCH_ISA {

inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

inline f32x16 gated(f32x16 gate, f32x16 up, const Epilogue &epilogue) {
  if (epilogue.what == kSiluMul) return gate * sigmoid(gate) * up;
  if (epilogue.what == kClampedMul) {
    const f32x16 low = splat(-epilogue.limit), high = splat(epilogue.limit);
    gate = min(high, gate);  // NaN stays NaN
    return (max(low, min(high, up)) + 1.0f) * gate * sigmoid(gate * epilogue.alpha);
  }
  f32x16 inner = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi): tanh by sigmoid
  return gate * sigmoid(inner) * up;
}

// One row of one panel: y is its sums, which it overwrites; `width` outputs are within the matrix.
template <class Out>
void finish(float *y, const float *scales, const float *bias, Out *out, int64_t width, const Epilogue &epilogue) {
  if (scales)
    for (int i = 0; i < kPanel; i++) y[i] *= scales[i];
  if (bias)
    for (int i = 0; i < kPanel; i++) y[i] += bias[i];
  if (epilogue.what >= kSiluMul) store(y, gated(load(y), load(y + kLanes), epilogue));
  if (epilogue.what == kAdd)
    for (int64_t i = 0; i < width; i++) y[i] += widen(out[i]);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, load(y + i));
  for (; i < width; i++) narrow(out + i, y[i]);
}

}  // namespace DIPTYCH_ISA
