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

// -inf for the tokens of each row whose bit is not set. logits: rows of vocab_size floats, logits_stride apart;
// rows: [num_rows] of them; masks: [num_rows][ceil(vocab_size / 32)], bit i % 32 of word i / 32 is token i's.
API(mask)(Team *team, float *logits, int64_t logits_stride, const int64_t *rows, int64_t num_rows, int64_t vocab_size,
          const uint32_t *masks) {
  int64_t num_words = (vocab_size + 31) / 32;
  team->run([&](int index) {
    Span words = span_of(num_rows * num_words, 64, index, team->size);
    for (int64_t at = words.first; at < words.last; at++) {
      uint32_t mask = masks[at];
      if (mask == ~0u) continue;
      int64_t first = at % num_words * 32, num = vocab_size - first < 32 ? vocab_size - first : 32;
      float *row = logits + rows[at / num_words] * logits_stride + first;
      for (int64_t i = 0; i < num; i++) row[i] = mask >> i & 1 ? row[i] : -INFINITY;
    }
  });
}
