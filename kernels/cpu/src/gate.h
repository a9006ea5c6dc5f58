// Activations, and the gate of an MLP: activation(gate) * up.
#pragma once

#include "simd.h"
#include "team.h"

namespace DIPTYCH_ISA {

enum Activation : int32_t { kSilu = 0, kGelu = 1 };

inline f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }

// x * Phi(x) by the tanh form (Hendrycks & Gimpel 2016, section 2), where (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
inline f32x16 gelu(f32x16 x) {
  constexpr float minus_twice_root_2_over_pi = -1.59576912f;
  return x / (exp((x + x * x * x * 0.044715f) * minus_twice_root_2_over_pi) + 1.0f);
}

// out = activation(gate) * up, rounded once. `out` may be `gate` or `up`.
template <class T>
void gate_row(const T *gate, const T *up, T *out, int64_t dim, Activation activation) {
  auto gated = [&](f32x16 g, f32x16 u) { return (activation == kSilu ? silu(g) : gelu(g)) * u; };
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) store(out + i, gated(load(gate + i), load(up + i)));
  if (i < dim) store_some(out + i, gated(load_some(gate + i, dim - i), load_some(up + i, dim - i)), dim - i);
}

// Team function. gate_up: num_rows rows of [gate | up], 2 * dim elements, gate_up_stride elements apart.
template <class T>
void gate_mul(const T *gate_up, int64_t gate_up_stride, T *out, int64_t out_stride, int64_t num_rows, int64_t dim,
              Activation activation, int index, int size) {
  Span rows = span_of(num_rows, 1, index, size);
  for (int64_t row = rows.first; row < rows.last; row++) {
    const T *gate = gate_up + row * gate_up_stride;
    gate_row(gate, gate + dim, out + row * out_stride, dim, activation);
  }
}

}  // namespace DIPTYCH_ISA
