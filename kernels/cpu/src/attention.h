// Attention over the paged cache of one layer, and what stores into it. The cache is packed for the dot product:
//
//     a block's layer   [k, v][kv head][block_size / 16][16 * head_dim]
//     of k, a group     [head_dim / P][16 slots][P]      P = kPack: 2 for bfloat16, 1 for float
//     of v, a group     [16 / P][head_dim][P slots]
//
// A group of scaled numbers (scaled.h), P = 1, is followed by the scales of its slots, [16] bf16. Two of 4 bits are one of
// a vector's, head_dim / 2 in all.
//
// A context is cut into tiles of kTile slots, counted from its first token. Each is computed alone, and they are merged
// in their order, so a token's result has the same bits in whatever batch, chunk or thread it is computed.
#pragma once

#include <type_traits>

#include "scaled.h"

namespace DIPTYCH_ISA {

constexpr int64_t kGroup = 16;   // slots
constexpr int64_t kTile = 256;   // slots
constexpr int64_t kLargestDim = 1024;
template <class S>
constexpr int64_t kPack = sizeof(S) == 2 ? 2 : 1;  // neighbours that one lane of a dot product takes

// attention.py mirrors these three. block_size and head_dim: multiples of 16.
struct Cache {
  void *base;            // of block 0
  int64_t block_stride;  // bytes from block to block
  int64_t block_size, num_kv_heads, head_dim;
  int64_t format;        // KVFormat
  const Cache *tail;     // of kKVKivi: where keys and values are as computed; else null
};

struct Heads {
  int64_t num_heads, num_kv_heads, head_dim;
  float scale;         // of the scores, above 0
  float softcap;       // 0: none; else scores become softcap * tanh(score / softcap) (Gemma 2)
  int64_t window;      // 0: all; else a token sees so many, itself the last
  const float *sinks;  // [num_heads] or null: a score that takes weight and gives nothing (gpt-oss)
};

// Which sequences of a step attend to some blocks of each KV head alone, and to which: see sparse.h. Buffers are for
// all sequences of the step. attention.py mirrors this and the next.
struct Sparse {
  int64_t num_seqs;        // of the step's, that do; they have one new token
  int64_t num_chosen;      // blocks that each of them attends to, at least 4
  int64_t block_size;
  const int32_t *bounded;  // [seqs]: leading tokens that the bounds of their blocks cover; below 0: it attends to all
  int32_t *chosen;         // [seqs, num_kv_heads, num_chosen] block ids, as in a table
  void *queries;           // [seqs, num_heads, 2, padded head_dim] of T, what pads it 0
  float *scores;           // [seqs, num_kv_heads, 2, score_stride]
  int64_t score_stride;    // a multiple of 16, at least the blocks of the longest context
};

// A sequence's new tokens are the last of its context, and its rows of the queries are query_starts[s] to [s + 1].
struct Sequences {
  int64_t num_seqs, table_stride;
  const int32_t *block_tables;  // [num_seqs, table_stride]
  const int32_t *context_lens, *query_starts;  // [num_seqs], [num_seqs + 1]
  const Sparse *sparse;  // or null: all attend to all
  // Beside a cache of kKVKivi, else null: the tail's blocks of each sequence's new tokens, those of sequence s from
  // tails[tail_starts[s]] on.
  const int32_t *tails, *tail_starts;

  bool is_sparse(int64_t seq) const { return sparse && sparse->bounded[seq] >= 0; }

  int64_t num_blocks(int64_t seq) const { return (context_lens[seq] + sparse->block_size - 1) / sparse->block_size; }

  // The tokens that it attends to, as if they were its context: of a sparse one, chosen blocks, the last of which ends
  // where its own last block does.
  int64_t length(int64_t seq) const {
    if (!is_sparse(seq)) return context_lens[seq];
    return context_lens[seq] - (num_blocks(seq) - sparse->num_chosen) * sparse->block_size;
  }

  const int32_t *table(int64_t seq, int64_t kv_head, int64_t num_kv_heads) const {
    if (!is_sparse(seq)) return block_tables + seq * table_stride;
    return sparse->chosen + (seq * num_kv_heads + kv_head) * sparse->num_chosen;
  }
};

// Bytes of a slot's vector. S: what the cache stores.
template <class S>
inline int64_t vector_bytes(int64_t head_dim) {
  return head_dim / kNumbersIn<S> * int64_t(sizeof(S)) + (kIsScaled<S> ? int64_t(sizeof(bf16)) : 0);
}

// Where slot 0 of a group of 16 slots begins.
template <class S>
inline S *group_of(const Cache &cache, bool is_value, int64_t block, int64_t kv_head, int64_t group) {
  int64_t head = (is_value ? cache.num_kv_heads : 0) + kv_head;
  char *layer = static_cast<char *>(cache.base) + block * cache.block_stride;
  return reinterpret_cast<S *>(layer + (head * cache.block_size + group * kGroup) * vector_bytes<S>(cache.head_dim));
}

// Where the scales of a group's slots begin.
template <class S>
inline auto scales_of(S *group, int64_t head_dim) {
  static_assert(kIsScaled<std::remove_const_t<S>>);
  const int64_t size = kGroup * head_dim / kNumbersIn<std::remove_const_t<S>>;
  return reinterpret_cast<std::conditional_t<std::is_const_v<S>, const bf16, bf16> *>(group + size);
}

// Calls work(S{}), of what the cache stores; T: what its step computes in. Not of kKVKivi, whose tail is written.
template <class T, class Work>
inline void with_stored(const Cache &cache, Work &&work) {
  if (cache.format == kKVInt8) work(Int8{});
  else if (cache.format == kKVFp8) work(Fp8{});
  else if (cache.format == kKVInt4) work(Int4{});
  else work(T{});
}

// attention.py mirrors these two.
struct Rope {
  const float *table;  // [positions, num_rotated]: cosines of num_rotated / 2 angles, then their sines
  int64_t num_rotated;  // the first numbers of each head (Su et al. 2021, half-split); even; 0: none, and no table
};

struct HeadNorms {
  const float *q, *k;  // [head_dim] of each head alone, or [heads * head_dim] of all of a row; both or neither null
  float eps;
  int32_t is_whole;  // of all heads of a row at once (OLMo 2)
};

// qkv: rows of num_heads queries, num_kv_heads keys and as many values, each [head_dim]. Queries and keys are normed in
// place and rotated, the row's `positions` says how far: queries in place, keys and values go to the cache at `slots`,
// block * block_size + offset.
template <class T>
void rope_kv_write(T *qkv, int64_t qkv_stride, int64_t num_rows, const Heads &heads, const HeadNorms &norms,
                   const Rope &rope, const int64_t *positions, const int64_t *slots, const Cache &cache, int index,
                   int size);

// Largest batch that `scratch` is for.
struct AttentionLimits {
  int64_t num_seqs, num_rows, context_len;
};

template <class T>
int64_t paged_attention_scratch_bytes(const Heads &heads, const AttentionLimits &limits, int size);

// Divides a step's work for `size` threads; one thread calls it, once for all layers that share `heads`' sizes.
// `scratch`: zeroed when it was made, at a multiple of 64, for at least these limits.
template <class T>
void plan_attention(const Heads &heads, const Sequences &sequences, const AttentionLimits &limits, void *scratch,
                    int size);

// softmax(scale q K^T) V of every token over its sequence up to and with itself, by the plan in `scratch`.
// q, out: rows of num_heads * head_dim. Every thread that was planned for must take part.
template <class T>
void paged_attention(const T *q, int64_t q_stride, T *out, int64_t out_stride, const Heads &heads,
                     const Sequences &sequences, const Cache &cache, void *scratch, int index, int size);

}  // namespace DIPTYCH_ISA
