#include <cstring>

#include "api.h"
#include "attention.h"
#include "norm.h"

namespace DIPTYCH_ISA {

namespace {

// out: `dim` numbers, the first num_rotated of them rotated; may be x.
template <class T>
void rotate(const T *x, const float *cos_sin, T *out, int64_t num_rotated, int64_t dim) {
  int64_t half = num_rotated / 2, i = 0;
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
  if (out != x) std::memcpy(out + num_rotated, x + num_rotated, (dim - num_rotated) * sizeof(T));
}

// In place.
template <class T>
void norm_heads(T *x, int64_t num_heads, int64_t dim, const float *weight, const HeadNorms &norms) {
  if (!weight) return;
  if (norms.is_whole) return rms_norm_row(x, weight, x, num_heads * dim, norms.eps);
  for (int64_t head = 0; head < num_heads; head++)
    rms_norm_row(x + head * dim, weight, x + head * dim, dim, norms.eps);
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

// Vectors of a cache that stores them as they are computed.
template <class T>
void put(const T *key, const T *value, const Cache &cache, int64_t block, int64_t head, int64_t offset, T) {
  int64_t group = offset / kGroup, slot = offset % kGroup;
  put_key(key, group_of<T>(cache, false, block, head, group), slot, cache.head_dim);
  put_value(value, group_of<T>(cache, true, block, head, group), slot, cache.head_dim);
}

// Stores a vector and returns its scale.
template <class T, class S>
bf16 quantise_vector(const T *from, int64_t dim, S *to) {
  if constexpr (!kIsTransformed<S>) return quantise(from, dim, to);
  alignas(64) float transform[kLargestDim];
  for (int64_t i = 0; i < dim; i += kLanes) store(transform + i, load(from + i));
  hadamard(transform, dim);
  return quantise(transform, dim, to);
}

// Vectors of a cache of scaled numbers.
template <class T, class S>
void put(const T *key, const T *value, const Cache &cache, int64_t block, int64_t head, int64_t offset, S) {
  alignas(64) S stored[kLargestDim];
  int64_t group = offset / kGroup, slot = offset % kGroup, dim = cache.head_dim;
  S *keys = group_of<S>(cache, false, block, head, group), *values = group_of<S>(cache, true, block, head, group);
  const int64_t size = dim / kNumbersIn<S>;
  scales_of(keys, dim)[slot] = quantise_vector(key, dim, stored);
  for (int64_t i = 0; i < size; i++) keys[i * kGroup + slot] = stored[i];
  scales_of(values, dim)[slot] = quantise_vector(value, dim, stored);
  std::memcpy(values + slot * size, stored, size);
}

// The first row from `row` on that begins no pair of slots begun by the row before it.
int64_t whole_pair(const int64_t *slots, int64_t row, int64_t num_rows) {
  while (0 < row && row < num_rows && slots[row] / 2 == slots[row - 1] / 2) row++;
  return row;
}

// S: what the cache stores.
template <class T, class S>
void write_rows(T *qkv, int64_t qkv_stride, int64_t num_rows, const Heads &heads, const HeadNorms &norms,
                const Rope &rope, const int64_t *positions, const int64_t *slots, const Cache &cache, Span rows) {
  alignas(64) T key[kLargestDim];
  int64_t dim = heads.head_dim, num_rotated = rope.num_rotated;
  int64_t last = whole_pair(slots, rows.last, num_rows);
  for (int64_t row = whole_pair(slots, rows.first, num_rows); row < last; row++) {
    T *q = qkv + row * qkv_stride, *k = q + heads.num_heads * dim, *v = k + heads.num_kv_heads * dim;
    const float *angles = rope.table + positions[row] * num_rotated;
    norm_heads(q, heads.num_heads, dim, norms.q, norms);
    norm_heads(k, heads.num_kv_heads, dim, norms.k, norms);
    for (int64_t head = 0; head < heads.num_heads; head++)
      rotate(q + head * dim, angles, q + head * dim, num_rotated, dim);
    int64_t block = slots[row] / cache.block_size, offset = slots[row] % cache.block_size;
    for (int64_t head = 0; head < heads.num_kv_heads; head++) {
      rotate(k + head * dim, angles, key, num_rotated, dim);
      put(key, v + head * dim, cache, block, head, offset, S{});
    }
  }
}

}  // namespace

template <class T>
void rope_kv_write(T *qkv, int64_t qkv_stride, int64_t num_rows, const Heads &heads, const HeadNorms &norms,
                   const Rope &rope, const int64_t *positions, const int64_t *slots, const Cache &cache, int index,
                   int size) {
  with_stored<T>(cache, [&](auto stored) {
    write_rows<T, decltype(stored)>(qkv, qkv_stride, num_rows, heads, norms, rope, positions, slots, cache,
                                    span_of(num_rows, 1, index, size));
  });
}

template void rope_kv_write(float *, int64_t, int64_t, const Heads &, const HeadNorms &, const Rope &, const int64_t *,
                            const int64_t *, const Cache &, int, int);
template void rope_kv_write(bf16 *, int64_t, int64_t, const Heads &, const HeadNorms &, const Rope &, const int64_t *,
                            const int64_t *, const Cache &, int, int);

}  // namespace DIPTYCH_ISA

API(rope_kv_write)(Team *team, int32_t dtype, void *qkv, int64_t qkv_stride, int64_t num_rows, const void *heads,
                   const void *norms, const void *rope, const int64_t *positions, const int64_t *slots,
                   const void *cache) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const HeadNorms &by = *static_cast<const HeadNorms *>(norms);
  const Rope &turn = *static_cast<const Rope *>(rope);
  const Cache &to = *static_cast<const Cache *>(cache);
  team->run([&](int index) {
    if (dtype == kBfloat16)
      rope_kv_write((bf16 *)qkv, qkv_stride, num_rows, of, by, turn, positions, slots, to, index, team->size);
    else
      rope_kv_write((float *)qkv, qkv_stride, num_rows, of, by, turn, positions, slots, to, index, team->size);
  });
}
