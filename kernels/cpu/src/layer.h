// What a step of a decoder is computed from. Mirrored, field by field, by the structures of layer.py.
//
//     begin -> layers [0, n), or half by half where several ranks compute -> head, of the rows that are sampled
//
// in one call, or in several.
//
// Everything is the caller's, and lives as long as the call: nothing is allocated in a step.
#pragma once

#include <cstdint>

#include "attention.h"
#include "experts.h"
#include "linear.h"
#include "logits.h"

namespace DIPTYCH_ISA {

// T below is the decoder's dtype, H its hidden size, I the inner size of its MLP, D the size of a head. Weights of norms
// are floats.

// A way to attend that layers share.
struct Attention {
  Heads heads;  // without sinks, which each layer has of its own
  Rope rope;
  int64_t is_sparse;  // its layers have bounds
};

struct Layer {
  // Norms of what a half reads of the residual, and of what it adds to it: [H], or null where there is none.
  const float *input_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
  const float *q_norm, *k_norm;  // as HeadNorms has them
  const float *sinks;            // [heads] or null
  Linear qkv, o, gate_up, down;
  void *cache;        // its K and V in block 0
  void *tail;         // the same of the tail, beside a cache of kKVKivi
  int64_t attention;  // which of the decoder's
  int64_t gate;       // kSiluMul or kGeluMul
  const Mixture *mixture;  // in the place of gate_up and down, or null
  void *bounds;  // of its keys, as sparse.h has them, or null: all sequences attend to all
};

struct Decoder {
  const Layer *layers;
  const Attention *attentions;
  const float *norm;  // [H]
  const void *embed;  // [vocab, H] of T, or null: the rows of `head`
  Linear head;        // [vocab, H]: the tokens from `first_token` on, all of them or a rank's part
  int64_t first_token;
  int64_t num_layers, num_attentions, hidden_size, block_stride /* of one layer's cache, bytes */, block_size;
  float eps;
  float embed_scale;    // of the embedded tokens
  float logit_softcap;  // 0: none; else logits become softcap * tanh(logit / softcap)
  int32_t dtype;
  int32_t norms_whole_rows;  // HeadNorms::is_whole
  int32_t is_split;          // over several ranks, of which this is one
  int32_t kv_format;         // KVFormat
  int64_t tail_stride;       // as block_stride, of the tail
};

// Hidden states of all rows that a draft head is given, side by side.
struct Taken {
  void *rows;  // [num_rows, stride] of T; null: nothing is taken
  int64_t stride;
  const int64_t *columns;  // [num_layers + 1]: where in a row the residual after so many layers goes; below 0: nowhere
  const float *norm;       // [H], of the residual after all layers, or null: it is taken as it is
};

// Buffers hold at least as many rows as the step has tokens.
struct Step {
  // Of the caller: which tokens, and where each sequence stands. Sequence s has row table_rows[s] of `tables`.
  int64_t num_rows, num_seqs;
  const int64_t *token_ids;     // [num_rows]
  const int32_t *num_new;       // [num_seqs], at least 1
  int32_t *context_lens;        // [num_seqs], with the new tokens
  const int32_t *tables;        // [any, table_width]
  const int64_t *table_rows;    // [num_seqs]
  int64_t table_width;
  // Beside a cache of kKVKivi: of each sequence in order, the tail's blocks of the blocks that its new tokens are in.
  const int32_t *tails;
  int64_t *sampled;  // [num_sampled]: rows, none twice, of which the head is computed
  int64_t num_sampled;
  // So many of `sampled`, ascending, are all that is read of the last layer; below 0: every row is. The last layer may
  // leave a step of these rows alone: each a sequence whose one new token it is, `sampled` counts from 0.
  int64_t num_kept;
  // Filled by `begin`.
  int32_t *query_starts;  // [num_seqs + 1]
  int32_t *block_tables;  // [num_seqs, block_table_width]
  int64_t block_table_width;
  int64_t *positions, *slots;  // [num_rows]; slots of the tail, where there is one
  // Beside a cache of kKVKivi: where each sequence's tails begin, and the blocks that the step fills, as round_blocks
  // has them.
  int32_t *tail_starts;  // [num_seqs]
  int64_t *num_filled, *filled;  // [1], [num_filled][2]
  // Buffers; a stride is a row's, in elements.
  void *residual;  // [num_rows, H] of T
  void *normed;    // [num_rows or kFewRows a thread, H] of T
  void *qkv;       // [num_rows, (heads + 2 KV heads) D] of T
  void *attended;  // [num_rows, heads D] of T
  void *inner;     // [num_rows, I] of T
  int64_t normed_stride, attended_stride, inner_stride;
  float *router_logits;   // [num_rows, experts]; of a mixture, as the next
  ExpertRows expert_rows;  // as many as the step has
  // [num_rows, H]: what a half adds to the residual, where it is not added at once: several ranks' parts are summed
  // before, and there may be a norm of the sum. Null where neither is so.
  float *partial;
  void *const *scratches;  // [num_attentions], as attention.h wants them
  AttentionLimits limits;
  Sparse sparse;
  float *logits;   // [num_sampled, vocab]
  // Where the likeliest token of each sampled row is all that is wanted: `ids`, and `logits` is left alone.
  int64_t picks;
  const uint32_t *const *masks;  // [num_sampled], of TokenMasks; or null
  int64_t *ids;    // [num_sampled]
  Best *bests;     // [threads][num_sampled]; the first of them say what `ids` does
  float *few_logits;  // [threads][kGreedyScratch]
  int64_t *nanoseconds;  // [kNumParts], gains what each part took; or null
  Taken taken;
};

// A norm of so few rows is computed by every thread for itself: that is sooner done than waited for.
constexpr int64_t kFewRows = 4;

enum Part : int32_t { kBegin, kNorms, kQkv, kRope, kAttention, kO, kRouter, kGateUp, kDown, kHead, kNumParts };

}  // namespace DIPTYCH_ISA
