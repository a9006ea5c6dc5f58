// Root-mean-square norm of rows.
#pragma once

#include <cmath>

#include "simd.h"
#include "team.h"

namespace DIPTYCH_ISA {

// out = x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019), over `dim` elements; rounded to T once. `out` may be
// `x`.
template <class T>
void rms_norm_row(const T *x, const float *weight, T *out, int64_t dim, float eps) {
  f32x16 squares{};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    f32x16 v = load(x + i);
    squares += v * v;
  }
  if (i < dim) {
    f32x16 v = load_some(x + i, dim - i);
    squares += v * v;
  }
  float scale = 1.0f / std::sqrt(sum(squares) / float(dim) + eps);
  for (i = 0; i + kLanes <= dim; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
  if (i < dim) store_some(out + i, load_some(x + i, dim - i) * scale * load_some(weight + i, dim - i), dim - i);
}

// Team function: rows of `dim` elements, `..._stride` elements apart.
template <class T>
void rms_norm(const T *x, int64_t x_stride, const float *weight, T *out, int64_t out_stride, int64_t num_rows, int64_t dim,
              float eps, int index, int size) {
  Span rows = span_of(num_rows, 1, index, size);
  for (int64_t row = rows.first; row < rows.last; row++)
    rms_norm_row(x + row * x_stride, weight, out + row * out_stride, dim, eps);
}

}  // namespace DIPTYCH_ISA
