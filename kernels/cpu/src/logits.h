// From final hidden states: the greedy token of each row, without writing its logits; log-probabilities of logits.
#pragma once

#include "linear.h"
#include "select.h"
#include "team.h"

namespace DIPTYCH_ISA {

constexpr int64_t kGreedyRows = 128, kGreedyPanels = 4;  // at a time: their logits stay in cache

struct Best {
  float logit;
  int64_t id;
};

// Floats that one thread of `best_of_part` needs.
constexpr int64_t kGreedyScratch = kGreedyRows * kGreedyPanels * kPanel;

// x = cap * tanh(x / cap): of `count` floats, the part of thread `index` of `size`.
inline void cap_softly(float *x, int64_t count, float cap, int index, int size) {
  const Span span = span_of(count, kLanes, index, size);
  update(x + span.first, x + span.first, span.last - span.first,
         [&](f32x16 v, f32x16) { return tanh(v * (1.0f / cap)) * cap; });
}

// Token masks of some rows: of[row] points to bits, bit i % 32 of word i / 32 set where token i is allowed; null: all are.
// `of` null: no row has one.
struct TokenMasks {
  const uint32_t *const *of = nullptr;

  // Whether `row` may have a token of `num_words` words, from `word` on.
  bool allows_any(int64_t row, int64_t word, int64_t num_words) const {
    if (!of || !of[row]) return true;
    uint32_t any = 0;
    for (int64_t i = word; i < word + num_words; i++) any |= of[row][i];
    return any != 0;
  }

  // -inf for the logits of tokens that are not allowed. logits: `count` floats, of the tokens from those of `word` on.
  void apply(int64_t row, int64_t word, float *logits, int64_t count) const {
    if (!of || !of[row]) return;
    for (int64_t first = 0; first < count; first += 32) {
      const uint32_t mask = of[row][word + first / 32];
      if (mask == ~0u) continue;
      int64_t i = first;
      for (; i < first + 32 && i + kLanes <= count; i += kLanes) {
        const u32x16 held = ((u32x16{} + mask) >> ((u32x16)kLaneIds + uint32_t(i - first))) & 1u;
        store(logits + i, choose(-(i32x16)held, load(logits + i), splat(-INFINITY)));
      }
      for (; i < first + 32 && i < count; i++) logits[i] = mask >> (i - first) & 1 ? logits[i] : -INFINITY;
    }
  }
};

// The best among the outputs of the panels that thread `index` of `size` computes, the lowest id among equals: bests
// [num_rows]. A logit is the sum that `linear` makes, so it depends on its own row alone; capped if `cap` is not 0, for
// that makes equals of what was not. Panels of which no row may have a token are not multiplied. No barrier at the end.
template <class T>
void best_of_part(const Linear &head, const T *hidden, int64_t hidden_stride, int64_t num_rows, Best *bests,
                  float *scratch, float cap, TokenMasks masks, int index, int size) {
  static_assert(kPanel == 32);  // a panel's tokens are a word's of a mask
  const Span span = span_of((head.n + kPanel - 1) / kPanel, kGreedyPanels, index, size);
  for (int64_t row = 0; row < num_rows; row++) bests[row] = {-INFINITY, head.n};
  for (int64_t start = 0; start < num_rows; start += kGreedyRows) {
    const int64_t rows = num_rows - start < kGreedyRows ? num_rows - start : kGreedyRows;
    for (int64_t panel = span.first; panel < span.last; panel += kGreedyPanels) {
      const Linear some = panels_of<T>(head, panel, kGreedyPanels);
      const int64_t num_words = (some.n + kPanel - 1) / kPanel;
      int64_t first = start;
      while (first < start + rows && !masks.allows_any(first, panel, num_words)) first++;
      if (first == start + rows) continue;
      linear(some, hidden + start * hidden_stride, hidden_stride, rows, scratch, some.n, kStore, 0, 1);
      if (cap != 0.0f) cap_softly(scratch, rows * some.n, cap, 0, 1);
      for (int64_t row = 0; row < rows; row++) {
        if (!masks.allows_any(start + row, panel, num_words)) continue;
        float *logits = scratch + row * some.n;
        masks.apply(start + row, panel, logits, some.n);
        const float best = largest_of(logits, some.n);
        if (best > bests[start + row].logit)
          bests[start + row] = {best, panel * kPanel + argmax_of(logits, some.n)};
      }
    }
  }
}

// bests: [size][num_rows] of all threads; the first of them become the best of all.
inline void best_of_all(Best *bests, int64_t num_rows, int size, int64_t *ids) {
  for (int64_t row = 0; row < num_rows; row++) {
    Best &best = bests[row];
    for (int i = 1; i < size; i++)
      if (bests[i * num_rows + row].logit > best.logit) best = bests[i * num_rows + row];
    ids[row] = best.logit > -INFINITY ? best.id : 0;
  }
}

// log(sum(exp(x))) of any number of floats.
inline float log_sum_exp(const float *x, int64_t n) {
  const float best = largest_of(x, n);
  const int64_t whole = n / kLanes * kLanes;
  auto mass = [&](f32x16 v) { return exp(v - best); };
  double total = sum_of(x, whole, mass, [](f32x16 v) { return above(v, splat(-INFINITY)); });
  if (whole < n) total += double(sum(mass(load_or_least(x + whole, n - whole))));
  return best + float(std::log(total));
}

// The `num_top` largest of x in descending order, the lowest id first among equals. num_top <= n.
inline void largest_in_order(const float *x, int64_t n, int64_t num_top, int64_t *ids, float *values) {
  int64_t num_found = 0;
  auto insert = [&](int64_t id) {
    int64_t at = num_found < num_top ? num_found++ : num_top - 1;
    for (; at > 0 && values[at - 1] < x[id]; at--) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = x[id];
    ids[at] = id;
  };
  for (int64_t i = 0; i < n && num_top; i += kLanes) {
    f32x16 v = load_or_least(x + i, n - i);
    uint32_t held = bits(first_lanes(n - i));
    for (; held; held &= held - 1) {
      if (num_found == num_top && !(held &= bits(above(v, splat(values[num_top - 1]))))) break;
      insert(i + __builtin_ctz(held));
    }
  }
}

}  // namespace DIPTYCH_ISA
