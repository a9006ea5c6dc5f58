#include "linear.h"

#include <utility>

#include "api.h"
#include "linear_tile.h"

namespace DIPTYCH_ISA {

namespace {

constexpr int64_t kBlockRows = 240;    // rows that share a panel's weights while the cache holds them
constexpr int64_t kChunk = 2048;       // inputs summed before the next rows: their weights stay in cache
constexpr int64_t kAheadBytes = 8192;  // of the weights: what memory takes to answer, at its best rate

template <class T>
using Tile = void (*)(const T *, int64_t, const T *, int64_t, float *, const char *, int64_t);

template <class T, int... I>
Tile<T> tile_of(int64_t num_rows, std::integer_sequence<int, I...>) {
  static constexpr Tile<T> table[] = {&tile<T, I + 1>...};
  return table[num_rows - 1];
}

// acc = sums or, unless it is the first, acc + sums; `count` of them.
void merge(const float *__restrict sums, float *__restrict acc, int64_t count) {
  for (int64_t i = 0; i < count; i++) acc[i] += sums[i];
}

inline f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

inline f32x16 gated(f32x16 gate, f32x16 up, Epilogue then) {
  if (then == kSiluMul) return gate * sigmoid(gate) * up;
  f32x16 inner = 1.5957691216f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi): tanh by sigmoid
  return gate * sigmoid(inner) * up;
}

// One row of one panel: y is its sums, which it overwrites; `width` outputs are within the matrix.
template <class Out>
void finish(float *y, const float *bias, Out *out, int64_t width, Epilogue then) {
  if (bias)
    for (int i = 0; i < kPanel; i++) y[i] += bias[i];
  if (then == kSiluMul || then == kGeluMul) store(y, gated(load(y), load(y + kLanes), then));
  if (then == kAdd)
    for (int64_t i = 0; i < width; i++) y[i] += widen(out[i]);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, load(y + i));
  for (; i < width; i++) narrow(out + i, y[i]);
}

}  // namespace

template <class T, class Out>
void linear(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
            Epilogue then, int index, int size) {
  constexpr int64_t kStep = Dot<T>::kStep, kStepBytes = kStep * kPanel * sizeof(T);
  alignas(64) float acc[kBlockRows * kPanel], sums[kTileRows * kPanel];
  const int64_t panel_elements = (of.k + kStep - 1) / kStep * kStep * kPanel;
  const int64_t panel_outputs = of.is_gated ? kPanel / 2 : kPanel, num_outputs = of.is_gated ? of.n / 2 : of.n;
  const int64_t num_chunks = (of.k + kChunk - 1) / kChunk, chunk = (of.k + 64 * num_chunks - 1) / (64 * num_chunks) * 64;
  const Span span = span_of((num_outputs + panel_outputs - 1) / panel_outputs, 1, index, size);
  for (int64_t block = 0; block < num_rows; block += kBlockRows) {
    const int64_t rows = num_rows - block < kBlockRows ? num_rows - block : kBlockRows;
    const int64_t num_tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t panel = span.first; panel < span.last; panel++) {
      const int64_t column = panel * panel_outputs;
      const int64_t width = num_outputs - column < panel_outputs ? num_outputs - column : panel_outputs;
      const float *bias = of.bias ? of.bias + panel * kPanel : nullptr;
      for (int64_t k = 0; k < of.k; k += chunk) {
        const int64_t inputs = of.k - k < chunk ? of.k - k : chunk;
        const T *weight = (const T *)of.weight + panel * panel_elements + k * kPanel;
        // The weights of the chunk after this one: each tile fetches its part of them.
        const char *fetch = (const char *)weight + (num_tiles == 1 ? kAheadBytes : inputs * kPanel * sizeof(T));
        const int64_t fetch_step = (kStepBytes + num_tiles - 1) / num_tiles;
        for (int64_t i = 0; i < num_tiles; i++) {
          const int64_t first = rows * i / num_tiles, count = rows * (i + 1) / num_tiles - first;
          Out *to = out + (block + first) * out_stride + column;
          for (int64_t r = 0; r < count; r++) __builtin_prefetch(to + r * out_stride, 1);
          float *y = acc + first * kPanel;
          tile_of<T>(count, std::make_integer_sequence<int, kTileRows>())(
              x + (block + first) * x_stride + k, x_stride, weight, inputs, k ? sums : y,
              fetch + i * (inputs / kStep) * fetch_step, fetch_step);
          if (k) merge(sums, y, count * kPanel);
          if (k + inputs == of.k)
            for (int64_t r = 0; r < count; r++) finish(y + r * kPanel, bias, to + r * out_stride, width, then);
        }
      }
    }
  }
}

template void linear(const Linear &, const float *, int64_t, int64_t, float *, int64_t, Epilogue, int, int);
template void linear(const Linear &, const bf16 *, int64_t, int64_t, bf16 *, int64_t, Epilogue, int, int);
template void linear(const Linear &, const bf16 *, int64_t, int64_t, float *, int64_t, Epilogue, int, int);

}  // namespace DIPTYCH_ISA

// x: num_rows rows of `dtype`, x_stride elements apart; out: of `out_dtype`.
API(linear)(Team *team, const void *of, int32_t dtype, const void *x, int64_t x_stride, int64_t num_rows,
            int32_t out_dtype, void *out, int64_t out_stride, int32_t then) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    const Linear &weights = *(const Linear *)of;
    Epilogue last = Epilogue(then);
    if (dtype == kFloat32)
      linear(weights, (const float *)x, x_stride, num_rows, (float *)out, out_stride, last, index, team->size);
    else if (out_dtype == kFloat32)
      linear(weights, (const bf16 *)x, x_stride, num_rows, (float *)out, out_stride, last, index, team->size);
    else
      linear(weights, (const bf16 *)x, x_stride, num_rows, (bf16 *)out, out_stride, last, index, team->size);
  });
}
