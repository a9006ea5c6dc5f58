// The instructions of the processor's matrix unit (Intel's AMX; Intel's manual, volume 1, chapter 18): eight tiles, of at
// most 16 rows of 64 bytes each. linear_tiles.h uses them.
//
// They are written as assembly: the compiler's own say neither that a load reads memory nor, in some versions, what is
// read, so that it may leave out what was stored before. No flags are needed then, and no code is built twice: the kernels
// for AVX512-BF16 have both. Whether the processor has the unit, `diptych_isas` tells.
#pragma once

#include <cstdint>

// Tests put an emulated one in its place.
#if defined(DIPTYCH_MATRIX_UNIT)
#include DIPTYCH_MATRIX_UNIT
#else

#if defined(__clang__)
#define DIPTYCH_TILE_CODE __attribute__((target("amx-tile,amx-bf16,amx-int8")))
#else
#define DIPTYCH_TILE_CODE
#endif

namespace DIPTYCH_ISA {

#if defined(__AVX512BF16__) && !defined(DIPTYCH_NO_TILES)
constexpr bool kHasMatrixUnit = true;
#else
constexpr bool kHasMatrixUnit = false;
#endif

// As ldtilecfg reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct MatrixUnit {
  // Sets the tiles up, all of them zero.
  DIPTYCH_TILE_CODE static void configure(const TileConfig &config) {
    asm volatile("ldtilecfg (%0)" ::"r"(&config) : "memory");
  }

  // Gives the tiles up: a thread that has some is slower to switch to.
  DIPTYCH_TILE_CODE static void release() { asm volatile("tilerelease"); }

  template <int Tile>
  DIPTYCH_TILE_CODE static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }

  // stride: bytes from row to row.
  template <int Tile>
  DIPTYCH_TILE_CODE static void load(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }

  template <int Tile>
  DIPTYCH_TILE_CODE static void store(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }

  // Sums [rows][16] float += a [rows][pairs][2] b [pairs][16][2], of bf16.
  template <int Sums, int A, int B>
  DIPTYCH_TILE_CODE static void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
  }

  // Sums [rows][16] int32 += a [rows][fours][4] b [fours][16][4], of uint8 and int8.
  template <int Sums, int A, int B>
  DIPTYCH_TILE_CODE static void add_int8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
  }
};

}  // namespace DIPTYCH_ISA
#endif
