#include "sparse.h"

#include <cfloat>
#include <cstring>

#include "api.h"
#include "attention_tile.h"
#include "select.h"

namespace DIPTYCH_ISA {

namespace {

constexpr int64_t kNewest = 2;  // blocks that are always chosen, beside the first
constexpr int64_t kLargestDim = 1024;
constexpr int64_t kBlocksAhead = 4;  // whose bounds are fetched while those of a block are read

// `sum`, in its order, without memory.
inline float sum_lanes(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  return sum(v);
#endif
}

template <class T>
struct Choice {
  const T *q;
  int64_t q_stride;
  const Heads &heads;
  const Sequences &sequences;
  const Sparse &sparse;
  const Cache &cache;
  T *bounds;
  int64_t dim, padded, group;

  Choice(const T *q, int64_t q_stride, const Heads &heads, const Sequences &sequences, const Cache &cache, T *bounds)
      : q(q),
        q_stride(q_stride),
        heads(heads),
        sequences(sequences),
        sparse(*sequences.sparse),
        cache(cache),
        bounds(bounds),
        dim(heads.head_dim),
        padded(padded_dim<T>(heads.head_dim)),
        group(heads.num_heads / heads.num_kv_heads) {}

  const int32_t *table(int64_t seq) const { return sequences.block_tables + seq * sequences.table_stride; }

  T *bounds_of(int64_t block, int64_t kv_head) const {
    return bounds + (block * heads.num_kv_heads + kv_head) * 2 * padded;
  }

  T *query_of(int64_t seq, int64_t head) const {
    return (T *)sparse.queries + (seq * heads.num_heads + head) * 2 * padded;
  }

  float *scores_of(int64_t seq, int64_t kv_head) const {
    return sparse.scores + (seq * heads.num_kv_heads + kv_head) * 2 * sparse.score_stride;
  }

  // Calls visit(seq, first, last) for this thread's part of the pieces [0, count(seq)) of all sparse sequences.
  template <class Count, class Visit>
  void share(int index, int size, Count &&count, Visit &&visit) const {
    int64_t total = 0, start = 0;
    for (int64_t s = 0; s < sequences.num_seqs; s++) total += sequences.is_sparse(s) ? count(s) : 0;
    const Span own = span_of(total, 1, index, size);
    for (int64_t s = 0; s < sequences.num_seqs && start < own.last; s++) {
      if (!sequences.is_sparse(s)) continue;
      int64_t num = count(s), first = own.first - start, last = own.last - start;
      if (last > 0 && first < num) visit(s, first > 0 ? first : 0, last < num ? last : num);
      start += num;
    }
  }

  int64_t first_changed(int64_t seq) const { return sparse.bounded[seq] / sparse.block_size; }

  // Makes the bounds cover the whole context: piece 0 are the sequence's queries, the others blocks.
  void prepare(int index, int size) const {
    share(
        index, size, [&](int64_t s) { return 1 + sequences.num_blocks(s) - first_changed(s); },
        [&](int64_t s, int64_t first, int64_t last) {
          const Span heads = all_heads();
          if (first == 0) split_queries(s, heads);
          for (int64_t i = first > 0 ? first - 1 : 0; i < last - 1; i++) bound_block(s, first_changed(s) + i, heads);
        });
  }

  Span all_heads() const { return {0, heads.num_kv_heads}; }

  // Each query becomes min(q, 0), max(q, 0), so that a score is one dot product.
  void split_queries(int64_t seq, Span kv_heads) const {
    const T *row = q + sequences.query_starts[seq] * q_stride + kv_heads.first * group * dim;
    for (int64_t head = kv_heads.first * group; head < kv_heads.last * group; head++, row += dim) {
      T *negative = query_of(seq, head), *positive = negative + padded;
      for (int64_t d = 0; d < dim; d += kLanes) {
        f32x16 x = load(row + d);
        store(negative + d, min(x, splat(0.0f)));
        store(positive + d, max(x, splat(0.0f)));
      }
    }
  }

  // Extends the bounds of a sequence's block `number` by the slots that they do not cover.
  void bound_block(int64_t seq, int64_t number, Span kv_heads) const {
    int64_t start = number * sparse.block_size, covered = sparse.bounded[seq] - start;
    int64_t first = covered > 0 ? covered : 0, last = sequences.context_lens[seq] - start;
    if (last > sparse.block_size) last = sparse.block_size;
    for (int64_t head = kv_heads.first; head < kv_heads.last; head++)
      extend(bounds_of(table(seq)[number], head), table(seq)[number], head, first, last);
  }

  // Of slots [first, last); without slots before these, from nothing.
  void extend(T *to, int64_t block, int64_t kv_head, int64_t first, int64_t last) const {
    alignas(64) float low[kLargestDim], high[kLargestDim], key[kLargestDim];
    for (int64_t slot = first; slot < last; slot++) {
      read_key(group_of<T>(cache, false, block, kv_head, slot / kGroup), slot % kGroup, key);
      const bool begins = slot == 0, resumes = slot == first && !begins;
      for (int64_t d = 0; d < dim; d += kLanes) {
        f32x16 x = load(key + d);
        f32x16 least = begins ? x : resumes ? load(to + d) : load(low + d);
        f32x16 most = begins ? x : resumes ? load(to + padded + d) : load(high + d);
        store(low + d, min(x, least));
        store(high + d, max(x, most));
      }
    }
    for (int64_t d = 0; d < dim; d += kLanes) {
      store(to + d, load(low + d));
      store(to + padded + d, load(high + d));
    }
  }

  void read_key(const T *group, int64_t slot, float *key) const {
    const T *from = group + slot * kPack<T>;
    for (int64_t d = 0; d < dim; d += kPack<T>, from += kGroup * kPack<T>)
      for (int64_t i = 0; i < kPack<T>; i++) key[d + i] = widen(from[i]);
  }

  // Blocks that scores decide on: all but the first and the newest.
  int64_t num_candidates(int64_t seq) const { return sequences.num_blocks(seq) - 1 - kNewest; }

  void score(int index, int size) const {
    share(
        index, size, [&](int64_t s) { return num_candidates(s); },
        [&](int64_t s, int64_t first, int64_t last) { score_blocks(s, {first, last}, all_heads()); });
  }

  void score_blocks(int64_t seq, Span candidates, Span kv_heads) const {
    const int32_t *blocks = table(seq) + 1;
    const int64_t num_bytes = (kv_heads.last - kv_heads.first) * 2 * padded * sizeof(T);
    for (int64_t i = candidates.first; i < candidates.last; i++) {
      int64_t later = i + kBlocksAhead < candidates.last ? i + kBlocksAhead : i;
      const char *next = (const char *)bounds_of(blocks[later], kv_heads.first);
      for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(next + at);
      for (int64_t head = kv_heads.first; head < kv_heads.last; head++)
        scores_of(seq, head)[i] = score_of(seq, head, bounds_of(blocks[i], head));
    }
  }

  // Never NaN nor infinite.
  float score_of(int64_t seq, int64_t kv_head, const T *of) const {
    float best = -FLT_MAX;
    for (int64_t g = 0; g < group; g++) {
      const T *query = query_of(seq, kv_head * group + g);
      f32x16 acc{};
      for (int64_t i = 0; i < 2 * padded; i += kLanes * kPack<T>)
        acc = multiply_add(acc, load_raw<u32x16>(query + i), load_raw<u32x16>(of + i), query);
      float total = sum_lanes(acc);
      best = total > best ? total : best;
    }
    return best < FLT_MAX ? best : FLT_MAX;
  }

  void choose(int index, int size) const {
    share(
        index, size, [&](int64_t) { return heads.num_kv_heads; },
        [&](int64_t s, int64_t first, int64_t last) {
          for (int64_t head = first; head < last; head++)
            choose_of(s, scores_of(s, head), sparse.chosen + (s * heads.num_kv_heads + head) * sparse.num_chosen);
        });
  }

  // All of the above, by one thread for a KV head of a sequence.
  void choose_by_head(int index, int size) const {
    share(
        index, size, [&](int64_t) { return heads.num_kv_heads; },
        [&](int64_t s, int64_t first, int64_t last) {
          const Span own{first, last};
          split_queries(s, own);
          for (int64_t i = first_changed(s); i < sequences.num_blocks(s); i++) bound_block(s, i, own);
          score_blocks(s, {0, num_candidates(s)}, own);
          for (int64_t head = first; head < last; head++)
            choose_of(s, scores_of(s, head), sparse.chosen + (s * heads.num_kv_heads + head) * sparse.num_chosen);
        });
  }

  // In the order of the context; of equal scores the earlier blocks.
  void choose_of(int64_t seq, float *scores, int32_t *to) const {
    const int32_t *blocks = table(seq);
    const int64_t num = num_candidates(seq), wanted = sparse.num_chosen - 1 - kNewest, all = whole_vectors(num);
    for (int64_t i = num; i < all; i++) scores[i] = -INFINITY;
    float *copy = scores + sparse.score_stride;
    std::memcpy(copy, scores, all * sizeof(float));
    const float least = end_of(copy, num, double(wanted), [](f32x16) { return splat(1.0f); });
    int64_t num_equal = wanted;
    for (int64_t i = 0; i < all; i += kLanes) num_equal -= __builtin_popcount(bits(above(load(scores + i), splat(least))));
    *to++ = blocks[0];
    for (int64_t i = 0; i < all; i += kLanes) {
      uint32_t held = bits(above(load(scores + i), splat(least))), equals = bits(equal(load(scores + i), splat(least)));
      for (; equals && num_equal > 0; equals &= equals - 1, num_equal--) held |= equals & -equals;
      for (; held; held &= held - 1) *to++ = blocks[1 + i + __builtin_ctz(held)];
    }
    for (int64_t i = 0; i < kNewest; i++) *to++ = blocks[1 + num + i];
  }
};

}  // namespace

template <class T>
void choose_blocks(const T *q, int64_t q_stride, const Heads &heads, const Sequences &sequences, const Cache &cache,
                   T *bounds, Team &team, int index) {
  const Choice<T> choice(q, q_stride, heads, sequences, cache, bounds);
  // Threads that have a head each need not wait for each other.
  if (sequences.sparse->num_seqs * heads.num_kv_heads >= team.size) return choice.choose_by_head(index, team.size);
  choice.prepare(index, team.size);
  team.barrier();
  choice.score(index, team.size);
  team.barrier();
  choice.choose(index, team.size);
}

template void choose_blocks(const float *, int64_t, const Heads &, const Sequences &, const Cache &, float *, Team &,
                            int);
template void choose_blocks(const bf16 *, int64_t, const Heads &, const Sequences &, const Cache &, bf16 *, Team &,
                            int);

}  // namespace DIPTYCH_ISA

API(choose_blocks)(Team *team, int32_t dtype, const void *q, int64_t q_stride, const void *heads,
                   const void *sequences, const void *cache, void *bounds) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const Sequences &who = *static_cast<const Sequences *>(sequences);
  const Cache &from = *static_cast<const Cache *>(cache);
  team->run([&](int index) {
    if (dtype == kBfloat16) choose_blocks((const bf16 *)q, q_stride, of, who, from, (bf16 *)bounds, *team, index);
    else choose_blocks((const float *)q, q_stride, of, who, from, (float *)bounds, *team, index);
  });
}
