// Which thread attends to what: pieces of work in one list, the longest first, of which threads take the next.
//
//     scratch = [Plan] [Item x max_items] [Join x max_partials] [partial results] [each thread's own]
//
// A piece is some tokens of a sequence against one KV head. One that is long beside the whole step is cut into its
// tiles: their results are kept apart, and who finishes the last merges them. Where the cuts are changes no bit.
#pragma once

#include <cstdint>

#include "attention.h"

namespace DIPTYCH_ISA {

constexpr int64_t kQueryRows = 96;  // of a piece, at least one token's: queries that share their loads of K and V
constexpr int64_t kNone = -1;

struct Item {
  int32_t seq, kv_head;
  int32_t first_token, num_tokens;  // of the sequence's new ones
  int32_t first_tile, num_tiles;
  int32_t join;     // whose part it is, or kNone
  int32_t partial;  // where its result goes then
};

struct Join {
  int32_t num_left;  // shared
  int32_t num_tiles, first_partial;
};

struct Plan {
  alignas(64) int32_t next;  // shared; 0 between steps: who draws the last ticket puts it back
  alignas(64) int32_t num_items;
  int64_t max_items, max_partials;
  int64_t items, joins, partials, threads;  // bytes from the plan's start
  int64_t partial_bytes, thread_bytes;

  template <class S>
  S *at(int64_t offset) {
    return reinterpret_cast<S *>(reinterpret_cast<char *>(this) + offset);
  }
};

// Adds to a number that threads share. Returns what it was.
inline int32_t draw(int32_t &from, int32_t add) { return __atomic_fetch_add(&from, add, __ATOMIC_ACQ_REL); }

// How large the pieces are.
struct Shape {
  int64_t dim, group;       // of a head; query heads of one KV head
  int64_t num_tokens, rows;  // at most, in a piece

  explicit Shape(const Heads &heads)
      : dim(heads.head_dim),
        group(heads.num_heads / heads.num_kv_heads),
        num_tokens(group < kQueryRows ? kQueryRows / group : 1),
        rows(num_tokens * group) {}

  int64_t partial_floats() const { return group * (dim + 2); }
};

}  // namespace DIPTYCH_ISA
