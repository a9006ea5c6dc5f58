// Packs weights for linear.h.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "api.h"
#include "linear.h"
#include "linear_source.h"
#include "linear_tile.h"

namespace DIPTYCH_ISA {

namespace {

// Where row `n` of the whole weight is; null beyond it.
template <class T>
const T *row_of(const WeightRows *parts, int64_t num_parts, int64_t n) {
  for (int64_t i = 0; i < num_parts; n -= parts[i++].num_rows)
    if (n < parts[i].num_rows) return (const T *)parts[i].rows + n * parts[i].stride;
  return nullptr;
}

// The row that lane `lane` of a panel holds; `num_rows` where it holds none.
int64_t packed_row(int64_t num_rows, bool is_gated, int64_t panel, int64_t lane) {
  if (!is_gated) return std::min(panel * kPanel + lane, num_rows);
  int64_t half = num_rows / 2, i = panel * (kPanel / 2) + lane % (kPanel / 2);
  return i < half ? i + lane / (kPanel / 2) * half : num_rows;
}

// rows: kPanel of them, null: zeros. out: one panel.
template <class T>
void pack_panel(const T *const *rows, int64_t k, T *out) {
  constexpr int kStep = Dot<T>::kStep;
  constexpr int64_t kRun = 64;  // inputs at a time: whole cache lines are read and written
  for (int64_t first = 0; first < k; first += kRun) {
    const int64_t last = std::min(first + kRun, (k + kStep - 1) / kStep * kStep);
    for (int lane = 0; lane < kPanel; lane++) {
      T *const to = out + lane * kStep;
      const int64_t whole = rows[lane] ? std::min(last, k / kStep * kStep) : first;
      for (int64_t i = first; i < whole; i += kStep) std::memcpy(to + i * kPanel, rows[lane] + i, kStep * sizeof(T));
      for (int64_t i = whole; i < last; i++)
        to[i / kStep * kStep * kPanel + i % kStep] = rows[lane] && i < k ? rows[lane][i] : T{};
    }
  }
}

// The scale of `count` weights: 0 where all of them are. Int8: the largest becomes 127 or -127. Int4: it becomes -8, so
// that all sixteen values serve (llama.cpp's Q4_0); the twins are workers/models/quant/int8.py and int4.py.
template <class T>
float scale_of(const T *weights, int64_t count, Format format) {
  float low = 0.0f, high = 0.0f;
  for (int64_t i = 0; i < count; i++) {
    float w = widen(weights[i]);
    low = w < low ? w : low;
    high = w > high ? w : high;
  }
  if (format == kInt8) return (high > -low ? high : -low) / 127.0f;
  return (high > -low ? high : low) / -8.0f;
}

// weights / scale to the nearest whole number, ties to even.
template <class T>
void quantise(const T *__restrict weights, int64_t count, float scale, Format format, int8_t *__restrict out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: no bit is left for a fraction
  const float most = format == kInt8 ? 127.0f : 7.0f;
  for (int64_t i = 0; i < count; i++) {
    float q = widen(weights[i]) / scale;
    q = q > most ? most : q < -8.0f && format == kInt4 ? -8.0f : q;
    out[i] = int8_t(int32_t((q + kRound) - kRound));
  }
}

// A word of four numbers of 8 bits, or of eight of 4.
uint32_t word_of(const int8_t *numbers, int count) {
  const int bits = 32 / count;
  uint32_t word = 0;
  for (int j = 0; j < count; j++) word |= (uint32_t(numbers[j]) & ((1u << bits) - 1)) << bit_of(j, bits);
  return word;
}

// rows: kPanel of them, null: zeros. given: each row's scales, or nulls: found here. out: one panel of units; scales: its
// [k / group][kPanel].
template <class T>
void quantise_panel(const T *const *rows, const float *const *given, int64_t k, int64_t group, Format format,
                    uint32_t *out, float *scales) {
  const int inputs = format == kInt8 ? 4 : 8;
  constexpr int64_t kRun = 512;
  int8_t q[kRun];
  for (int lane = 0; lane < kPanel; lane++)
    for (int64_t first = 0; first < k; first += group) {
      const int64_t end = std::min(first + group, k);
      const float scale = !rows[lane]   ? 0.0f
                          : given[lane] ? given[lane][first / group]
                                        : scale_of(rows[lane] + first, end - first, format);
      scales[first / group * kPanel + lane] = scale;
      for (int64_t run = first; run < end; run += kRun) {
        const int64_t count = std::min(kRun, end - run);
        std::memset(q, 0, sizeof q);
        if (scale != 0.0f) quantise(rows[lane] + run, count, scale, format, q);
        for (int64_t i = 0; i < count; i += inputs) out[(run + i) / inputs * kPanel + lane] = word_of(q + i, inputs);
      }
    }
}

// The largest scale of an output that shares a sum with another is at most so many times that: no sum overflows.
constexpr float kFarthest = 0x1p60f;

// Groups of one output: of its scales, kPanel apart, and of its words in a panel, likewise.
struct OutputGroups {
  float *scales;
  const uint32_t *words;
  int64_t units, units_of_group;
  const float *table;  // [16], or null

  bool is_zero(int64_t group) const {
    const int64_t first = group * units_of_group, end = std::min(first + units_of_group, units);
    for (int64_t i = first; i < end; i++)
      for (uint32_t word = words[i * kPanel], j = 0; j < 8 && (word || table); j++, word >>= 4)
        if (table ? table[word & 15] != 0.0f : (word & 15) != 0) return false;
    return true;
  }

  // Gives scales that are far below the others of their sum, of groups whose numbers are all 0, the largest of these.
  // Returns whether none is far below then.
  bool even_out(int64_t first, int64_t end) const {
    float largest = 0.0f;
    for (int64_t g = first; g < end; g++) largest = std::max(largest, std::abs(scales[g * kPanel]));
    bool are_even = true;
    for (int64_t g = first; g < end; g++) {
      float &scale = scales[g * kPanel];
      if (largest > 0.0f && std::abs(scale) * kFarthest >= largest) continue;
      if (is_zero(g)) scale = largest > 0.0f ? largest : 1.0f;
      else are_even = false;
    }
    return are_even;
  }
};

// Evens out the scales of a panel, where `at_once` inputs share a sum. Returns whether none is far below others then.
bool even_out_panel(float *scales, const uint32_t *words, int64_t k, int64_t group, int64_t inputs, const float *table) {
  const int64_t groups = (k + group - 1) / group, at_once = std::max(kMostInGroup / group, int64_t(1));
  bool are_even = true;
  for (int lane = 0; lane < kPanel; lane++) {
    const OutputGroups of{scales + lane, words + lane, (k + inputs - 1) / inputs, group / inputs, table};
    for (int64_t g = 0; g < groups; g += at_once) are_even &= of.even_out(g, std::min(g + at_once, groups));
  }
  return are_even;
}

}  // namespace

// As API(pack_linear) has them. group: inputs that share a scale; k for kInt8. given: [n][groups], or null.
struct Packing {
  const WeightRows *parts;
  const float *given;
  int64_t num_parts, n, k, group;
  Format format;
  bool is_gated;
};

// Returns whether groups can share sums.
template <class T>
bool pack(const Packing &of, void *out, float *scales, int index, int size) {
  constexpr int64_t kStep = Dot<T>::kStep;
  const Span panels = span_of((of.n + kPanel - 1) / kPanel, 1, index, size);
  const int64_t inputs = of.format == kInt4 ? 8 : 4, num_units = (of.k + inputs - 1) / inputs;
  const int64_t num_groups = (of.k + of.group - 1) / of.group;
  bool are_even = true;
  for (int64_t panel = panels.first; panel < panels.last; panel++) {
    const T *rows[kPanel];
    const float *given[kPanel];
    for (int64_t lane = 0; lane < kPanel; lane++) {
      const int64_t row = packed_row(of.n, of.is_gated, panel, lane);
      rows[lane] = row_of<T>(of.parts, of.num_parts, row);
      given[lane] = of.given ? of.given + row * num_groups : nullptr;
    }
    if (of.format == kPlain)
      pack_panel(rows, of.k, (T *)out + panel * ((of.k + kStep - 1) / kStep * kStep * kPanel));
    else {
      uint32_t *const words = (uint32_t *)out + panel * num_units * kPanel;
      float *const own = scales + panel * num_groups * kPanel;
      quantise_panel(rows, given, of.k, of.group, of.format, words, own);
      if (of.format == kInt4) are_even &= even_out_panel(own, words, of.k, of.group, inputs, nullptr);
    }
  }
  return are_even;
}

// As API(pack_numbers) has them.
struct Numbers {
  const WeightRows *parts;
  const float *scales, *offsets, *table;
  int64_t num_parts, n, k, group;
  int32_t inputs;  // of a word
  bool is_gated;
};

void pack_row(const int8_t *numbers, const Numbers &of, uint32_t *out) {
  int8_t last[8] = {};
  const int64_t whole = of.k / of.inputs;
  for (int64_t i = 0; i < whole; i++) out[i * kPanel] = word_of(numbers + i * of.inputs, of.inputs);
  if (whole * of.inputs == of.k) return;
  std::memcpy(last, numbers + whole * of.inputs, of.k - whole * of.inputs);
  out[whole * kPanel] = word_of(last, of.inputs);
}

// out: the panels; scales, offsets: as Linear's, offsets only where there are some. Returns whether groups can share sums.
bool pack_numbers(const Numbers &of, uint32_t *out, float *scales, float *offsets, int index, int size) {
  const Span panels = span_of((of.n + kPanel - 1) / kPanel, 1, index, size);
  const int64_t num_units = (of.k + of.inputs - 1) / of.inputs, groups = (of.k + of.group - 1) / of.group;
  const bool is_by_group = of.inputs == 8 || of.group < of.k || offsets;
  bool are_even = true;
  for (int64_t panel = panels.first; panel < panels.last; panel++) {
    for (int64_t lane = 0; lane < kPanel; lane++) {
      const int64_t row = packed_row(of.n, of.is_gated, panel, lane);
      const int8_t *numbers = row_of<int8_t>(of.parts, of.num_parts, row);
      uint32_t *const to = out + panel * num_units * kPanel + lane;
      if (numbers) pack_row(numbers, of, to);
      else
        for (int64_t i = 0; i < num_units; i++) to[i * kPanel] = 0;
      for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (panel * groups + g) * kPanel + lane;
        scales[at] = numbers ? of.scales[row * groups + g] : 0.0f;
        if (offsets) offsets[at] = numbers ? of.offsets[row * groups + g] : 0.0f;
      }
    }
    if (is_by_group)
      are_even &= even_out_panel(scales + panel * groups * kPanel, out + panel * num_units * kPanel, of.k, of.group,
                                 of.inputs, of.table);
  }
  return are_even;
}

}  // namespace DIPTYCH_ISA

// scales: [num_panels][groups][kPanel], for rows of `dtype`. Where groups' sums are scaled: of the first of each at_once
// groups the scale of the last one, and of the others the ratio of the scale before to their own.
API(pack_ratios)(Team *team, int32_t dtype, int64_t num_panels, int64_t groups, int64_t at_once, float *scales) {
  using namespace DIPTYCH_ISA;
  if (dtype == kFloat32 || kScalesColumns<bf16>) return;
  team->run([&](int index) {
    const Span panels = span_of(num_panels, 1, index, team->size);
    for (int64_t panel = panels.first; panel < panels.last; panel++)
      for (int64_t first = 0; first < groups; first += at_once)
        for (int lane = 0; lane < kPanel; lane++) {
          float *const own = scales + (panel * groups + first) * kPanel + lane;
          const int64_t last = std::min(at_once, groups - first) - 1;
          const float scale = own[last * kPanel];
          for (int64_t g = last; g > 0; g--) own[g * kPanel] = own[(g - 1) * kPanel] / own[g * kPanel];
          own[0] = scale;
        }
  });
}

// parts: together n rows of k numbers, a byte each; scales, offsets (or null): [n][k / group]; table: [16], or null; out:
// the panels, in words of `inputs` numbers; out_scales, out_offsets: as Linear's; are_uneven: 1 where groups that would be
// summed at once are to be summed alone, else unchanged.
API(pack_numbers)(Team *team, const void *parts, int64_t num_parts, int64_t n, int64_t k, int32_t is_gated,
                  int32_t inputs, int64_t group, const float *scales, const float *offsets, const float *table, void *out,
                  float *out_scales, float *out_offsets, int32_t *are_uneven) {
  using namespace DIPTYCH_ISA;
  const Numbers of{(const WeightRows *)parts, scales, offsets, table, num_parts, n, k, group, inputs, is_gated != 0};
  std::atomic_ref<int32_t> uneven(*are_uneven);
  team->run([&](int index) {
    if (!pack_numbers(of, (uint32_t *)out, out_scales, out_offsets, index, team->size)) uneven = 1;
  });
}

// parts: together n rows of k elements of `dtype`; given: their scales [n][k / group], where the weights are a part of
// longer rows, or null; out: the panels, in `format`; scales: as Linear's, or null; are_uneven: as pack_numbers has it.
API(pack_linear)(Team *team, int32_t dtype, const void *parts, int64_t num_parts, int64_t n, int64_t k,
                 int32_t is_gated, int32_t format, int64_t group, const float *given, void *out, float *scales,
                 int32_t *are_uneven) {
  using namespace DIPTYCH_ISA;
  std::atomic_ref<int32_t> uneven(*are_uneven);
  const Packing of{(const WeightRows *)parts, given, num_parts, n, k, group, Format(format), is_gated != 0};
  team->run([&](int index) {
    const bool are_even = dtype == kFloat32 ? pack<float>(of, out, scales, index, team->size)
                                            : pack<bf16>(of, out, scales, index, team->size);
    if (!are_even) uneven = 1;
  });
}
