// The matrix unit of matrix_unit.h in plain C++, by the pseudocode of Intel's manual (volume 2: LDTILECFG, TILELOADD,
// TDPBF16PS, TDPBUSD): what the processor refuses ends the process.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define DIPTYCH_TILE_CODE

namespace DIPTYCH_ISA {

constexpr bool kHasMatrixUnit = true;

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

class MatrixUnit {
 public:
  static void configure(const TileConfig &config) {
    require(config.palette == 1 && config.start_row == 0);
    for (int i = 0; i < 16; i++) {
      require(config.rows[i] <= (i < 8 ? 16 : 0) && config.row_bytes[i] <= (i < 8 ? 64 : 0));
      require((config.rows[i] == 0) == (config.row_bytes[i] == 0));
    }
    own() = State{};
    own().config = config;
    own().is_set_up = true;
  }

  static void release() { own() = State{}; }

  template <int Tile>
  static void zero() {
    require(rows(Tile) > 0);
    std::memset(own().tiles[Tile], 0, sizeof own().tiles[Tile]);
  }

  template <int Tile>
  static void load(const void *from, int64_t stride) {
    zero<Tile>();
    for (int row = 0; row < rows(Tile); row++)
      std::memcpy(own().tiles[Tile][row], (const char *)from + row * stride, own().config.row_bytes[Tile]);
  }

  template <int Tile>
  static void store(void *to, int64_t stride) {
    require(rows(Tile) > 0);
    for (int row = 0; row < rows(Tile); row++)
      std::memcpy((char *)to + row * stride, own().tiles[Tile][row], own().config.row_bytes[Tile]);
  }

  template <int Sums, int A, int B>
  static void add_bf16() {
    fit(Sums, A, B);
    for (int m = 0; m < rows(Sums); m++)
      for (int n = 0; n < 16; n++) {
        float even = 0, odd = 0;
        for (int k = 0; k < rows(B); k++) {
          even = std::fma(number(A, m, 2 * k), number(B, k, 2 * n), even);
          odd = std::fma(number(A, m, 2 * k + 1), number(B, k, 2 * n + 1), odd);
        }
        float sum;
        std::memcpy(&sum, own().tiles[Sums][m] + 4 * n, 4);
        sum += even + odd;
        std::memcpy(own().tiles[Sums][m] + 4 * n, &sum, 4);
      }
  }

  template <int Sums, int A, int B>
  static void add_int8() {
    fit(Sums, A, B);
    for (int m = 0; m < rows(Sums); m++)
      for (int n = 0; n < 16; n++) {
        int32_t sum;
        std::memcpy(&sum, own().tiles[Sums][m] + 4 * n, 4);
        for (int k = 0; k < rows(B); k++)
          for (int i = 0; i < 4; i++)
            sum += int32_t(uint8_t(own().tiles[A][m][4 * k + i])) * int32_t(int8_t(own().tiles[B][k][4 * n + i]));
        std::memcpy(own().tiles[Sums][m] + 4 * n, &sum, 4);
      }
  }

 private:
  struct State {
    TileConfig config;
    bool is_set_up = false;
    unsigned char tiles[8][16][64] = {};
  };

  static void require(bool holds) {
    if (!holds) std::abort();
  }

  static State &own() {
    thread_local State state;
    return state;
  }

  static int rows(int tile) { return own().is_set_up ? own().config.rows[tile] : 0; }

  // A has a row for each of the sums, and as many words in it as B has rows.
  static void fit(int sums, int a, int b) {
    const TileConfig &config = own().config;
    require(rows(sums) > 0 && rows(sums) == rows(a) && config.row_bytes[a] == 4 * rows(b));
    require(config.row_bytes[sums] == 64 && config.row_bytes[b] == 64);
  }

  // A bf16, one too small for its exponent as zero.
  static float number(int tile, int row, int i) {
    uint32_t bits = 0;
    std::memcpy((char *)&bits + 2, own().tiles[tile][row] + 2 * i, 2);
    float number;
    std::memcpy(&number, &bits, 4);
    return std::fpclassify(number) == FP_SUBNORMAL ? 0.0f : number;
  }
};

}  // namespace DIPTYCH_ISA
