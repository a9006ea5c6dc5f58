// The inner loop of linear by the processor's matrix unit (matrix_unit.h): up to 32 rows by one panel, of bf16 or of whole
// numbers of 8 bits.
//
// Tiles 0 to 3 are the sums, of two times 16 rows by two times 16 outputs; 4 and 5 the rows' inputs; 6 and 7 the panel's
// weights, 16 words of each output, as they are packed (linear.h). However few rows there are, they are multiplied so: a
// row's result has the same bits beside any others.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear.h"
#include "linear_tile.h"
#include "matrix_unit.h"

namespace DIPTYCH_ISA {

constexpr int64_t kTileSide = 16;  // rows, outputs, words of an output
constexpr int64_t kTileRowBytes = 64, kStepBytes = kTileSide * kUnitBytes;
constexpr int64_t kRowsOfTiles = 2 * kTileSide;

// Rows of a panel's product: `stride` bytes apart, of `num_bytes` each.
struct TileRows {
  const char *first;
  int64_t stride, num_bytes, num_rows;
};

// What is to be in cache soon: so many lines at each step.
struct Fetch {
  const char *next;
  int64_t lines;

  void step() {
    for (int64_t i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// Sets the tiles up for `num_rows` rows, at most kRowsOfTiles.
DIPTYCH_TILE_CODE inline void configure_tiles(int64_t num_rows) {
  const uint8_t first = uint8_t(num_rows < kTileSide ? num_rows : kTileSide), second = uint8_t(num_rows - first);
  const uint8_t rows[8] = {first, first, second, second, first, second, kTileSide, kTileSide};
  TileConfig config;
  for (int i = 0; i < 8; i++)
    if ((config.rows[i] = rows[i])) config.row_bytes[i] = kTileRowBytes;
  MatrixUnit::configure(config);
}

template <class Number, int Sums, int A, int B>
DIPTYCH_TILE_CODE inline void add_tiles() {
  if constexpr (std::is_same_v<Number, bf16>)
    MatrixUnit::add_bf16<Sums, A, B>();
  else
    MatrixUnit::add_int8<Sums, A, B>();
}

// kTwo: more than 16 rows.
template <class Number, bool kTwo>
DIPTYCH_TILE_CODE inline void multiply_step(const char *a, int64_t stride, const char *b) {
  MatrixUnit::load<6>(b, kUnitBytes);
  MatrixUnit::load<4>(a, stride);
  add_tiles<Number, 0, 4, 6>();
  MatrixUnit::load<7>(b + kTileRowBytes, kUnitBytes);
  add_tiles<Number, 1, 4, 7>();
  if constexpr (kTwo) {
    MatrixUnit::load<5>(a + kTileSide * stride, stride);
    add_tiles<Number, 2, 5, 6>();
    add_tiles<Number, 3, 5, 7>();
  }
}

// acc = a b, or acc += a b, for the rows that the tiles are set up for. b: the panel's units for the rows' bytes;
// acc: [rows][kPanel] float, or int32 of whole numbers.
template <class Number, bool kTwo>
DIPTYCH_TILE_CODE void multiply_tiles(const TileRows &a, const char *b, bool continues, Fetch fetch, void *acc) {
  constexpr int64_t kAccBytes = kPanel * 4;
  char *const first = (char *)acc, *const second = first + kTileSide * kAccBytes;
  if (continues) {
    MatrixUnit::load<0>(first, kAccBytes);
    MatrixUnit::load<1>(first + kTileRowBytes, kAccBytes);
    if constexpr (kTwo) {
      MatrixUnit::load<2>(second, kAccBytes);
      MatrixUnit::load<3>(second + kTileRowBytes, kAccBytes);
    }
  } else {
    MatrixUnit::zero<0>();
    MatrixUnit::zero<1>();
    if constexpr (kTwo) {
      MatrixUnit::zero<2>();
      MatrixUnit::zero<3>();
    }
  }
  int64_t at = 0;
  for (; at + kTileRowBytes <= a.num_bytes; at += kTileRowBytes, b += kStepBytes) {
    fetch.step();
    multiply_step<Number, kTwo>(a.first + at, a.stride, b);
  }
  if (const int64_t left = a.num_bytes - at) {  // what lies beyond them may be anything
    alignas(64) char rows[kRowsOfTiles * kTileRowBytes] = {}, weights[kStepBytes] = {};
    for (int64_t r = 0; r < a.num_rows; r++) std::memcpy(rows + r * kTileRowBytes, a.first + r * a.stride + at, left);
    std::memcpy(weights, b, (left + 3) / 4 * kUnitBytes);
    multiply_step<Number, kTwo>(rows, kTileRowBytes, weights);
  }
  MatrixUnit::store<0>(first, kAccBytes);
  MatrixUnit::store<1>(first + kTileRowBytes, kAccBytes);
  if constexpr (kTwo) {
    MatrixUnit::store<2>(second, kAccBytes);
    MatrixUnit::store<3>(second + kTileRowBytes, kAccBytes);
  }
}

// One panel for any number of rows: acc as multiply_tiles has it, for all of them. fetch: the weights that come after
// these `b`, of which each group of rows fetches its part. done(first row, number of rows): after each group.
template <class Number, class Done>
DIPTYCH_TILE_CODE void multiply_panel(const TileRows &a, const char *b, bool continues, const char *fetch, void *acc,
                                      Done &&done) {
  const int64_t num_groups = (a.num_rows + kRowsOfTiles - 1) / kRowsOfTiles;
  const int64_t lines = (kStepBytes / 64 + num_groups - 1) / num_groups;
  int64_t set_up = 0;
  for (int64_t i = 0; i < num_groups; i++) {
    const int64_t first = a.num_rows * i / num_groups, count = a.num_rows * (i + 1) / num_groups - first;
    if (count != set_up) configure_tiles(set_up = count);
    const auto multiply = count > kTileSide ? multiply_tiles<Number, true> : multiply_tiles<Number, false>;
    const TileRows rows{a.first + first * a.stride, a.stride, a.num_bytes, count};
    multiply(rows, b, continues, {fetch, lines}, (char *)acc + first * kPanel * 4);
    fetch += a.num_bytes / kTileRowBytes * lines * 64;
    done(first, count);
  }
}

}  // namespace DIPTYCH_ISA
