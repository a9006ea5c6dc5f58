#include "attention.h"

#include <cmath>
#include <cstring>

#include "api.h"
#include "attention_piece.h"
#include "kivi_piece.h"

namespace DIPTYCH_ISA {

namespace {

// result = tile, merged: weights of either are relative to its own maximum. The only place that merges.
__attribute__((noinline)) void merge_row(float *out, float &maximum, float &sum, const float *tile, float tile_maximum,
                                         float tile_sum, int64_t dim) {
  if (tile_maximum == -INFINITY) return;
  float highest = tile_maximum > maximum ? tile_maximum : maximum;
  float keep = exp2_below(splat(maximum - highest))[0], add = exp2_below(splat(tile_maximum - highest))[0];
  for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(out + d) * keep + load(tile + d) * add);
  sum = sum * keep + tile_sum * add;
  maximum = highest;
}

template <class T>
__attribute__((noinline)) void finish_row(const float *from, float maximum, float sum, float sink, T *out,
                                          int64_t dim) {
  float highest = sink > maximum ? sink : maximum;
  float keep = exp2_below(splat(maximum - highest))[0];
  float share = keep / (sum * keep + exp2_below(splat(sink - highest))[0]);
  for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(from + d) * share);
}

void clear(const Result &result, int64_t num_rows, int64_t dim) {
  std::memset(result.out, 0, num_rows * dim * sizeof(float));
  for (int64_t r = 0; r < num_rows; r++) result.maxima[r] = -INFINITY, result.sums[r] = 0.0f;
}

// T: of queries and results; S: what the cache stores.
template <class T, class S>
struct Step {
  const T *q;
  int64_t q_stride;
  T *out;
  int64_t out_stride;
  const Heads &heads;
  const Sequences &sequences;
  const Cache &cache;
  Plan &plan;

  // Returns the ticket of this thread's next piece, whose first keys are fetched already.
  int32_t attend(const Item &item, const OwnOf<T, S> &own) const {
    Piece<S> piece(item, heads, sequences, cache);
    int64_t first = sequences.query_starts[item.seq] + item.first_token;
    int64_t column = item.kv_head * piece.group * piece.dim;
    read_queries(piece, q + first * q_stride + column, q_stride, own);
    T *to = out + first * out_stride + column;
    if (item.join == kNone) clear(own.merged, piece.num_rows, piece.dim);
    int64_t last = item.first_tile + item.num_tiles - 1;
    for (int64_t tile = item.first_tile; tile < last; tile++) {
      Runs<S> runs(piece, tile);
      runs.template before<T>(piece, tile + 1);
      compute_tile(piece, own, tile, runs);
      merge(piece, own.merged, own.tile);
    }
    Runs<S> runs(piece, last);
    int32_t ticket = draw(plan.next, 1);
    if (ticket < plan.num_items) {
      const Item &next = plan.at<Item>(plan.items)[ticket];
      runs.template before<T>(Piece<S>(next, heads, sequences, cache), next.first_tile);
    }
    compute_tile(piece, own, last, runs);
    if (item.join == kNone) {
      merge(piece, own.merged, own.tile);
      finish(piece, own.merged, to);
    } else {
      part(piece, own, to);
    }
    return ticket;
  }

  // own.tile is one tile of a token: whoever brings the last merges all.
  void part(const Piece<S> &piece, const OwnOf<T, S> &own, T *to) const {
    const Item &item = piece.item;
    Result kept = partial(item.partial, piece);
    std::memcpy(kept.out, own.tile.out, piece.num_rows * piece.dim * sizeof(float));
    std::memcpy(kept.maxima, own.tile.maxima, piece.num_rows * sizeof(float));
    std::memcpy(kept.sums, own.tile.sums, piece.num_rows * sizeof(float));
    Join &join = plan.at<Join>(plan.joins)[item.join];
    if (draw(join.num_left, -1) != 1) return;
    join.num_left = join.num_tiles;
    clear(own.merged, piece.num_rows, piece.dim);
    for (int64_t t = 0; t < join.num_tiles; t++) merge(piece, own.merged, partial(join.first_partial + t, piece));
    finish(piece, own.merged, to);
  }

  Result partial(int64_t number, const Piece<S> &piece) const {
    float *from = plan.at<float>(plan.partials + number * plan.partial_bytes);
    float *maxima = from + piece.group * piece.dim;
    return {from, maxima, maxima + piece.group};
  }

  void merge(const Piece<S> &piece, const Result &into, const Result &tile) const {
    for (int64_t r = 0; r < piece.num_rows; r++)
      merge_row(into.out + r * piece.dim, into.maxima[r], into.sums[r], tile.out + r * piece.dim, tile.maxima[r],
                tile.sums[r], piece.dim);
  }

  void finish(const Piece<S> &piece, const Result &merged, T *to) const {
    const float *sinks = heads.sinks ? heads.sinks + piece.item.kv_head * piece.group : nullptr;
    for (int64_t r = 0; r < piece.num_rows; r++) {
      float sink = sinks ? sinks[r % piece.group] * kLog2e : -INFINITY;
      if constexpr (kIsTransformed<S>) {
        part_halves(merged.out + r * piece.dim, piece.dim);
        hadamard_inverse(merged.out + r * piece.dim, piece.dim);
      }
      finish_row(merged.out + r * piece.dim, merged.maxima[r], merged.sums[r], sink,
                 to + r / piece.group * out_stride + r % piece.group * piece.dim, piece.dim);
    }
  }
};

}  // namespace

template <class T>
void paged_attention(const T *q, int64_t q_stride, T *out, int64_t out_stride, const Heads &heads,
                     const Sequences &sequences, const Cache &cache, void *scratch, int index, int size) {
  Plan &plan = *static_cast<Plan *>(scratch);
  const Item *items = plan.at<Item>(plan.items);
  const auto attend = [&](auto stored) {
    using S = decltype(stored);
    Step<T, S> step{q, q_stride, out, out_stride, heads, sequences, cache, plan};
    OwnOf<T, S> own(plan, Shape(heads), index);
    int32_t ticket = draw(plan.next, 1);
    while (ticket < plan.num_items) ticket = step.attend(items[ticket], own);
    if (ticket == plan.num_items + size - 1) plan.next = 0;
  };
  if (cache.format == kKVKivi) attend(Kivi{});
  else with_stored<T>(cache, attend);
}

template void paged_attention(const float *, int64_t, float *, int64_t, const Heads &, const Sequences &, const Cache &,
                              void *, int, int);
template void paged_attention(const bf16 *, int64_t, bf16 *, int64_t, const Heads &, const Sequences &, const Cache &,
                              void *, int, int);

}  // namespace DIPTYCH_ISA

API(paged_attention)(Team *team, int32_t dtype, const void *q, int64_t q_stride, void *out, int64_t out_stride,
                     const void *heads, const void *sequences, const void *cache, void *scratch) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const Sequences &who = *static_cast<const Sequences *>(sequences);
  const Cache &from = *static_cast<const Cache *>(cache);
  team->run([&](int index) {
    if (dtype == kBfloat16)
      paged_attention((const bf16 *)q, q_stride, (bf16 *)out, out_stride, of, who, from, scratch, index, team->size);
    else
      paged_attention((const float *)q, q_stride, (float *)out, out_stride, of, who, from, scratch, index, team->size);
  });
}
