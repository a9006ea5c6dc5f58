// A piece of attention over blocks of kivi.h. Its rows are of one block, their own: they all read the blocks before it
// from the pool, in tiles as ever, and then up to themselves in their own, which is one tile more, of the tail.
#pragma once

#include "attention_piece.h"
#include "kivi_tile.h"

namespace DIPTYCH_ISA {

template <>
struct Piece<Kivi> : PieceOfAny {
  int64_t own_block;   // of its rows
  int32_t tail_block;  // which has its keys and values

  Piece(const Item &of, const Heads &heads, const Sequences &sequences, const Cache &cache)
      : PieceOfAny(of, heads, sequences, cache),
        own_block(position / kKiviSlots),
        tail_block(sequences.tails[sequences.tail_starts[of.seq] + own_block - start_of(of, sequences) / kKiviSlots]) {}

  // Number of the own block's tile, after those of the pool.
  int64_t own_tile() const { return (own_block + kTileBlocks - 1) / kTileBlocks; }

  // Blocks of a tile that rows from `row` on see, counted from its first.
  Span blocks(int64_t row, int64_t tile) const {
    int64_t first = begin(row) / kKiviSlots - tile * kTileBlocks, last = own_block - tile * kTileBlocks;
    first = first > 0 ? first : 0;
    last = last < kTileBlocks ? last : kTileBlocks;
    return {first, last > first ? last : first};
  }

  // Where K or V of the blocks of a tile are, into `to`.
  void find(bool is_value, int64_t tile, Span blocks, const uint8_t **to) const {
    for (int64_t b = blocks.first; b < blocks.last; b++)
      *to++ = kivi_head(cache, is_value, table[tile * kTileBlocks + b], item.kv_head).codes;
  }
};

// As those of other caches; a run is a head of a block. The own block's tile has only what comes after it.
template <>
struct Runs<Kivi> {
  Span blocks;  // of the tile
  const uint8_t *of[2 * kTileBlocks + kKiviAhead];

  Runs(const Piece<Kivi> &piece, int64_t tile) : blocks(piece.blocks(0, tile)) {
    if (tile == piece.own_tile()) blocks = {};
    piece.find(false, tile, blocks, of);
    piece.find(true, tile, blocks, of + size());
    for (int64_t i = 0; i < kKiviAhead; i++) of[2 * size() + i] = size() ? of[2 * size() - 1] : nullptr;
  }

  int64_t size() const { return blocks.last - blocks.first; }
  const uint8_t **keys(int64_t block) { return of + block - blocks.first; }
  const uint8_t **values(int64_t block) { return keys(block) + size(); }

  // T: of the tail, whose keys and values come in pieces of as many bytes as a run has.
  template <class T>
  void before(const Piece<Kivi> &piece, int64_t tile) {
    if (tile == piece.own_tile()) {
      for (int64_t i = 0; i < kKiviAhead; i++) {
        const bool is_value = i >= kKiviAhead / 2;
        const T *from = group_of<const T>(*piece.cache.tail, is_value, piece.tail_block, piece.item.kv_head, 0);
        const int64_t number = i % (kKiviAhead / 2);
        of[2 * size() + i] = (const uint8_t *)from + number * KiviHead<uint8_t>::bytes(piece.dim);
      }
      return;
    }
    Span some = piece.blocks(0, tile);
    if (some.last - some.first > kKiviAhead) some.last = some.first + kKiviAhead;
    piece.find(false, tile, some, of + 2 * size());
  }
};

// One thread's memory. T: of queries, and of the tail.
template <class T>
struct KiviOwn : Own<float, Kivi> {
  Own<T, T> tail;

  KiviOwn(Plan &plan, const Shape &shape, int index) : Own<float, Kivi>(plan, shape, index), tail(*this, shape) {}
};

template <class T, class S>
using OwnOf = std::conditional_t<std::is_same_v<S, Kivi>, KiviOwn<T>, Own<Factor<T, S>, S>>;

template <class T>
void read_queries(const Piece<Kivi> &piece, const T *q, int64_t q_stride, const KiviOwn<T> &own) {
  const int64_t size = piece.group * piece.dim;
  for (int64_t token = 0; token < piece.item.num_tokens; token++, q += q_stride) {
    std::memcpy(own.tail.queries + token * size, q, size * sizeof(T));
    for (int64_t i = 0; i < size; i += kLanes) store(own.queries + token * size + i, load(q + i));
  }
}

// Fetches whole runs.
inline void fetch_runs(const uint8_t *const *runs, int64_t num, int64_t dim) {
  for (int64_t i = 0; i < num; i++)
    for (int64_t byte = 0; byte < KiviHead<uint8_t>::bytes(dim); byte += kLine) __builtin_prefetch(runs[i] + byte);
}

// Fetches both ends of runs at once, before the rest is: each is in a page of its own, and the processor waits for one
// page's address after another otherwise.
inline void fetch_ends(const uint8_t *const *runs, int64_t num, int64_t dim) {
  for (int64_t i = 0; i < num; i++) __builtin_prefetch(runs[i]);
  for (int64_t i = 0; i < num; i++) __builtin_prefetch(runs[i] + KiviHead<uint8_t>::bytes(dim) - 1);
}

// The tile of the rows' own block, through the kernels of a cache at full width.
template <class T>
void compute_own_block(const Piece<Kivi> &piece, const KiviOwn<T> &own, const Runs<Kivi> &after) {
  const int64_t start = piece.own_block * kKiviSlots;
  const Piece<T> inner(piece.item, piece.heads, *piece.cache.tail, &piece.tail_block, piece.context_len - start,
                       piece.position - start);
  Runs<T> runs(inner, 0);
  fetch_runs(after.of, kKiviAhead / 2, piece.dim);
  compute_tile(inner, own.tail, 0, runs);
  fetch_runs(after.of + kKiviAhead / 2, kKiviAhead / 2, piece.dim);
}

template <class T>
void compute_tile(const Piece<Kivi> &piece, const KiviOwn<T> &own, int64_t tile, Runs<Kivi> &runs) {
  if (tile == piece.own_tile()) return compute_own_block(piece, own, runs);
  const int64_t dim = piece.dim, num_rows = piece.num_rows, start = tile * kTile;
  const Span all = runs.blocks;
  const float cap = piece.heads.softcap, factor = cap != 0.0f ? piece.heads.scale / cap : piece.heads.scale * kLog2e;
  fetch_ends(runs.values(all.first), runs.size(), dim);
  for (int64_t b = all.first; b < all.last; b++)
    for (int64_t row = 0; row < num_rows; row += kKiviRows) {
      if (b < piece.blocks(row, tile).first) continue;
      const int64_t num = num_rows - row < kKiviRows ? num_rows - row : kKiviRows;
      const uint8_t **keys = runs.keys(b);
      score_block(own.queries + row * dim, num, {keys[0], dim}, keys[kKiviAhead], factor,
                  own.scores + row * kTile + b * kKiviSlots);
    }
  fetch_ends(runs.values(all.last), kKiviAhead, dim);
  for (int64_t row = 0; row < num_rows; row += kKiviRows) {
    const int64_t num = num_rows - row < kKiviRows ? num_rows - row : kKiviRows;
    const Span seen = piece.blocks(row, tile);
    for (int64_t r = row; r < row + num; r++)
      soften_row<float>(own.scores + r * kTile, {2 * seen.first, 2 * seen.last}, piece.begin(r) - start, kTile,
                        cap * kLog2e, own.tile.maxima[r], own.tile.sums[r]);
    weigh_blocks(own.scores + row * kTile + seen.first * kKiviSlots, num, runs.values(seen.first),
                 seen.last - seen.first, dim, own.tile.out + row * dim);
  }
}

}  // namespace DIPTYCH_ISA
