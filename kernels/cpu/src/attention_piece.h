// A piece of attention: the rows of some tokens of a sequence that read one KV head, tile by tile.
#pragma once

#include <cmath>
#include <cstring>
#include <type_traits>

#include "attention_plan.h"
#include "attention_tile.h"

namespace DIPTYCH_ISA {

constexpr float kLog2e = 1.44269504f;
constexpr int64_t kTileGroups = kTile / kGroup;

// A result that more can be merged into: rows of `out` are not yet divided by `sums`; scores are in units of log2.
struct Result {
  float *out;  // [rows, dim]
  float *maxima, *sums;  // [rows]
};

// One thread's memory. T: of what is multiplied by the cache's numbers, S.
template <class T, class S>
struct Own {
  T *queries;     // [rows, dim]
  float *scores;  // [rows, kTile]; a row becomes its probabilities, of T
  Result tile, merged;
  S *values;  // a group

  Own(Plan &plan, const Shape &shape, int index) {
    char *from = plan.at<char>(plan.threads + index * plan.thread_bytes);
    auto take = [&](int64_t bytes) {
      char *taken = from;
      from += (bytes + 63) / 64 * 64;
      return taken;
    };
    int64_t results = shape.rows * shape.dim, rows = shape.rows * sizeof(float);
    queries = (T *)take(results * sizeof(T));
    scores = (float *)take(rows * kTile);
    tile = {(float *)take(results * sizeof(float)), (float *)take(rows), (float *)take(rows)};
    merged = {(float *)take(results * sizeof(float)), (float *)take(rows), (float *)take(rows)};
    values = (S *)take(kGroup * vector_bytes<S>(shape.dim));
  }

  // Beside `other`'s, of which a spare group is not used, and which is at work at another time: queries of its own.
  template <class Other>
  Own(const Other &other, const Shape &shape)
      : queries((T *)((char *)other.values + (kGroup * shape.dim * sizeof(T) + 63) / 64 * 64)),
        scores(other.scores),
        tile(other.tile),
        merged(other.merged),
        values((S *)other.values) {}
};

// A piece of work, and where things of it are, whatever the cache stores.
struct PieceOfAny {
  const Item &item;
  const Heads &heads;
  const Cache &cache;
  const int32_t *table;
  int64_t group, dim, num_rows;
  int64_t context_len, position;  // of the first token

  PieceOfAny(const Item &of, const Heads &heads, const Sequences &sequences, const Cache &cache)
      : PieceOfAny(of, heads, cache, sequences.table(of.seq, of.kv_head, heads.num_kv_heads), sequences.length(of.seq),
                   start_of(of, sequences) + of.first_token) {}

  PieceOfAny(const Item &of, const Heads &heads, const Cache &cache, const int32_t *table, int64_t context_len,
             int64_t position)
      : item(of),
        heads(heads),
        cache(cache),
        table(table),
        group(heads.num_heads / heads.num_kv_heads),
        dim(heads.head_dim),
        num_rows(of.num_tokens * group),
        context_len(context_len),
        position(position) {}

  // Position of the first of its sequence's new tokens.
  static int64_t start_of(const Item &of, const Sequences &sequences) {
    return sequences.length(of.seq) - (sequences.query_starts[of.seq + 1] - sequences.query_starts[of.seq]);
  }

  // Slots that a row sees: [begin, end).
  int64_t end(int64_t row) const { return position + row / group + 1; }
  int64_t begin(int64_t row) const {
    int64_t first = heads.window ? end(row) - heads.window : 0;
    return first > 0 ? first : 0;
  }
};

template <class S>
struct Piece : PieceOfAny {
  using PieceOfAny::PieceOfAny;

  // Slots that rows [first, last) see in a tile, in groups from its first.
  Span groups(int64_t first_row, int64_t last_row, int64_t tile) const {
    int64_t first = begin(first_row) / kGroup - tile * kTileGroups;
    int64_t last = (end(last_row - 1) + kGroup - 1) / kGroup - tile * kTileGroups;
    first = first > 0 ? first : 0;
    last = last < kTileGroups ? last : kTileGroups;
    return {first, last > first ? last : first};
  }

  // Where K or V of the groups of a tile are, into `to`.
  void find(bool is_value, int64_t tile, Span groups, const S **to) const {
    int64_t per_block = cache.block_size / kGroup, number = tile * kTileGroups + groups.first;
    int64_t block = number / per_block, inside = number % per_block;
    for (int64_t g = groups.first; g < groups.last; g++) {
      *to++ = group_of<S>(cache, is_value, table[block], item.kv_head, inside);
      if (++inside == per_block) block++, inside = 0;
    }
  }
};

// What a tile reads, in this order: its groups of K, those of V, and the first groups of K of what comes after it.
template <class S>
struct Runs {
  Span groups;  // of the tile
  const S *of[2 * kTileGroups + kAhead];

  Runs(const Piece<S> &piece, int64_t tile) : groups(piece.groups(0, piece.num_rows, tile)) {
    piece.find(false, tile, groups, of);
    piece.find(true, tile, groups, of + size());
    for (int64_t i = 0; i < kAhead; i++) of[2 * size() + i] = size() ? of[2 * size() - 1] : nullptr;
  }

  int64_t size() const { return groups.last - groups.first; }
  const S **keys(int64_t group) { return of + group - groups.first; }
  const S **values(int64_t group) { return keys(group) + size(); }

  // What comes after it. T: of queries.
  template <class T>
  void before(const Piece<S> &piece, int64_t tile) {
    Span some = piece.groups(0, piece.num_rows, tile);
    if (some.last - some.first > kAhead) some.last = some.first + kAhead;
    piece.find(false, tile, some, of + 2 * size());
  }

  // What lies beyond the context may be anything, even NaN, and NaN survives a weight of zero: `spare` is for a copy.
  void clear_beyond(const Piece<S> &piece, int64_t tile, S *spare) {
    int64_t num_valid = piece.context_len - (tile * kTile + (groups.last - 1) * kGroup);
    if (num_valid >= kGroup || size() == 0) return;
    const S *&last = *values(groups.last - 1);
    std::memcpy(spare, last, kGroup * vector_bytes<S>(piece.dim));
    for (int64_t slot = num_valid; slot < kGroup; slot++) clear_slot(spare, slot, piece.dim);
    last = spare;
  }

  static void clear_slot(S *group, int64_t slot, int64_t dim) {
    if constexpr (kIsScaled<S>) {
      scales_of(group, dim)[slot] = bf16{};  // the numbers of any bits are finite
    } else {
      for (int64_t d = 0; d < dim; d++) group[(slot / kPack<S> * dim + d) * kPack<S> + slot % kPack<S>] = S{};
    }
  }
};

// Into own.queries, of q's type, or floats.
template <class Q, class T, class S>
void read_queries(const Piece<S> &piece, const Q *q, int64_t q_stride, const Own<T, S> &own) {
  T *to = own.queries;
  int64_t size = piece.group * piece.dim;
  for (int64_t token = 0; token < piece.item.num_tokens; token++, to += size, q += q_stride) {
    if constexpr (std::is_same_v<T, Q>) std::memcpy(to, q, size * sizeof(T));
    else for (int64_t i = 0; i < size; i += kLanes) store(to + i, load(q + i));
    if constexpr (kIsTransformed<S>)
      for (int64_t head = 0; head < piece.group; head++) {
        hadamard_inverse(to + head * piece.dim, piece.dim);
        interleave_halves(to + head * piece.dim, piece.dim);
      }
  }
}

// A tile alone, into own.tile.
template <class T, class S>
void compute_tile(const Piece<S> &piece, const Own<T, S> &own, int64_t tile, Runs<S> &runs) {
  int64_t dim = piece.dim, num_rows = piece.num_rows;
  const Span all = runs.groups;
  const float factor = piece.heads.softcap ? piece.heads.scale / piece.heads.softcap : piece.heads.scale * kLog2e;
  for (int64_t g = all.first; g < all.last; g += kVectors<S>) {
    int64_t num_groups = all.last - g < kVectors<S> ? all.last - g : kVectors<S>;
    for (int64_t row = 0; row < num_rows; row += kRows<S>) {
      int64_t num = num_rows - row < kRows<S> ? num_rows - row : kRows<S>;
      Span seen = piece.groups(row, row + num, tile);
      if (g >= seen.last || g + num_groups <= seen.first) continue;
      kernel_for<Score, T, S>(num, num_groups)(own.queries + row * dim, dim, runs.keys(g), factor,
                                            own.scores + row * kTile + g * kGroup);
    }
  }
  runs.clear_beyond(piece, tile, own.values);
  for (int64_t row = 0; row < num_rows; row += kRows<S>) {
    int64_t num = num_rows - row < kRows<S> ? num_rows - row : kRows<S>;
    Span seen = piece.groups(row, row + num, tile);
    for (int64_t r = row; r < row + num; r++) {
      soften_row<T>(own.scores + r * kTile, seen, piece.begin(r) - tile * kTile, piece.end(r) - tile * kTile,
                    piece.heads.softcap * kLog2e, own.tile.maxima[r], own.tile.sums[r]);
      if constexpr (kIsScaled<S>) scale_row(own.scores + r * kTile, seen, runs.values(seen.first), dim);
    }
    const T *probs = (const T *)(own.scores + row * kTile) + seen.first * kGroup;
    for (int64_t d = 0; d < dim; d += kVectors<S> * kLanes) {
      int64_t num_vectors = (dim - d) / kLanes < kVectors<S> ? (dim - d) / kLanes : kVectors<S>;
      kernel_for<Weigh, T, S>(num, num_vectors)(probs, runs.values(seen.first), seen.last - seen.first, dim, d,
                                             own.tile.out + row * dim + d);
    }
  }
}

}  // namespace DIPTYCH_ISA
