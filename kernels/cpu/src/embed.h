// Rows of the embedding table into the residual.
#pragma once

#include <cstring>

#include "simd.h"
#include "team.h"

namespace DIPTYCH_ISA {

// Team function. table: [vocab, dim]; ids: [num_rows], each in [0, vocab); out: rows of dim, out_stride elements apart.
template <class T>
void embed(const T *table, const int64_t *ids, T *out, int64_t out_stride, int64_t num_rows, int64_t dim, int index,
           int size) {
  Span rows = span_of(num_rows, 1, index, size);
  for (int64_t row = rows.first; row < rows.last; row++)
    std::memcpy(out + row * out_stride, table + ids[row] * dim, dim * sizeof(T));
}

}  // namespace DIPTYCH_ISA
