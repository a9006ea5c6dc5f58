// Choice of the KV blocks that a decode attends to (QUEST, Tang et al. 2024, section 3): of each KV head the first, the
// two newest, and those of the others with the highest scores. A block's score is the most that one of its keys could
// have with the query, of what is known of them: their smallest and largest number in each dimension.
//
//     score = sum over dims of max(q min, q max) = min(q, 0) min + max(q, 0) max
//
// and of the queries that share the KV head the highest. Of a layer, block and KV head the bounds are
//
//     [min, max][padded head_dim] of T, what pads them 0: blocks [num_blocks][kv head] of these
//
// bound keys (what a step wrote, and what was never read) -> score every block -> choose the best
#pragma once

#include "attention.h"
#include "team.h"

namespace DIPTYCH_ISA {

// Numbers of a row of bounds: whole vectors of dot products.
template <class T>
constexpr int64_t padded_dim(int64_t dim) {
  constexpr int64_t step = kLanes * kPack<T>;
  return (dim + step - 1) / step * step;
}

// Fills `chosen` of the sequences that are sparse, whose new keys are in the cache. Every thread of the team calls it;
// what it leaves is there for all after a barrier. q: as paged_attention has it.
template <class T>
void choose_blocks(const T *q, int64_t q_stride, const Heads &heads, const Sequences &sequences, const Cache &cache,
                   T *bounds, Team &team, int index);

}  // namespace DIPTYCH_ISA
