// Which experts a row goes to, and with which weights: the compiled twin of ../../moe/moe_routing.py.
#pragma once

#include <cstdint>

#include "simd.h"

namespace DIPTYCH_ISA {

constexpr int64_t kMostExperts = 1024;

// As moe_routing.py has it. Mirrored by routing.py.
struct Routing {
  int64_t num_experts, top_k, num_groups, top_groups;
  const float *bias;  // [num_experts], added for the choice alone, or null
  int32_t is_sigmoid, renormalises, groups_by_two;
  float scale;
};

// The part of thread `index` of `size`. logits: [num_rows, num_experts], logit_stride elements from row to row; weights,
// experts: [num_rows, top_k], best first; of equal ones the lowest.
void route_rows(const Routing &by, const float *logits, int64_t logit_stride, int64_t num_rows, float *weights,
                int32_t *experts, int index, int size);

}  // namespace DIPTYCH_ISA
