// Which experts a row goes to, and with which weights: the compiled twin of ../../moe_routing.py.
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

// One row. logits: [num_experts]; weights, experts: [top_k], best first; of equal ones the lowest.
void route(const Routing &by, const float *logits, float *weights, int32_t *experts);

}  // namespace DIPTYCH_ISA
