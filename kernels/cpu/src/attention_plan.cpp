#include "attention_plan.h"

#include "api.h"
#include "kivi.h"

namespace DIPTYCH_ISA {

namespace {

constexpr int64_t kCutsPerThread = 8;  // a piece above this part of a thread's share is cut
constexpr int64_t kLoadRows = 8;       // reading a slot costs as much as computing it for so many rows
constexpr int kBuckets = 64;

int64_t up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

template <class T>
Plan sizes(const Heads &heads, const AttentionLimits &limits) {
  Shape shape(heads);
  Plan plan{};
  int64_t num_tiles = (limits.context_len + kTile - 1) / kTile + 1;
  plan.max_partials = num_tiles * heads.num_kv_heads;
  int64_t num_pieces = limits.num_rows / shape.num_tokens + limits.num_rows / kKiviSlots + 2 * limits.num_seqs;
  plan.max_items = heads.num_kv_heads * num_pieces + plan.max_partials;
  plan.partial_bytes = up(shape.partial_floats() * sizeof(float));
  // Queries (of T, or floats beside a cache of scaled numbers, or both beside one with a tail), scores, a tile's result and
  // the merged one, a group of values; the maxima and sums of both results.
  plan.thread_bytes = up(shape.rows * shape.dim * sizeof(float)) + up(shape.rows * kTile * sizeof(float)) +
                      2 * up(shape.rows * shape.dim * sizeof(float)) + up(kGroup * shape.dim * sizeof(T)) +
                      4 * up(shape.rows * sizeof(float)) + up(shape.rows * shape.dim * sizeof(T));
  plan.items = up(sizeof(Plan));
  plan.joins = plan.items + up(plan.max_items * sizeof(Item));
  plan.partials = plan.joins + up(plan.max_partials * sizeof(Join));
  plan.threads = plan.partials + plan.max_partials * plan.partial_bytes;
  return plan;
}

// Calls visit(item, cost) for every piece, uncut.
template <class Visit>
void pieces(const Heads &heads, const Sequences &sequences, Visit &&visit) {
  Shape shape(heads);
  for (int64_t seq = 0; seq < sequences.num_seqs; seq++) {
    int64_t num_new = sequences.query_starts[seq + 1] - sequences.query_starts[seq];
    int64_t start = sequences.length(seq) - num_new;
    for (int64_t first = 0, num; first < num_new; first += num) {
      int64_t position = start + first, own = position / kKiviSlots * kKiviSlots;  // of its block
      num = least(shape.num_tokens, num_new - first);
      if (sequences.tails) num = least(num, own + kKiviSlots - position);
      int64_t end = position + num, begin = heads.window ? most(position + 1 - heads.window, 0) : 0;
      int64_t first_tile = begin / kTile, num_tiles = (end + kTile - 1) / kTile - first_tile;
      if (sequences.tails) {  // the own block is one tile more, after those of the pool
        int64_t own_tile = (own + kTile - 1) / kTile;
        first_tile = begin < own ? first_tile : own_tile;
        num_tiles = own_tile + 1 - first_tile;
      }
      int64_t cost = (end - begin) * (kLoadRows + num * shape.group);
      for (int64_t head = 0; head < heads.num_kv_heads; head++)
        visit(Item{int32_t(seq), int32_t(head), int32_t(first), int32_t(num), int32_t(first_tile), int32_t(num_tiles),
                   kNone, kNone},
              cost);
    }
  }
}

}  // namespace

template <class T>
int64_t paged_attention_scratch_bytes(const Heads &heads, const AttentionLimits &limits, int size) {
  Plan plan = sizes<T>(heads, limits);
  return plan.threads + size * plan.thread_bytes;
}

template <class T>
void plan_attention(const Heads &heads, const Sequences &sequences, const AttentionLimits &limits, void *scratch,
                    int size) {
  Plan &plan = *static_cast<Plan *>(scratch);
  plan = sizes<T>(heads, limits);
  int64_t total = 0, largest = 1, num_items = 0;
  pieces(heads, sequences, [&](const Item &, int64_t cost) { total += cost, largest = most(largest, cost); });
  int64_t counts[kBuckets + 1] = {}, room = plan.max_partials;
  auto bucket_of = [&](int64_t cost) { return kBuckets - 1 - cost * (kBuckets - 1) / largest; };
  // The same answer in both passes, which meet the pieces in one order.
  auto is_cut = [&](const Item &item, int64_t cost) {
    bool cut = item.num_tokens == 1 && item.num_tiles > 1 && size > 1 && item.num_tiles <= room &&
               cost * kCutsPerThread * size > total;
    room -= cut ? item.num_tiles : 0;
    return cut;
  };
  pieces(heads, sequences, [&](const Item &item, int64_t cost) {
    int64_t num = is_cut(item, cost) ? item.num_tiles : 1;
    counts[bucket_of(cost / num) + 1] += num;
    num_items += num;
  });
  for (int b = 0; b < kBuckets; b++) counts[b + 1] += counts[b];
  Item *items = plan.at<Item>(plan.items);
  Join *joins = plan.at<Join>(plan.joins);
  int32_t num_joins = 0;
  room = plan.max_partials;
  pieces(heads, sequences, [&](Item item, int64_t cost) {
    int32_t first_partial = int32_t(plan.max_partials - room);
    if (!is_cut(item, cost)) {
      items[counts[bucket_of(cost)]++] = item;
      return;
    }
    joins[num_joins] = Join{item.num_tiles, item.num_tiles, first_partial};
    int64_t bucket = bucket_of(cost / item.num_tiles);
    for (int32_t t = 0; t < item.num_tiles; t++)
      items[counts[bucket]++] = Item{item.seq, item.kv_head, item.first_token, 1, item.first_tile + t, 1,
                                     num_joins, first_partial + t};
    num_joins++;
  });
  plan.num_items = int32_t(num_items);
}

template int64_t paged_attention_scratch_bytes<float>(const Heads &, const AttentionLimits &, int);
template int64_t paged_attention_scratch_bytes<bf16>(const Heads &, const AttentionLimits &, int);
template void plan_attention<float>(const Heads &, const Sequences &, const AttentionLimits &, void *, int);
template void plan_attention<bf16>(const Heads &, const Sequences &, const AttentionLimits &, void *, int);

}  // namespace DIPTYCH_ISA

// Writes to `bytes` what plan_attention and paged_attention need.
API(paged_attention_scratch)(Team *team, int32_t dtype, const void *heads, const void *limits, int64_t *bytes) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const AttentionLimits &most = *static_cast<const AttentionLimits *>(limits);
  *bytes = dtype == kBfloat16 ? paged_attention_scratch_bytes<bf16>(of, most, team->capacity)
                              : paged_attention_scratch_bytes<float>(of, most, team->capacity);
}

API(plan_attention)(Team *team, int32_t dtype, const void *heads, const void *sequences, const void *limits,
                    void *scratch) {
  using namespace DIPTYCH_ISA;
  const Heads &of = *static_cast<const Heads *>(heads);
  const Sequences &who = *static_cast<const Sequences *>(sequences);
  const AttentionLimits &most = *static_cast<const AttentionLimits *>(limits);
  if (dtype == kBfloat16) plan_attention<bf16>(of, who, most, scratch, team->size);
  else plan_attention<float>(of, who, most, scratch, team->size);
}
