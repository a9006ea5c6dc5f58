#include "kivi.h"

#include <cmath>
#include <cstring>

#include "api.h"

namespace DIPTYCH_ISA {

namespace {

// A group of 32 numbers, rounded.
struct Rounded {
  i32x16 first, second;  // codes
  bf16 scale, least;
};

float of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Bit for bit what kernels/kv/kivi.py's round_groups makes of them.
Rounded round_group(f32x16 first, f32x16 second) {
  const bool are_finite = bits(equal(first - first + (second - second), f32x16{})) == 0xffff;
  const float lowest = -largest(max(-first, -second)) + 0.0f;  // of zeros, the positive one
  const uint32_t raw = bits_of(lowest);
  const uint32_t down = (raw >> 31 ? raw + 0xffff : raw) & 0xffff0000u;
  const float least = of_bits(down), extent = largest(max(first, second)) - least;
  if (!are_finite || !(extent < INFINITY)) return {i32x16{}, i32x16{}, bf16{0x7fc0}, bf16{}};
  const uint32_t up = extent < kSmallest ? 0 : (bits_of(extent / 15.0f) + 0xffff) & 0xffff0000u;
  const float inverse = up ? 1.0f / of_bits(up) : 0.0f;
  return {to_whole((first - least) * inverse), to_whole((second - least) * inverse), bf16{uint16_t(up >> 16)},
          bf16{uint16_t(down >> 16)}};
}

void store_codes(uint8_t *to, i32x16 low, i32x16 high) {
  const u8x16 bytes = __builtin_convertvector(low | high << 4, u8x16);
  std::memcpy(to, &bytes, sizeof bytes);
}

// Numbers of the tail: of a channel of keys those of 16 slots, and of a slot of values 16 neighbours from d on.
f32x16 load_channel(const float *group, int64_t d) { return load(group + d * kGroup); }

f32x16 load_channel(const bf16 *group, int64_t d) {
  const u32x16 both = load_raw<u32x16>(group + d / 2 * 2 * kGroup);
  return (f32x16)(d % 2 ? both & 0xffff0000u : both << 16);
}

f32x16 load_slot(const float *group, int64_t slot, int64_t d, int64_t dim) { return load(group + slot * dim + d); }

f32x16 load_slot(const bf16 *group, int64_t slot, int64_t d, int64_t dim) {
  const u32x16 both = load_raw<u32x16>(group + (slot / 2 * dim + d) * 2);
  return (f32x16)(slot % 2 ? both & 0xffff0000u : both << 16);
}

template <class T>
void round_keys(const Cache &tail, int64_t block, int64_t head, const KiviHead<uint8_t> &to) {
  const T *first = group_of<const T>(tail, false, block, head, 0), *second = first + kGroup * to.dim;
  for (int64_t d = 0; d < to.dim; d += 2) {
    const Rounded low = round_group(load_channel(first, d), load_channel(second, d));
    const Rounded high = round_group(load_channel(first, d + 1), load_channel(second, d + 1));
    store_codes(to.codes + d / 2 * kGroup, low.first, high.first);
    store_codes(to.codes + (to.dim + d) / 2 * kGroup, low.second, high.second);
    to.scales()[d] = low.scale, to.scales()[d + 1] = high.scale;
    to.leasts()[d] = low.least, to.leasts()[d + 1] = high.least;
  }
}

template <class T>
void round_values(const Cache &tail, int64_t block, int64_t head, const KiviHead<uint8_t> &to) {
  const T *groups = group_of<const T>(tail, true, block, head, 0);
  for (int64_t slot = 0; slot < kKiviSlots; slot++) {
    const T *group = groups + slot / kGroup * kGroup * to.dim;
    for (int64_t d = 0; d < to.dim; d += kKiviSlots) {
      const Rounded made = round_group(load_slot(group, slot % kGroup, d, to.dim),
                                       load_slot(group, slot % kGroup, d + kLanes, to.dim));
      store_codes(to.codes + (slot * to.dim + d) / 2, made.first, made.second);
      to.scales()[d + slot] = made.scale, to.leasts()[d + slot] = made.least;
    }
  }
}

}  // namespace

template <class T>
void round_blocks(const Cache &pool, const int64_t *pairs, int64_t num_pairs, int index, int size) {
  const int64_t heads = pool.num_kv_heads;
  const Span span = span_of(num_pairs * 2 * heads, 1, index, size);
  for (int64_t i = span.first; i < span.last; i++) {
    const int64_t *pair = pairs + i / (2 * heads) * 2, head = i % heads;
    const bool is_value = i / heads % 2;
    const KiviHead<uint8_t> to = kivi_head(pool, is_value, pair[1], head);
    if (is_value) round_values<T>(*pool.tail, pair[0], head, to);
    else round_keys<T>(*pool.tail, pair[0], head, to);
  }
}

template void round_blocks<float>(const Cache &, const int64_t *, int64_t, int, int);
template void round_blocks<bf16>(const Cache &, const int64_t *, int64_t, int, int);

}  // namespace DIPTYCH_ISA

API(round_blocks)(Team *team, int32_t dtype, const void *pool, const int64_t *pairs, int64_t num_pairs) {
  using namespace DIPTYCH_ISA;
  const Cache &to = *static_cast<const Cache *>(pool);
  team->run([&](int index) {
    if (dtype == kBfloat16) round_blocks<bf16>(to, pairs, num_pairs, index, team->size);
    else round_blocks<float>(to, pairs, num_pairs, index, team->size);
  });
}
