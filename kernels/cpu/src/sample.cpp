#include "sample.h"

#include "api.h"

// logits: num_rows rows of vocab_size floats, logits_stride apart; draws, ids: [num_rows].
// scratch: [team.size][2 * vocab_size, each rounded up to 16] floats.
API(sample)(Team *team, const float *logits, int64_t logits_stride, int64_t num_rows, int64_t vocab_size,
            const Draw *draws, int64_t *ids, float *scratch) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    Span rows = span_of(num_rows, 1, index, team->size);
    float *own = scratch + index * sample_scratch(vocab_size);
    for (int64_t row = rows.first; row < rows.last; row++)
      ids[row] = sample_row(logits + row * logits_stride, vocab_size, draws[row], own);
  });
}
