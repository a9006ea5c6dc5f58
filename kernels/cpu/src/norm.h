// Root-mean-square norm of one row.
#pragma once

#include <cmath>

#include "simd.h"

namespace DIPTYCH_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), over `dim` elements. `out` may be `x`.
template <class T>
void rms_norm_row(const T *x, const T *weight, T *out, int64_t dim, float eps) {
  f32x16 squares{};
  float tail = 0.0f;
  int64_t whole = dim / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    f32x16 v = load(x + i);
    squares += v * v;
  }
  for (int64_t i = whole; i < dim; i++) tail += widen(x[i]) * widen(x[i]);
  float scale = 1.0f / std::sqrt((sum(squares) + tail) / float(dim) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  for (int64_t i = whole; i < dim; i++) narrow(out + i, widen(x[i]) * scale * widen(weight[i]));
}

}  // namespace DIPTYCH_ISA
