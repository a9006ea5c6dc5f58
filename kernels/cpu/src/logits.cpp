#include "logits.h"

#include "api.h"

// head: [vocab_size, k] packed, not of a gate. hidden: num_rows rows of head's k, hidden_stride elements apart.
// masks: null, or [num_rows] of TokenMasks. ids: [num_rows]. bests: [team.size][num_rows]; scratch: [team.size][kGreedyScratch].
API(greedy)(Team *team, const void *head, int32_t dtype, const void *hidden, int64_t hidden_stride, int64_t num_rows,
            const uint32_t *const *masks, int64_t *ids, void *bests, float *scratch) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    const Linear &of = *(const Linear *)head;
    Best *own = (Best *)bests + index * num_rows;
    float *part = scratch + index * kGreedyScratch;
    if (dtype == kBfloat16)
      best_of_part(of, (const bf16 *)hidden, hidden_stride, num_rows, own, part, 0.0f, {masks}, index, team->size);
    else
      best_of_part(of, (const float *)hidden, hidden_stride, num_rows, own, part, 0.0f, {masks}, index, team->size);
  });
  best_of_all((Best *)bests, num_rows, team->size, ids);
}

// rows: [num_rows] of logits, whose rows of vocab_size floats are logits_stride apart.
// totals: [num_rows], the log of the sum of each row's exponentials; top_ids, top_logits: [num_rows, num_top], descending.
API(logsumexp_top_k)(Team *team, const float *logits, int64_t logits_stride, const int64_t *rows, int64_t num_rows,
                int64_t vocab_size, int64_t num_top, float *totals, int64_t *top_ids, float *top_logits) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    Span span = span_of(num_rows, 1, index, team->size);
    for (int64_t i = span.first; i < span.last; i++) {
      const float *row = logits + rows[i] * logits_stride;
      totals[i] = log_sum_exp(row, vocab_size);
      largest_in_order(row, vocab_size, num_top, top_ids + i * num_top, top_logits + i * num_top);
    }
  });
}
