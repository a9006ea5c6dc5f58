#include "linear.h"

#include <type_traits>
#include <utility>
#include <vector>

#include "api.h"
#include "linear_epilogue.h"
#include "linear_rows8.h"
#include "linear_source.h"
#include "linear_tile.h"
#include "linear_tiles.h"
#include "linear_unpack.h"

namespace DIPTYCH_ISA {

namespace {

constexpr int64_t kBlockBytes = 512 << 10;  // of the rows at once, in one chunk: they stay in cache for the next panel
constexpr int64_t kChunk = 2048;       // inputs summed before the next rows: their weights stay in cache
constexpr int64_t kUnpacked = kMostInGroup;  // the same of quantised weights, which are unpacked into scratch
constexpr int64_t kAheadBytes = 8192;  // of the weights: what memory takes to answer, at its best rate
constexpr int64_t kUnits8 = 256;        // of four inputs: as kChunk
constexpr int64_t kFewestRows8 = 48;    // at once, however many inputs they have: each block reads all weights
constexpr int64_t kAsFloats = 256;     // the same where they become floats

constexpr float kZeros[kPanel] = {};

template <class T>
using Tile = void (*)(const T *, int64_t, const Units &, const float *, int64_t, float *);

template <class T, class Source, int... I>
Tile<T> tile_of(int64_t num_rows, std::integer_sequence<int, I...>) {
  static constexpr Tile<T> table[] = {&tile<T, Source, I + 1>...};
  return table[num_rows - 1];
}

template <class T, class Source, int... I>
Tile<T> group_tile_of(int64_t num_rows, std::integer_sequence<int, I...>) {
  static constexpr Tile<T> table[] = {&tile_of_groups<T, Source, I + 1>...};
  return table[num_rows - 1];
}

// A thread's memory for sums of rows: grows to what is needed.
float *sums_memory(int64_t num) {
  thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < num) memory.resize(num);
  return memory.data();
}

// Sums of the inputs that share a scale: [num_rows][groups].
template <class T>
const float *totals_by_group(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows) {
  float *const totals = sums_memory(num_rows * num_groups(of)), *to = totals;
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t first = 0; first < of.k; first += of.group) {
      const T *from = x + row * x_stride + first;
      const int64_t count = of.k - first < of.group ? of.k - first : of.group;
      f32x16 total{};
      int64_t i = 0;
      for (; i + kLanes <= count; i += kLanes) total += load(from + i);
      if (i < count) total += load_some(from + i, count - i);
      *to++ = sum(total);
    }
  return totals;
}

// One panel for a block of rows.
template <class T, class Source>
class Panel {
 public:
  Panel(const Linear &of, int64_t index) : of_(of), index_(index) {
    chunk_ = chunk_of(of);
    weight_ = (const char *)of.weight + index * units(of.k) * kUnitBytes;
  }

  // Inputs that are summed before the next rows'.
  static int64_t chunk_of(const Linear &of) {
    const int64_t num_chunks = (of.k + kMost - 1) / kMost;
    if (sums_groups(of)) return of.at_once;
    if (Source::kByGroup) return of.group < kMost ? kMost / of.group * of.group : of.group;
    return (of.k + 64 * num_chunks - 1) / (64 * num_chunks) * 64;
  }

  // x, out: the block's first row, out at the panel's first output; totals: `totals_by_group`, if there are offsets of
  // sums; width: outputs within the matrix.
  template <class Out>
  void run(const T *x, int64_t x_stride, int64_t num_rows, const float *totals, Out *out, int64_t out_stride,
           int64_t width, const Epilogue &epilogue) const {
    if constexpr (kHasMatrixUnit && std::is_same_v<Source, Plain<bf16>>)
      if (of_.by_tiles) return run_tiles(x, x_stride, num_rows, out, out_stride, width, epilogue);
    alignas(64) float acc[kMostRowsAtOnce * kPanel];
    alignas(64) char scratch[kPlainWeights ? 1 : kScratchBytes];
    const bool by_groups = sums_groups(of_);
    const bool is_unpacked = !kPlainWeights && num_rows > kDirectRows;
    const int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows, groups = num_groups(of_);
    const float *bias = of_.bias ? of_.bias + index_ * kPanel : nullptr;
    const float *scales = Source::kByGroup || by_groups || kPlainWeights ? nullptr : of_.scales + index_ * kPanel;
    for (int64_t k = 0; k < of_.k; k += chunk_) {
      const int64_t inputs = of_.k - k < chunk_ ? of_.k - k : chunk_;
      Units by = units_of(k, inputs);
      // The weights of the chunk after this one: each tile fetches its part of them, a little with each unit it reads.
      const char *fetch = by.first + (num_tiles == 1 && !is_unpacked ? kAheadBytes : units(inputs) * kUnitBytes);
      const int64_t num_reads = is_unpacked ? inputs / Dot<T>::kStep : units(inputs);
      by.fetch_step = units(inputs) * kUnitBytes / (num_reads * num_tiles) + 1;
      if (is_unpacked) {
        unpack<T, Source>(by, scratch);
        by.first = scratch;
        // The same sums to the bit, but of what underflows, in other units, with no end of a group between.
        if (by_groups && of_.are_powers) {
          scale_to_last(scratch, inputs, by.scales, by.group);
          by.group = inputs;
        }
      }
      for (int64_t i = 0; i < num_tiles; i++) {
        const int64_t first = num_rows * i / num_tiles, count = num_rows * (i + 1) / num_tiles - first;
        Out *to = out + first * out_stride;
        for (int64_t r = 0; r < count; r++) __builtin_prefetch(to + r * out_stride, 1);
        float *y = acc + first * kPanel;
        by.fetch = fetch + i * num_reads * by.fetch_step;
        const float *own = totals ? totals + first * groups + k / of_.group : nullptr;
        tile_for(count, is_unpacked, by_groups)(x + first * x_stride + k, x_stride, by, own, groups, y);
        if (k + inputs == of_.k)
          for (int64_t r = 0; r < count; r++)
            finish(y + r * kPanel, scales, bias, to + r * out_stride, width, epilogue);
      }
    }
  }

 private:
  // As `run`, of plain bf16.
  template <class Out>
  void run_tiles(const bf16 *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride, int64_t width,
                 const Epilogue &epilogue) const {
    alignas(64) float acc[kMostRowsAtOnce * kPanel];
    const float *bias = of_.bias ? of_.bias + index_ * kPanel : nullptr;
    for (int64_t k = 0; k < of_.k; k += chunk_) {
      const int64_t inputs = of_.k - k < chunk_ ? of_.k - k : chunk_;
      const TileRows rows{(const char *)(x + k), x_stride * int64_t(sizeof(bf16)), inputs * int64_t(sizeof(bf16)), num_rows};
      const char *weights = weight_ + units(k) * kUnitBytes;
      const char *fetch = weights + (num_rows > kRowsOfTiles ? units(inputs) * kUnitBytes : kAheadBytes);
      multiply_panel<bf16>(rows, weights, k > 0, fetch, acc, [&](int64_t first, int64_t count) {
        if (k + inputs < of_.k) return;
        for (int64_t r = first; r < first + count; r++)
          finish(acc + r * kPanel, nullptr, bias, out + r * out_stride, width, epilogue);
      });
    }
  }

  static constexpr bool kPlainWeights = Source::kFormat == kPlain;
  static constexpr bool kMaySumGroups = !kPlainWeights && !kScalesColumns<T>;
  static constexpr int64_t kMost = kPlainWeights ? kChunk : kScalesColumns<T> ? kAsFloats : kUnpacked;
  static constexpr int64_t kScratchBytes = kUnpacked * kPanel * (kScalesColumns<T> ? sizeof(float) : sizeof(T));

  static int64_t units(int64_t inputs) { return (inputs + Source::kInputs - 1) / Source::kInputs; }

  // Whether each group's sums are scaled, and not its weights.
  static bool sums_groups(const Linear &of) { return kMaySumGroups && is_by_group(of); }

  static Tile<T> tile_for(int64_t num_rows, bool is_unpacked, bool by_groups) {
    using InScratch = Unpacked<T, Source>;
    const auto sizes = std::make_integer_sequence<int, kTileRows>();
    if constexpr (kMaySumGroups)
      if (by_groups)
        return is_unpacked ? group_tile_of<T, InScratch>(num_rows, sizes) : group_tile_of<T, Source>(num_rows, sizes);
    return is_unpacked ? tile_of<T, InScratch>(num_rows, sizes) : tile_of<T, Source>(num_rows, sizes);
  }

  Units units_of(int64_t k, int64_t inputs) const {
    Units by{weight_ + units(k) * kUnitBytes, inputs, of_.table, k > 0};
    if (Source::kByGroup || sums_groups(of_)) {
      const int64_t at = (index_ * num_groups(of_) + k / of_.group) * kPanel;
      by.scales = of_.scales + at;
      by.offsets = of_.offsets ? of_.offsets + at : kZeros;
      by.group = of_.group;
      by.offset_step = of_.offsets ? kPanel : 0;
    }
    return by;
  }

  const Linear &of_;
  const char *weight_;
  int64_t index_, chunk_;
};

// Rows whose inputs have the places that a weight's have, in a thread's own memory.
template <class T>
struct OrderedRows {
  const T *first;
  int64_t stride;
};

template <class T>
OrderedRows<T> in_order_of(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows) {
  constexpr int64_t kLine = 64 / sizeof(T);
  thread_local std::vector<T> memory;
  const int64_t stride = (of.k + kLine - 1) / kLine * kLine + kLine;  // rows do not meet in the same few sets of a cache
  if (int64_t(memory.size()) < num_rows * stride) memory.resize(num_rows * stride);
  for (int64_t row = 0; row < num_rows; row++) {
    T *to = memory.data() + row * stride;
    for (int64_t i = 0; i < of.k; i++) to[i] = x[row * x_stride + of.order[i]];
  }
  return {memory.data(), stride};
}

int64_t width_of(const Linear &of) { return of.is_gated ? kPanel / 2 : kPanel; }

template <class T, class Source, class Out>
void multiply(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
              const Epilogue &epilogue, Span panels) {
  const int64_t width = width_of(of), num_outputs = of.is_gated ? of.n / 2 : of.n, most = rows_at_once<T>(of);
  const int64_t num_blocks = panels.first < panels.last ? (num_rows + most - 1) / most : 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t first = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - first;
    OrderedRows<T> from{x + first * x_stride, x_stride};
    if (of.order) from = in_order_of(of, from.first, x_stride, rows);
    const bool has_totals = of.offsets && !Source::kByGroup;
    const float *totals = has_totals ? totals_by_group(of, from.first, from.stride, rows) : nullptr;
    for (int64_t panel = panels.first; panel < panels.last; panel++) {
      const int64_t column = panel * width, left = num_outputs - column;
      Panel<T, Source>(of, panel).run(from.first, from.stride, rows, totals, out + first * out_stride + column, out_stride,
                                      left < width ? left : width, epilogue);
    }
  }
  if constexpr (kHasMatrixUnit)
    if (of.by_tiles) MatrixUnit::release();
}

}  // namespace

int64_t num_panels(const Linear &of) { return ((of.is_gated ? of.n / 2 : of.n) + width_of(of) - 1) / width_of(of); }

using Tile8 = void (*)(const Row8 *, int64_t, const char *, int64_t, int32_t *, const char *, int64_t);

template <int... I>
Tile8 tile8_of(int64_t num_rows, std::integer_sequence<int, I...>) {
  static constexpr Tile8 table[] = {&tile8<I + 1>...};
  return table[num_rows - 1];
}

// One panel for a block of rows that are quantised. Other parameters: as Panel::run has them.
template <class Out>
void run_panel8(const Linear &of, int64_t index, const Rows8 &x, int64_t num_rows, Out *out, int64_t out_stride,
                int64_t width, const Epilogue &epilogue) {
  alignas(64) int32_t acc[kMostRowsAtOnce * kPanel];
  const int64_t all_units = (of.k + 3) / 4, num_tiles = (num_rows + kTileRows - 1) / kTileRows;
  const char *weight = (const char *)of.weight + index * all_units * kUnitBytes;
  for (int64_t r = 0; r < num_rows; r++)
    for (int i = 0; i < kPanel; i++) acc[r * kPanel + i] = -kRowBias * of.sums[index * kPanel + i];
  for (int64_t unit = 0; unit < all_units; unit += kUnits8) {
    const int64_t count = all_units - unit < kUnits8 ? all_units - unit : kUnits8;
    const char *from = weight + unit * kUnitBytes;
    const char *fetch = from + (num_tiles == 1 ? kAheadBytes : count * kUnitBytes);
    const int64_t step = kUnitBytes / num_tiles + 1;
    if constexpr (kHasMatrixUnit)
      if (of.by_tiles) {
        const TileRows rows{(const char *)(x.first + 4 * unit), x.stride, 4 * count, num_rows};
        multiply_panel<uint8_t>(rows, from, true, num_rows > kRowsOfTiles ? from + count * kUnitBytes : from + kAheadBytes,
                                acc, [](int64_t, int64_t) {});
        continue;
      }
    for (int64_t i = 0; i < num_tiles; i++) {
      const int64_t first = num_rows * i / num_tiles, rows = num_rows * (i + 1) / num_tiles - first;
      tile8_of(rows, std::make_integer_sequence<int, kTileRows>())(x.first + first * x.stride + 4 * unit, x.stride, from,
                                                                  count, acc + first * kPanel, fetch + i * count * step,
                                                                  step);
    }
  }
  const float *bias = of.bias ? of.bias + index * kPanel : nullptr;
  for (int64_t r = 0; r < num_rows; r++) {
    alignas(64) float y[kPanel];
    for (int i = 0; i < kPanel; i++) y[i] = float(acc[r * kPanel + i]) * x.scales[r];
    finish(y, of.scales + index * kPanel, bias, out + r * out_stride, width, epilogue);
  }
}

template <class T, class Out>
void multiply8(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
               const Epilogue &epilogue, Span panels) {
  const int64_t width = width_of(of), num_outputs = of.is_gated ? of.n / 2 : of.n, most = rows_at_once<T>(of);
  const int64_t num_blocks = panels.first < panels.last ? (num_rows + most - 1) / most : 0;
  for (int64_t block = 0; block < num_blocks; block++) {
    const int64_t first = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - first;
    const Rows8 some = quantise_rows(x + first * x_stride, x_stride, rows, of.k);
    for (int64_t panel = panels.first; panel < panels.last; panel++) {
      const int64_t column = panel * width, left = num_outputs - column;
      run_panel8(of, panel, some, rows, out + first * out_stride + column, out_stride, left < width ? left : width,
                 epilogue);
    }
  }
  if constexpr (kHasMatrixUnit)
    if (of.by_tiles) MatrixUnit::release();
}

// Calls work<Source>(), of what reads the weights' format.
template <class T, class Work>
auto with_source(const Linear &of, Work &&work) {
  auto of_format = [&]<Format F>() {
    if constexpr (kScalesColumns<T>)
      if (is_by_group(of)) return work.template operator()<ByGroup<Quantised<T, F>>>();
    return work.template operator()<Quantised<T, F>>();
  };
  switch (of.format) {
    case kInt8: return of_format.template operator()<kInt8>();
    case kInt4: return of_format.template operator()<kInt4>();
    case kTable4: return of_format.template operator()<kTable4>();
    case kFp8: return of_format.template operator()<kFp8>();
    default: return work.template operator()<Plain<T>>();
  }
}

template <class T>
int64_t rows_at_once(const Linear &of) {
  if (of.format == kW8A8) {
    const int64_t rows = 2 * kBlockBytes / (of.k * int64_t(sizeof(Row8)));
    return rows < kFewestRows8 ? kFewestRows8 : rows < kMostRowsAtOnce ? rows : kMostRowsAtOnce;
  }
  const int64_t chunk = with_source<T>(of, [&]<class Source>() { return Panel<T, Source>::chunk_of(of); });
  const int64_t fitting = kBlockBytes / (chunk * int64_t(sizeof(T)));
  return fitting < kMostRowsAtOnce ? fitting : kMostRowsAtOnce;
}

template <class T, class Out>
void linear_panels(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride,
                   const Epilogue &epilogue, Span panels) {
  if (of.format == kW8A8) return multiply8(of, x, x_stride, num_rows, out, out_stride, epilogue, panels);
  with_source<T>(of, [&]<class Source>() {
    multiply<T, Source>(of, x, x_stride, num_rows, out, out_stride, epilogue, panels);
  });
}

template <class T, class Out>
void linear(const Linear &of, const T *x, int64_t x_stride, int64_t num_rows, Out *out, int64_t out_stride, Epilogue epilogue,
            int index, int size) {
  linear_panels(of, x, x_stride, num_rows, out, out_stride, epilogue, span_of(num_panels(of), 1, index, size));
}

template int64_t rows_at_once<float>(const Linear &);
template int64_t rows_at_once<bf16>(const Linear &);
template void linear_panels(const Linear &, const float *, int64_t, int64_t, float *, int64_t, const Epilogue &, Span);
template void linear_panels(const Linear &, const bf16 *, int64_t, int64_t, bf16 *, int64_t, const Epilogue &, Span);
template void linear(const Linear &, const float *, int64_t, int64_t, float *, int64_t, Epilogue, int, int);
template void linear(const Linear &, const bf16 *, int64_t, int64_t, bf16 *, int64_t, Epilogue, int, int);
template void linear(const Linear &, const bf16 *, int64_t, int64_t, float *, int64_t, Epilogue, int, int);

}  // namespace DIPTYCH_ISA

// x: num_rows rows of `dtype`, x_stride elements apart; out: of `out_dtype`.
API(linear)(Team *team, const void *of, int32_t dtype, const void *x, int64_t x_stride, int64_t num_rows,
            int32_t out_dtype, void *out, int64_t out_stride, int32_t epilogue) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    const Linear &weights = *(const Linear *)of;
    EpilogueKind last = EpilogueKind(epilogue);
    if (dtype == kFloat32)
      linear(weights, (const float *)x, x_stride, num_rows, (float *)out, out_stride, last, index, team->size);
    else if (out_dtype == kFloat32)
      linear(weights, (const bf16 *)x, x_stride, num_rows, (float *)out, out_stride, last, index, team->size);
    else
      linear(weights, (const bf16 *)x, x_stride, num_rows, (bf16 *)out, out_stride, last, index, team->size);
  });
}
