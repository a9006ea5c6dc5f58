#include "routing.h"

#include <cstring>

#include "api.h"

namespace DIPTYCH_ISA {

namespace {

constexpr float kLowest = -1.0e38f;  // what no number counts as: above the -inf of an expert that may not be chosen
constexpr float kTiny = 1e-20f;
const float kNever = -__builtin_inff();

int64_t padded(int64_t num) { return (num + kLanes - 1) / kLanes * kLanes; }

// logits: padded with kNever. scores: as long, 0 where it is padded.
void score(const Routing &by, const float *logits, float *scores) {
  const int64_t num = padded(by.num_experts);
  if (by.is_sigmoid) {
    for (int64_t i = 0; i < num; i += kLanes) store(scores + i, 1.0f / (1.0f + exp(-load(logits + i))));
    return;
  }
  f32x16 high = load(logits), total{};
  for (int64_t i = kLanes; i < num; i += kLanes) high = max(high, load(logits + i));
  const float highest = largest(high);
  for (int64_t i = 0; i < num; i += kLanes) {
    const f32x16 power = exp(load(logits + i) - highest);
    store(scores + i, power);
    total += power;
  }
  const float whole = sum(total);
  for (int64_t i = 0; i < num; i += kLanes) store(scores + i, load(scores + i) / whole);
}

// What a group counts as.
float count_of(const float *choice, int64_t num, bool by_two) {
  float first = kNever, second = kNever;
  for (int64_t i = 0; i < num; i++) {
    second = choice[i] > first ? first : choice[i] > second ? choice[i] : second;
    first = choice[i] > first ? choice[i] : first;
  }
  return by_two ? first + second : first;
}

// The first of the largest of [padded num]; none is NaN.
int64_t best_of(const float *of, int64_t num) {
  f32x16 high = load(of);
  for (int64_t i = kLanes; i < num; i += kLanes) high = max(high, load(of + i));
  const f32x16 best = splat(largest(high));
  int64_t i = 0;
  uint32_t found = 0;
  while (!(found = bits(equal(load(of + i), best)))) i += kLanes;
  return i + __builtin_ctz(found);
}

void leave_best_groups(const Routing &by, float *choice) {
  const int64_t size = by.num_experts / by.num_groups;
  float counts[kMostExperts];
  bool is_kept[kMostExperts]{};
  for (int64_t g = 0; g < by.num_groups; g++) counts[g] = count_of(choice + g * size, size, by.groups_by_two);
  for (int64_t g = by.num_groups; g < padded(by.num_groups); g++) counts[g] = kNever;
  for (int64_t i = 0; i < by.top_groups; i++) {
    const int64_t best = best_of(counts, by.num_groups);
    counts[best] = kNever;
    is_kept[best] = true;
  }
  for (int64_t i = 0; i < by.num_experts; i++) choice[i] = is_kept[i / size] ? choice[i] : kNever;
}

// One row.
void route(const Routing &by, const float *logits, float *weights, int32_t *experts) {
  alignas(64) float wide[kMostExperts], scores[kMostExperts], choice[kMostExperts];
  for (int64_t i = 0; i < by.num_experts; i++) {
    const float at_least = logits[i] > kLowest ? logits[i] : kLowest;
    wide[i] = at_least < -kLowest ? at_least : -kLowest;
  }
  for (int64_t i = by.num_experts; i < padded(by.num_experts); i++) wide[i] = kNever;
  score(by, wide, scores);
  for (int64_t i = 0; i < by.num_experts; i++) {
    const float biased = by.bias ? scores[i] + by.bias[i] : scores[i];
    choice[i] = biased > kLowest ? biased : kLowest;
  }
  for (int64_t i = by.num_experts; i < padded(by.num_experts); i++) choice[i] = kNever;
  if (by.top_groups < by.num_groups) leave_best_groups(by, choice);
  float total = 0.0f;
  for (int64_t j = 0; j < by.top_k; j++) {
    const int64_t best = best_of(choice, by.num_experts);
    choice[best] = kNever;
    experts[j] = int32_t(best);
    weights[j] = scores[best];
    total += weights[j];
  }
  for (int64_t j = 0; j < by.top_k; j++)
    weights[j] = (by.renormalises ? weights[j] / (total + kTiny) : weights[j]) * by.scale;
}

}  // namespace

void route_rows(const Routing &by, const float *logits, int64_t logit_stride, int64_t num_rows, float *weights,
                int32_t *experts, int index, int size) {
  const Span rows = span_of(num_rows, 1, index, size);
  for (int64_t row = rows.first; row < rows.last; row++)
    route(by, logits + row * logit_stride, weights + row * by.top_k, experts + row * by.top_k);
}

}  // namespace DIPTYCH_ISA

// As route_rows.
API(route)(Team *team, const void *by, const float *logits, int64_t logit_stride, int64_t num_rows, float *weights,
           int32_t *experts) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    route_rows(*(const Routing *)by, logits, logit_stride, num_rows, weights, experts, index, team->size);
  });
}
