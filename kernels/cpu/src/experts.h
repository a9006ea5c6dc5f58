// What a row's experts make of it (Shazeer et al. 2017): sum over j of weights[j] * down_e(gate_e(x) * up_e(x)), where e is
// its choice j.
//
//     sort_by_expert (one thread)  ->  expert_inner  ->  expert_outputs  ->  sum_of_experts
//
// Rows are brought together by expert, so that an expert's weights are read once for all of its rows. A thread has a run of
// panels of 32 outputs on the line of all experts that have rows, as long in work as the others'. A barrier between
// any two; none at the end. A row's sum depends, bit for bit, on its own data alone.
#pragma once

#include <cstdint>

#include "linear.h"
#include "routing.h"

namespace DIPTYCH_ISA {

// Mirrored by experts.py. H hidden size, I inner size.
struct Experts {
  const Linear *gate_up, *down;  // of each: [2I, H] packed for its gate, and [H, I]
  int64_t first, count;          // ids of those that are here; others add nothing
  int64_t top_k, hidden_size, inner_size;
  int32_t gate;  // an EpilogueKind: how gate and up meet
  float alpha, limit;
};

// What was chosen, and buffers for as many rows. A place is one of the chosen pairs (row, j) that are here, in their order by
// expert, and within one by row. Mirrored by experts.py.
struct ExpertRows {
  int64_t num_rows;
  float *weights;        // [num_rows, top_k]
  int32_t *ids;          // [num_rows, top_k]
  int32_t *starts;       // [count + 2]: expert e has the places [starts[e], starts[e + 1])
  int32_t *rows;         // [num_rows * top_k]: by place
  int32_t *places;       // [num_rows, top_k], -1 where an expert is not here
  void *gathered;        // [threads][kMostRowsAtOnce, gathered_stride] of T
  void *inner;           // [num_rows * top_k, inner_stride] of T
  void *outputs;         // [num_rows * top_k, H] of T
  int64_t gathered_stride, inner_stride;
};

// In the place of a layer's MLP. Mirrored by layer.py.
struct Mixture {
  Linear router;  // [experts of all ranks, H]
  Routing routing;
  Experts experts;
  int64_t *expert_tokens;  // [experts of all ranks], gains the rows that go to each; or null
};

// By one thread, as the next.
void count_tokens(const Mixture &of, const ExpertRows &rows);

void sort_by_expert(const Experts &of, const ExpertRows &to);

// The part of thread `index` of `size`. x: [num_rows, H], x_stride elements from row to row.
template <class T>
void expert_inner(const Experts &of, const ExpertRows &to, const T *x, int64_t x_stride, int index, int size);

template <class T>
void expert_outputs(const Experts &of, const ExpertRows &to, int index, int size);

// In float, in the order of choice, rounded once. adds: to what `out` holds.
template <class T, class Out>
void sum_of_experts(const Experts &of, const ExpertRows &to, Out *out, int64_t out_stride, bool adds, int index, int size);

}  // namespace DIPTYCH_ISA
