// One thread's way through a step of a decoder, and of what has layers like a decoder's.
#pragma once

#include <chrono>
#include <cstring>

#include "kivi.h"
#include "layer.h"
#include "norm.h"
#include "sparse.h"
#include "team.h"

namespace DIPTYCH_ISA {

// One thread's way through a step. Every method is called by all threads of the team, in the same order; what one
// leaves behind is there for all only after `done`.
template <class T>
class StepThread {
 public:
  StepThread(Team &team, const Decoder &of, Step &step, int index)
      : team_(team), of_(of), step_(step), index_(index), began_(now()) {}

  void begin() {
    begin_with([&](int64_t row) { embed_row(step_.token_ids[row] - of_.first_token, residual(row)); });
  }

  // enter(row): called for each of this thread's rows, makes what the layers read of it.
  template <class Enter>
  void begin_with(Enter &&enter) {
    if (index_ == 0) {
      copy_tables();
      if (has_tail()) find_filled();
    }
    Span rows = span_of(step_.num_rows, 1, index_, team_.size);
    const int32_t *tails = step_.tails;
    int64_t first = 0;
    for (int64_t s = 0; s < step_.num_seqs; s++) {
      if (index_ == 0) step_.query_starts[s] = int32_t(first);
      int64_t last = first + step_.num_new[s], to_position = step_.context_lens[s] - last;
      const int32_t *blocks = has_tail() ? tails - (first + to_position) / kKiviSlots : table_of(s);
      for (int64_t row = rows.first > first ? rows.first : first; row < rows.last && row < last; row++) {
        place(row, blocks, row + to_position);
        enter(row);
      }
      if (has_tail()) tails += num_tails(s);
      first = last;
    }
    if (index_ == 0) {
      step_.query_starts[step_.num_seqs] = int32_t(first);
      for (int64_t i = 0; i < of_.num_attentions; i++)
        plan_attention<T>(of_.attentions[i].heads, sequences(of_.attentions[i]), step_.limits, step_.scratches[i],
                          team_.size);
    }
    done(kBegin);
  }

  void attention_half(int64_t number) {
    project(number, normed(of_.layers[number].input_norm, left_before(number)));
    if (number + 1 == of_.num_layers && is_read_in_part()) keep_sampled(number);
    if (step_.num_rows) attend(number);
  }

  void mlp_half(int64_t number) {
    if (!step_.num_rows) return;
    const Layer &layer = of_.layers[number];
    T *inner = (T *)step_.inner;
    Rows x = normed(layer.mlp_norm, left_by(layer.attention_out_norm));
    if (layer.mixture) return mixture(*layer.mixture, x, left_by(layer.mlp_out_norm));
    linear(layer.gate_up, x.first, x.stride, step_.num_rows, inner, step_.inner_stride, EpilogueKind(layer.gate), index_,
           team_.size);
    done(kGateUp);
    give(layer.down, inner, step_.inner_stride, left_by(layer.mlp_out_norm));
    done(kDown);
  }

  void head() {
    T *x = (T *)step_.normed;
    const int64_t stride = step_.normed_stride;
    const Left left = left_before(of_.num_layers);
    Span rows = span_of(step_.num_sampled, 1, index_, team_.size);
    for (int64_t i = rows.first; i < rows.last; i++) {
      int64_t row = step_.sampled[i];
      if (left.is_any) add_partial(row, left.norm);
      rms_norm_row(residual(row), of_.norm, x + i * stride, of_.hidden_size, of_.eps);
    }
    done(kNorms);
    if (step_.picks) {
      best_of_part(of_.head, x, stride, step_.num_sampled, step_.bests + index_ * step_.num_sampled,
                   step_.few_logits + index_ * kGreedyScratch, of_.logit_softcap, {step_.masks}, index_,
                   team_.size);
      team_.barrier();
      if (index_ == 0) best_of_all(step_.bests, step_.num_sampled, team_.size, step_.ids);
    } else {
      linear(of_.head, x, stride, step_.num_sampled, step_.logits, of_.head.n, kStore, index_, team_.size);
      if (of_.logit_softcap != 0.0f) {
        team_.barrier();
        cap_softly(step_.logits, step_.num_sampled * of_.head.n, of_.logit_softcap, index_, team_.size);
      }
    }
    done(kHead);
  }

  // What a draft head is given of all rows after so many layers, of which none leaves anything to be added.
  void take(int64_t num_layers) {
    const Taken &to = step_.taken;
    if (!to.rows || to.columns[num_layers] < 0) return;
    const float *norm = num_layers == of_.num_layers ? to.norm : nullptr;
    Span rows = span_of(step_.num_rows, 1, index_, team_.size);
    for (int64_t row = rows.first; row < rows.last; row++) {
      T *out = (T *)to.rows + row * to.stride + to.columns[num_layers];
      if (norm) rms_norm_row(residual(row), norm, out, of_.hidden_size, of_.eps);
      else std::memcpy(out, residual(row), of_.hidden_size * sizeof(T));
    }
  }

 protected:
  // Of T; `stride` elements from row to row.
  struct Rows {
    const T *first;
    int64_t stride;
  };

  // What the half before left in `partial`, to be normed and added to the residual by whoever reads that next.
  struct Left {
    bool is_any;
    const float *norm;  // or null
  };

  Team &team_;
  const Decoder &of_;
  Step &step_;
  const int index_;
  int64_t began_;

  // The layer's queries, keys and values of all rows, of `x`; keys and values go to the cache.
  void project(int64_t number, Rows x) {
    const Layer &layer = of_.layers[number];
    const Attention &kind = of_.attentions[layer.attention];
    const Heads &heads = kind.heads;
    HeadNorms norms{layer.q_norm, layer.k_norm, of_.eps, of_.norms_whole_rows};
    linear(layer.qkv, x.first, x.stride, step_.num_rows, (T *)step_.qkv, qkv_size(heads), kStore, index_, team_.size);
    done(kQkv);
    const Cache tail = tail_of(layer, heads), cache = cache_of(layer, heads, tail);
    rope_kv_write((T *)step_.qkv, qkv_size(heads), step_.num_rows, heads, norms, kind.rope, step_.positions,
                  step_.slots, has_tail() ? tail : cache, index_, team_.size);
    done(kRope);
    if (!has_tail() || !*step_.num_filled) return;
    round_blocks<T>(cache, step_.filled, *step_.num_filled, index_, team_.size);
    done(kRope);
  }

  // What attention reads of a tail, or in part, it finds by the step's own sequences.
  bool is_read_in_part() const {
    const int64_t num = step_.num_kept;
    return num >= 0 && num < step_.num_rows && num <= step_.num_seqs && !has_tail() && !step_.sparse.num_seqs;
  }

  // Leaves the sampled rows of a step whose KV the last layer has stored: nobody reads what it makes of others.
  void keep_sampled(int64_t number) {
    const Layer &layer = of_.layers[number];
    const Heads &heads = of_.attentions[layer.attention].heads;
    move_sampled((T *)step_.qkv, qkv_size(heads), heads.num_heads * heads.head_dim);
    move_sampled(residual(0), of_.hidden_size, of_.hidden_size);
    team_.barrier();
    if (index_ == 0) {
      make_sequences_of_sampled();
      plan_attention<T>(heads, sequences(of_.attentions[layer.attention]), step_.limits,
                        step_.scratches[layer.attention], team_.size);
    }
    done(kRope);
  }

  // Each to its place among them: of every row this thread's columns.
  void move_sampled(T *rows, int64_t stride, int64_t size) {
    const Span columns = span_of(size, 64 / sizeof(T), index_, team_.size);
    for (int64_t i = 0; i < step_.num_kept; i++)
      std::memmove(rows + i * stride + columns.first, rows + step_.sampled[i] * stride + columns.first,
                   (columns.last - columns.first) * sizeof(T));
  }

  void make_sequences_of_sampled() {
    const int64_t num = step_.num_kept;
    for (int64_t i = 0, seq = 0, end = step_.num_new[0]; i < num; i++) {
      while (step_.sampled[i] >= end) end += step_.num_new[++seq];
      step_.context_lens[i] = int32_t(step_.positions[step_.sampled[i]] + 1);
      copy_table(seq, i);
      step_.query_starts[i] = int32_t(i);
      step_.sampled[i] = i;
    }
    step_.query_starts[num] = int32_t(num);
    step_.num_rows = step_.num_seqs = step_.expert_rows.num_rows = num;
    step_.num_kept = -1;
  }

  // The rest of a layer's attention.
  void attend(int64_t number) {
    const Layer &layer = of_.layers[number];
    const Attention &kind = of_.attentions[layer.attention];
    Heads heads = kind.heads;
    heads.sinks = layer.sinks;
    T *qkv = (T *)step_.qkv, *attended = (T *)step_.attended;
    const Cache tail = tail_of(layer, heads), cache = cache_of(layer, heads, tail);
    const Sequences who = sequences(kind);
    if (who.sparse) {
      choose_blocks((const T *)qkv, qkv_size(heads), heads, who, cache, (T *)layer.bounds, team_, index_);
      team_.barrier();
    }
    paged_attention((const T *)qkv, qkv_size(heads), attended, step_.attended_stride, heads, who, cache,
                    step_.scratches[layer.attention], index_, team_.size);
    done(kAttention);
    give(layer.o, attended, step_.attended_stride, left_by(layer.attention_out_norm));
    done(kO);
  }

  static int64_t qkv_size(const Heads &heads) { return (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim; }

  bool has_tail() const { return of_.kv_format == kKVKivi; }

  // tail: of the same layer; what is returned may point to it.
  Cache cache_of(const Layer &layer, const Heads &heads, const Cache &tail) const {
    return {layer.cache,    of_.block_stride, of_.block_size,           heads.num_kv_heads,
            heads.head_dim, of_.kv_format,    has_tail() ? &tail : nullptr};
  }

  Cache tail_of(const Layer &layer, const Heads &heads) const {
    return {layer.tail, of_.tail_stride, kKiviSlots, heads.num_kv_heads, heads.head_dim, kKVAsComputed, nullptr};
  }

  // What the layers before `number` left.
  Left left_before(int64_t number) const {
    return number ? left_by(of_.layers[number - 1].mlp_out_norm) : Left{};
  }

  int64_t now() const {
    if (!step_.nanoseconds || index_) return 0;
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }

  // All threads are here.
  void done(Part part) {
    team_.barrier();
    if (!step_.nanoseconds || index_) return;
    int64_t ended = now();
    step_.nanoseconds[part] += ended - began_;
    began_ = ended;
  }

  Sequences sequences(const Attention &kind) const {
    const bool is_sparse = kind.is_sparse && step_.sparse.num_seqs;
    return {step_.num_seqs,     step_.block_table_width, step_.block_tables,
            step_.context_lens, step_.query_starts,      is_sparse ? &step_.sparse : nullptr,
            has_tail() ? step_.tails : nullptr, step_.tail_starts};
  }

  T *residual(int64_t row) { return (T *)step_.residual + row * of_.hidden_size; }

  void copy_tables() {
    for (int64_t s = 0; s < step_.num_seqs; s++) copy_table(s, s);
  }

  // seq: of the caller's tables. to: of the step's, whose context tells how many blocks.
  void copy_table(int64_t seq, int64_t to) {
    const int64_t num_blocks = (step_.context_lens[to] + of_.block_size - 1) / of_.block_size;
    std::memcpy(step_.block_tables + to * step_.block_table_width, table_of(seq), num_blocks * sizeof(int32_t));
  }

  const int32_t *table_of(int64_t seq) const { return step_.tables + step_.table_rows[seq] * step_.table_width; }

  // Blocks that the sequence's new tokens are in: the first, and their number.
  int64_t first_own(int64_t seq) const { return (step_.context_lens[seq] - step_.num_new[seq]) / kKiviSlots; }
  int64_t num_tails(int64_t seq) const { return (step_.context_lens[seq] - 1) / kKiviSlots + 1 - first_own(seq); }

  void find_filled() {
    int64_t num = 0, place = 0;
    for (int64_t s = 0; s < step_.num_seqs; s++) {
      step_.tail_starts[s] = int32_t(place);
      for (int64_t block = first_own(s); (block + 1) * kKiviSlots <= step_.context_lens[s]; block++, num++) {
        step_.filled[2 * num] = step_.tails[place + block - first_own(s)];
        step_.filled[2 * num + 1] = table_of(s)[block];
      }
      place += num_tails(s);
    }
    *step_.num_filled = num;
  }

  // blocks: by their place in the sequence.
  void place(int64_t row, const int32_t *blocks, int64_t position) {
    step_.slots[row] = int64_t(blocks[position / of_.block_size]) * of_.block_size + position % of_.block_size;
    step_.positions[row] = position;
  }

  // token: of the part of the vocabulary that is here.
  void embed_row(int64_t token, T *to) {
    if (token < 0 || token >= of_.head.n)  // another rank has it: the residual is the sum of what all make of it
      std::memset(to, 0, of_.hidden_size * sizeof(T));
    else if (of_.embed)
      std::memcpy(to, (const T *)of_.embed + token * of_.hidden_size, of_.hidden_size * sizeof(T));
    else
      unpack_row(token, to);
    if (of_.embed_scale == 1.0f) return;
    update(to, to, of_.hidden_size, [&](f32x16 x, f32x16) { return x * of_.embed_scale; });
  }

  // Row `token` of the head, which is the embedding too.
  void unpack_row(int64_t token, T *to) {
    constexpr int64_t step = 4 / sizeof(T);
    int64_t padded = (of_.head.k + step - 1) / step * step;
    const T *from = (const T *)of_.head.weight + token / kPanel * kPanel * padded + token % kPanel * step;
    for (int64_t i = 0; i < of_.hidden_size; i += step)
      for (int64_t j = i; j < i + step && j < of_.hidden_size; j++) to[j] = from[i * kPanel + j - i];
  }

  Left left_by(const float *after) const { return {of_.is_split || after, after}; }

  // Rounded once.
  void add_partial(int64_t row, const float *norm) {
    T *to = residual(row);
    float *from = step_.partial + row * of_.hidden_size;
    if (norm) rms_norm_row(from, norm, from, of_.hidden_size, of_.eps);
    update(to, from, of_.hidden_size, [](f32x16 x, f32x16 added) { return x + added; });
  }

  // What a half computed goes to the residual, or is left.
  void give(const Linear &by, const T *x, int64_t x_stride, Left left) {
    if (left.is_any)
      linear(by, x, x_stride, step_.num_rows, step_.partial, of_.hidden_size, kStore, index_, team_.size);
    else
      linear(by, x, x_stride, step_.num_rows, residual(0), of_.hidden_size, kAdd, index_, team_.size);
  }

  void mixture(const Mixture &of, Rows x, Left left) {
    const ExpertRows &to = step_.expert_rows;
    linear(of.router, x.first, x.stride, to.num_rows, step_.router_logits, of.router.n, kStore, index_, team_.size);
    team_.barrier();
    route_rows(of.routing, step_.router_logits, of.router.n, to.num_rows, to.weights, to.ids, index_, team_.size);
    team_.barrier();
    if (index_ == 0) {
      count_tokens(of, to);
      sort_by_expert(of.experts, to);
    }
    done(kRouter);
    expert_inner(of.experts, to, x.first, x.stride, index_, team_.size);
    done(kGateUp);
    expert_outputs<T>(of.experts, to, index_, team_.size);
    team_.barrier();
    if (left.is_any)
      sum_of_experts<T>(of.experts, to, step_.partial, of_.hidden_size, false, index_, team_.size);
    else
      sum_of_experts<T>(of.experts, to, residual(0), of_.hidden_size, true, index_, team_.size);
    done(kDown);
  }

  // The residual's norm, or the residual itself without `weight`: all rows of it.
  Rows normed(const float *weight, Left left) {
    T *out = (T *)step_.normed;
    const bool is_shared = step_.num_rows > kFewRows || left.is_any;
    Span rows{0, step_.num_rows};
    if (is_shared) rows = span_of(step_.num_rows, 1, index_, team_.size);
    else out += index_ * kFewRows * step_.normed_stride;
    for (int64_t row = rows.first; row < rows.last; row++) {
      if (left.is_any) add_partial(row, left.norm);
      if (weight) rms_norm_row(residual(row), weight, out + row * step_.normed_stride, of_.hidden_size, of_.eps);
    }
    if (is_shared) done(kNorms);
    return weight ? Rows{out, step_.normed_stride} : Rows{residual(0), of_.hidden_size};
  }
};

template <class Work>
void with_dtype(int32_t dtype, Work &&work) {
  if (dtype == kBfloat16) work(bf16{});
  else work(float{});
}

}  // namespace DIPTYCH_ISA
