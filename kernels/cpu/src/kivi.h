// KV of whole blocks in 4 bits, as KIVI keeps it (Liu et al. 2024): kernels/kv/kivi.py says which byte is what. A
// token's own block is read from the tail, at full width; the blocks before it from here.
//
//     write rows to the tail -> round the blocks that are full now -> attention, over the pool and then the tail
#pragma once

#include "attention.h"

namespace DIPTYCH_ISA {

constexpr int64_t kKiviSlots = 32;  // tokens of a block, and numbers of a group

// A head's keys or values of a block.
template <class Byte>
struct KiviHead {
  Byte *codes;  // [16 dim]
  int64_t dim;

  static constexpr int64_t bytes(int64_t dim) { return 20 * dim; }

  auto *scales() const { return reinterpret_cast<Half *>(codes + 16 * dim); }  // [dim]
  auto *leasts() const { return scales() + dim; }                             // [dim]

 private:
  using Half = std::conditional_t<std::is_const_v<Byte>, const bf16, bf16>;
};

template <class Byte = uint8_t>
inline KiviHead<Byte> kivi_head(const Cache &cache, bool is_value, int64_t block, int64_t kv_head) {
  const int64_t head = (is_value ? cache.num_kv_heads : 0) + kv_head;
  char *layer = static_cast<char *>(cache.base) + block * cache.block_stride;
  return {reinterpret_cast<Byte *>(layer) + head * KiviHead<Byte>::bytes(cache.head_dim), cache.head_dim};
}

// Rounds full blocks of the tail, of T, into blocks of the pool. pairs: [num_pairs][2], a block of the tail and one of
// the pool.
template <class T>
void round_blocks(const Cache &pool, const int64_t *pairs, int64_t num_pairs, int index, int size);

}  // namespace DIPTYCH_ISA
