// What passes of a draft head are computed from. Mirrored, field by field, by the structures of heads.py.
//
//     a pass:  begin -> entries, of an embedding and a hidden state each -> layers -> head, of each sequence's last entry
//
// Several dependent passes are one call: of each sequence's likeliest token, and of what the head made of the last entry,
// the next pass makes one entry more.
#pragma once

#include "layer.h"

namespace DIPTYCH_ISA {

// T is the head's dtype, H its hidden size, A the numbers of what its target leaves of a token.
struct Head {
  const Decoder *layers;  // and the final norm, the head's vocabulary, and the embeddings of the target's
  const float *embed_norm, *hidden_norm;  // [H]
  Linear fc;      // [H, A], makes hidden states of what the target leaves; without weight: that is one (MTP)
  Linear joined;  // [H, 2H], makes what the layers read of an entry; without weight: the first one reads the entry
  const int64_t *to_target;  // [draft vocab]: the target's ids; null: the same
  int32_t norms_residual;    // the residual begins as the normed hidden state; of heads without `joined`
  int32_t norms_output;      // fed back is the hidden state after the final norm
};

// The likeliest of some tokens.
struct Tally {
  float logit;
  float mass;  // sum of exp(x - logit) over the logits x
  int64_t id;
};

struct Passes {
  const Step *step;  // the first pass; what it samples is not read
  // The step's own, which later passes overwrite: their sequences are the first of those of the pass before.
  int64_t *token_ids;
  int32_t *num_new, *context_lens;
  int64_t num_passes;         // 0: nothing but the KV of the entries is computed
  const int64_t *num_active;  // [num_passes]: sequences, never more than in the pass before
  const void *aux;  // [num_rows, A] of T, contiguous; null: `hidden` is there
  void *hidden;     // [num_rows, H] of T: the hidden states of the entries; after a pass, row s is what is fed back of s
  void *wide;       // [num_rows, 2H] of T
  int64_t wide_stride;
  Tally *tallies;  // [threads][num_seqs]
  // [num_passes][num_seqs]: of the target's vocabulary, and their probabilities by the head. `ids` null: the step's
  // `logits` are written instead, of one pass.
  int64_t *ids;
  float *chances;
};

}  // namespace DIPTYCH_ISA
