// Products of bf16 by the processor's matrix unit (Intel's AMX): 16 rows by 16 outputs, of 32 inputs at an instruction.
//
// The eight tiles, of at most 16 rows of 64 bytes: sums of two times 16 rows by two times 16 outputs, of which a panel has
// 32; the rows' inputs; and the panel's weights, 16 pairs of inputs each, as they are packed (linear.h). However few rows
// there are, they are multiplied so: a row's result has the same bits beside any others.
#pragma once

#include <cstdint>
#include <cstring>

#include "linear.h"

namespace DIPTYCH_ISA {

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

constexpr int64_t kTileSide = 16;    // rows, outputs
constexpr int64_t kTileInputs = 32;  // of an instruction
constexpr int64_t kRowsOfTiles = 2 * kTileSide;
constexpr int64_t kPairBytes = kPanel * 4;  // of a pair of inputs, for all outputs of a panel
constexpr int64_t kStepBytes = kTileInputs / 2 * kPairBytes;

// As ldtilecfg reads it (Intel's manual, volume 1, 18.2).
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row of each tile
  uint8_t rows[16] = {};
};

// Sets the tiles up for `num_rows` rows, at most kRowsOfTiles.
inline void configure_tiles(int64_t num_rows) {
  const uint8_t first = uint8_t(num_rows < kTileSide ? num_rows : kTileSide), second = uint8_t(num_rows - first);
  const uint8_t rows[8] = {first, first, second, second, first, second, kTileSide, kTileSide};
  TileConfig config;
  for (int i = 0; i < 8; i++)
    if ((config.rows[i] = rows[i])) config.bytes[i] = 64;
  _tile_loadconfig(&config);
}

// What is to be in cache soon: so many lines at each step.
struct Fetch {
  const char *next;
  int64_t lines;

  void step() {
    for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

template <bool kTwo>
inline void multiply_step(const bf16 *a, int64_t a_bytes, const char *b) {
  _tile_loadd(6, b, kPairBytes);
  _tile_loadd(4, a, a_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(7, b + kPairBytes / 2, kPairBytes);
  _tile_dpbf16ps(1, 4, 7);
  if constexpr (kTwo) {
    _tile_loadd(5, reinterpret_cast<const char *>(a) + kTileSide * a_bytes, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// acc[r] = a[r] b, or acc[r] += a[r] b, for the rows that the tiles were set up for; kTwo: more than 16. a: a_stride
// elements from row to row; b: k inputs of a panel; acc: [rows][kPanel].
template <bool kTwo>
void multiply_tiles(const bf16 *a, int64_t a_stride, int64_t num_rows, const char *b, int64_t k, bool continues, Fetch fetch,
                    float *acc) {
  constexpr int64_t kAccBytes = kPanel * sizeof(float);
  float *const second = acc + kTileSide * kPanel;
  if (continues) {
    _tile_loadd(0, acc, kAccBytes);
    _tile_loadd(1, acc + kTileSide, kAccBytes);
    if constexpr (kTwo) {
      _tile_loadd(2, second, kAccBytes);
      _tile_loadd(3, second + kTileSide, kAccBytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  int64_t i = 0;
  for (; i + kTileInputs <= k; i += kTileInputs, b += kStepBytes) {
    fetch.step();
    multiply_step<kTwo>(a + i, a_stride * int64_t(sizeof(bf16)), b);
  }
  if (i < k) {  // what lies beyond k may be anything
    alignas(64) bf16 rows[kRowsOfTiles][kTileInputs] = {};
    alignas(64) char weights[kStepBytes] = {};
    for (int64_t r = 0; r < num_rows; r++) std::memcpy(rows[r], a + r * a_stride + i, (k - i) * sizeof(bf16));
    std::memcpy(weights, b, (k - i + 1) / 2 * kPairBytes);
    multiply_step<kTwo>(rows[0], sizeof rows[0], weights);
  }
  _tile_stored(0, acc, kAccBytes);
  _tile_stored(1, acc + kTileSide, kAccBytes);
  if constexpr (kTwo) {
    _tile_stored(2, second, kAccBytes);
    _tile_stored(3, second + kTileSide, kAccBytes);
  }
}
#else
constexpr bool kHasTiles = false;
constexpr int64_t kRowsOfTiles = 1;
#endif

}  // namespace DIPTYCH_ISA
