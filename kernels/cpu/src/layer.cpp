#include "layer.h"

#include <chrono>
#include <cstring>

#include "api.h"
#include "norm.h"
#include "sparse.h"

namespace DIPTYCH_ISA {

// One thread's way through a step. Every method is called by all threads of the team, in the same order; what one
// leaves behind is there for all only after `done`.
template <class T>
class StepThread {
 public:
  StepThread(Team &team, const Decoder &of, const Step &step, int index)
      : team_(team), of_(of), step_(step), index_(index), began_(now()) {}

  void begin() {
    if (index_ == 0) copy_tables();
    Span rows = span_of(step_.num_rows, 1, index_, team_.size);
    int64_t first = 0;
    for (int64_t s = 0; s < step_.num_seqs; s++) {
      if (index_ == 0) step_.query_starts[s] = int32_t(first);
      int64_t last = first + step_.num_new[s], to_position = step_.context_lens[s] - last;
      for (int64_t row = rows.first > first ? rows.first : first; row < rows.last && row < last; row++)
        place(row, s, row + to_position);
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
    const Layer &layer = of_.layers[number];
    const Attention &kind = of_.attentions[layer.attention];
    Heads heads = kind.heads;
    heads.sinks = layer.sinks;
    int64_t q_size = heads.num_heads * heads.head_dim, row_size = q_size + 2 * heads.num_kv_heads * heads.head_dim;
    T *qkv = (T *)step_.qkv, *attended = (T *)step_.attended;
    Cache cache{layer.cache, of_.block_stride, of_.block_size, heads.num_kv_heads, heads.head_dim};
    HeadNorms norms{layer.q_norm, layer.k_norm, of_.eps, of_.norms_whole_rows};
    Rows x = normed(layer.input_norm, number ? left_by(of_.layers[number - 1].mlp_out_norm) : Left{});
    linear(layer.qkv, x.first, x.stride, step_.num_rows, qkv, row_size, kStore, index_, team_.size);
    done(kQkv);
    rope_kv_write(qkv, row_size, step_.num_rows, heads, norms, kind.rope, step_.positions, step_.slots, cache, index_,
                  team_.size);
    done(kRope);
    const Sequences who = sequences(kind);
    if (who.sparse) {
      choose_blocks((const T *)qkv, row_size, heads, who, cache, (T *)layer.bounds, team_, index_);
      team_.barrier();
    }
    paged_attention((const T *)qkv, row_size, attended, step_.attended_stride, heads, who, cache,
                    step_.scratches[layer.attention], index_, team_.size);
    done(kAttention);
    give(layer.o, attended, step_.attended_stride, left_by(layer.attention_out_norm));
    done(kO);
  }

  void mlp_half(int64_t number) {
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
    const Left left = left_by(of_.layers[of_.num_layers - 1].mlp_out_norm);
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

 private:
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
  const Step &step_;
  const int index_;
  int64_t began_;

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
            step_.context_lens, step_.query_starts,      is_sparse ? &step_.sparse : nullptr};
  }

  T *residual(int64_t row) { return (T *)step_.residual + row * of_.hidden_size; }

  void copy_tables() {
    for (int64_t s = 0; s < step_.num_seqs; s++) {
      int64_t num_blocks = (step_.context_lens[s] + of_.block_size - 1) / of_.block_size;
      std::memcpy(step_.block_tables + s * step_.block_table_width,
                  step_.tables + step_.table_rows[s] * step_.table_width, num_blocks * sizeof(int32_t));
    }
  }

  void place(int64_t row, int64_t seq, int64_t position) {
    int64_t in_block = position % of_.block_size;
    int64_t block = step_.tables[step_.table_rows[seq] * step_.table_width + position / of_.block_size];
    step_.slots[row] = block * of_.block_size + in_block;
    step_.positions[row] = position;
    int64_t token = step_.token_ids[row] - of_.first_token;
    if (token < 0 || token >= of_.head.n)  // another rank has it: the residual is the sum of what all make of it
      std::memset(residual(row), 0, of_.hidden_size * sizeof(T));
    else if (of_.embed)
      std::memcpy(residual(row), (const T *)of_.embed + token * of_.hidden_size, of_.hidden_size * sizeof(T));
    else
      unpack_row(token, residual(row));
    if (of_.embed_scale == 1.0f) return;
    update(residual(row), residual(row), of_.hidden_size, [&](f32x16 x, f32x16) { return x * of_.embed_scale; });
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

// Layers [first, last) of the only rank; before the first of all, what `begin` does, and after the last of all the head,
// if rows are sampled. Several ranks: (0, 0), whose residual is to be summed, decoder_half of each, and then
// (num_layers, num_layers).
API(decoder_step)(Team *team, const void *decoder, const void *step, int64_t first, int64_t last) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  const Step &now = *(const Step *)step;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      StepThread<decltype(t)> thread(*team, of, now, index);
      if (first == 0) thread.begin();
      for (int64_t i = first; i < last; i++) {
        thread.attention_half(i);
        thread.mlp_half(i);
      }
      if (last == of.num_layers && now.num_sampled) thread.head();
    });
  });
}

// Half of a layer, 0 attention and 1 MLP, of one of several ranks: its part is in `partial` then, to be summed.
API(decoder_half)(Team *team, const void *decoder, const void *step, int64_t layer, int32_t half) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      StepThread<decltype(t)> thread(*team, of, *(const Step *)step, index);
      if (half) thread.mlp_half(layer);
      else thread.attention_half(layer);
    });
  });
}
