// Unpacks panels of quantised weights into a thread's scratch, for many rows: each weight once, not once a row.
#pragma once

#include <cstring>
#include <type_traits>

#include "linear_source.h"
#include "linear_tile.h"

namespace DIPTYCH_ISA {

// What reads the weights of Source once they are unpacked.
template <class T, class Source>
using Unpacked = std::conditional_t<kScalesColumns<T>, Columns<T>, Plain<T>>;

// Scales panels of bf16 in scratch, of k inputs, to the units of their last group's scale, all of them powers of two.
// ratios: as pack_ratios makes them, of each group.
inline void scale_to_last(char *scratch, int64_t k, const float *ratios, int64_t group) {
  const int64_t groups = (k + group - 1) / group;
  for (int v = 0; v < kVectors; v++) {
    floats factor = floats{} + 1.0f;
    for (int64_t g = groups - 2; g >= 0; g--) {
      factor *= load_raw<floats>(ratios + (g + 1) * kPanel + v * kWidth);
      char *pairs = scratch + (g * group / 2 * kVectors + v) * kVectorBytes;
      for (int64_t i = 0; i < group / 2; i++, pairs += kVectors * kVectorBytes) {
        const words both = load_raw<words>(pairs);
        const floats even = (floats)(both << 16) * factor, odd = (floats)(both & 0xffff0000u) * factor;
        const words scaled = ((words)even >> 16) | (words)odd;
        std::memcpy(pairs, &scaled, sizeof scaled);
      }
    }
  }
}

// What Source reads of a panel, as Unpacked<T, Source> reads it.
template <class T, class Source>
void unpack(const Units &of, char *scratch) {
  const char *from = of.first;
  const int64_t group = Source::kByGroup ? of.group : of.k;
  for (int64_t i = 0, g = 0; i < of.k; i += group, g++) {
    const int64_t inputs = of.k - i < group ? of.k - i : group;
    for (int64_t k = 0; k < inputs; k += Source::kInputs) {
      const Source source(from, of.table);
#pragma GCC unroll 8
      for (int s = 0; s < Source::kInputs / Dot<T>::kStep; s++)
        for (int v = 0; v < kVectors; v++) {
          auto column = source.column(s, v);
          if constexpr (Source::kByGroup) {
            const floats scale = load_raw<floats>(of.scales + g * kPanel + v * kWidth);
            column = Dot<T>::scaled(column, scale, load_raw<floats>(of.offsets + g * of.offset_step + v * kWidth));
          }
          Dot<T>::store(scratch, column);
          scratch += sizeof column;
        }
      from += kUnitBytes;
    }
  }
}

}  // namespace DIPTYCH_ISA
