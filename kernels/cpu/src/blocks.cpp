// Copies of whole blocks of the KV pool.
#include <cstring>

#include "api.h"

// Block sources[i] becomes block targets[i], in each of `num_outer` parts of the pool: run_bytes at a time, the parts
// outer_stride bytes apart, the blocks block_stride. No target is another pair's source or target.
API(copy_blocks)(Team *team, void *pool, int64_t num_outer, int64_t outer_stride, int64_t block_stride,
                 int64_t run_bytes, const int64_t *sources, const int64_t *targets, int64_t num_pairs) {
  team->run([&](int index) {
    const Span span = span_of(num_outer * num_pairs, 1, index, team->size);
    for (int64_t i = span.first; i < span.last; i++) {
      char *part = static_cast<char *>(pool) + i / num_pairs * outer_stride;
      std::memcpy(part + targets[i % num_pairs] * block_stride, part + sources[i % num_pairs] * block_stride,
                  run_bytes);
    }
  });
}
