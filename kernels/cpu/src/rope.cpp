#include <cstring>

#include "api.h"
#include "attention.h"
#include "norm.h"

namespace DIPTYCH_ISA {

namespace {

template <class T>
void rotate(const T *x, const float *cos_sin, T *out, int64_t dim) {
  int64_t half = dim / 2, i = 0;
  const float *cos = cos_sin, *sin = cos_sin + half;
  for (; i + kLanes <= half; i += kLanes) {
    f32x16 first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, first * c - second * s);
    store(out + half + i, second * c + first * s);
  }
  for (; i < half; i++) {
    float first = widen(x[i]), second = widen(x[half + i]);
    narrow(out + i, first * cos[i] - second * sin[i]);
    narrow(out + half + i, second * cos[i] + first * sin[i]);
  }
}

template <class T>
void put_key(const T *key, T *group, int64_t slot, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kPack<T>)
    std::memcpy(group + i * kGroup + slot * kPack<T>, key + i, kPack<T> * sizeof(T));
}

void put_value(const float *value, float *group, int64_t slot, int64_t dim) {
  std::memcpy(group + slot * dim, value, dim * sizeof(float));
}

// Reads and writes the neighbour in the same pair of slots: a pair is one thread's.
void put_value(const bf16 *value, bf16 *group, int64_t slot, int64_t dim) {
  bf16 *row = group + slot / 2 * dim * 2;
  int shift = slot % 2 * 16;
  for (int64_t i = 0; i < dim; i += kLanes) {
    u32x16 fresh = __builtin_convertvector(load_raw<u16x16>(value + i), u32x16) << shift;
    u32x16 both = (load_raw<u32x16>(row + 2 * i) & (0xffff0000u >> shift)) | fresh;
    std::memcpy(row + 2 * i, &both, sizeof both);
  }
}

// The first row from `row` on that begins no pair of slots begun by the row before it.
int64_t whole_pair(const int64_t *slots, int64_t row, int64_t num_rows) {
  while (0 < row && row < num_rows && slots[row] / 2 == slots[row - 1] / 2) row++;
  return row;
}

}  // namespace

template <class T>
void rope_kv_write(T *qkv, int64_t qkv_stride, int64_t num_rows, const Heads &heads, const float *cos_sin,
                   const int64_t *slots, const T *q_norm, const T *k_norm, float eps, const Cache &cache, int index,
                   int size) {
  constexpr int64_t kLargest = 1024;
  alignas(64) T normed[kLargest], key[kLargest];
  int64_t dim = heads.head_dim;
  Span rows = span_of(num_rows, 1, index, size);
  int64_t last = whole_pair(slots, rows.last, num_rows);
  for (int64_t row = whole_pair(slots, rows.first, num_rows); row < last; row++) {
    T *q = qkv + row * qkv_stride, *k = q + heads.num_heads * dim, *v = k + heads.num_kv_heads * dim;
    const float *angles = cos_sin + row * dim;
    for (int64_t head = 0; head < heads.num_heads; head++) {
      T *x = q + head * dim;
      if (q_norm) rms_norm_row(x, q_norm, x, dim, eps);
      rotate(x, angles, x, dim);
    }
    int64_t block = slots[row] / cache.block_size, offset = slots[row] % cache.block_size;
    int64_t group = offset / kGroup, slot = offset % kGroup;
    for (int64_t head = 0; head < heads.num_kv_heads; head++) {
      const T *x = k + head * dim;
      if (k_norm) rms_norm_row(x, k_norm, normed, dim, eps);
      rotate(k_norm ? normed : x, angles, key, dim);
      put_key(key, group_of<T>(cache, false, block, head, group), slot, dim);
      put_value(v + head * dim, group_of<T>(cache, true, block, head, group), slot, dim);
    }
  }
}

template void rope_kv_write(float *, int64_t, int64_t, const Heads &, const float *, const int64_t *, const float *,
                            const float *, float, const Cache &, int, int);
template void rope_kv_write(bf16 *, int64_t, int64_t, const Heads &, const float *, const int64_t *, const bf16 *,
                            const bf16 *, float, const Cache &, int, int);

}  // namespace DIPTYCH_ISA

// As DIPTYCH_ISA::rope_kv_write; q_norm and k_norm: both or neither null.
API(rope_kv_write)(Team *team, int32_t dtype, void *qkv, int64_t qkv_stride, int64_t num_rows, const void *heads,
                   const float *cos_sin, const int64_t *slots, const void *q_norm, const void *k_norm, float eps,
                   const void *cache) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const Cache &to = *static_cast<const Cache *>(cache);
  team->run([&](int index) {
    if (dtype == kBfloat16)
      rope_kv_write((bf16 *)qkv, qkv_stride, num_rows, of, cos_sin, slots, (const bf16 *)q_norm, (const bf16 *)k_norm,
                    eps, to, index, team->size);
    else
      rope_kv_write((float *)qkv, qkv_stride, num_rows, of, cos_sin, slots, (const float *)q_norm,
                    (const float *)k_norm, eps, to, index, team->size);
  });
}
