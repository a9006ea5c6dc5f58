#include "layer.h"

#include <chrono>
#include <cstring>

#include "api.h"
#include "norm.h"

namespace DIPTYCH_ISA {

// One thread's way through a step. Every method is called by all threads of the team, in the same order; what one
// leaves behind is there for all only after `done`.
template <class T>
class Way {
 public:
  Way(Team &team, const Decoder &of, const Step &step, int index)
      : team_(team), of_(of), step_(step), heads_(of.heads), index_(index), began_(now()) {}

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
      plan_attention<T>(heads_, sequences(), step_.limits, step_.scratch, team_.size);
    }
    done(kBegin);
  }

  // `adds`: what the ranks computed of the half before is still to be added to the residual.
  void attention_half(const Layer &layer, bool adds) {
    int64_t q_size = heads_.num_heads * heads_.head_dim, row_size = q_size + 2 * heads_.num_kv_heads * heads_.head_dim;
    T *qkv = (T *)step_.qkv, *attended = (T *)step_.attended;
    Cache cache{layer.cache, of_.block_stride, of_.block_size, heads_.num_kv_heads, heads_.head_dim};
    const T *x = normed((const T *)layer.input_norm, adds);
    linear(layer.qkv, x, step_.normed_stride, step_.num_rows, qkv, row_size, kStore, index_, team_.size);
    done(kQkv);
    rope_kv_write(qkv, row_size, step_.num_rows, heads_, step_.cos_sin, step_.slots, (const T *)layer.q_norm,
                  (const T *)layer.k_norm, of_.eps, cache, index_, team_.size);
    done(kRope);
    paged_attention((const T *)qkv, row_size, attended, step_.attended_stride, heads_, sequences(), cache, step_.scratch, index_,
                    team_.size);
    done(kAttention);
    add_to_residual(layer.o, attended, step_.attended_stride);
    done(kO);
  }

  void mlp_half(const Layer &layer, bool adds) {
    T *inner = (T *)step_.inner;
    const T *x = normed((const T *)layer.post_norm, adds);
    linear(layer.gate_up, x, step_.normed_stride, step_.num_rows, inner, step_.inner_stride, kSiluMul, index_,
           team_.size);
    done(kGateUp);
    add_to_residual(layer.down, inner, step_.inner_stride);
    done(kDown);
  }

  void head() {
    T *x = (T *)step_.normed;
    const int64_t stride = step_.normed_stride;
    Span rows = span_of(step_.num_sampled, 1, index_, team_.size);
    for (int64_t i = rows.first; i < rows.last; i++) {
      int64_t row = step_.sampled[i];
      if (step_.partial) add_partial(row);
      rms_norm_row(residual(row), (const T *)of_.norm, x + i * stride, of_.hidden_size, of_.eps);
    }
    done(kNorms);
    if (step_.picks) {
      best_of_part(of_.head, x, stride, step_.num_sampled, step_.bests + index_ * step_.num_sampled,
                   step_.few_logits + index_ * kGreedyScratch, index_, team_.size);
      team_.barrier();
      if (index_ == 0) best_of_all(step_.bests, step_.num_sampled, team_.size, step_.ids);
    } else {
      linear(of_.head, x, stride, step_.num_sampled, step_.logits, of_.head.n, kStore, index_, team_.size);
    }
    done(kHead);
  }

 private:
  Team &team_;
  const Decoder &of_;
  const Step &step_;
  const Heads &heads_;
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

  Sequences sequences() const {
    return {step_.num_seqs, step_.block_table_width, step_.block_tables, step_.context_lens, step_.query_starts};
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
    int64_t dim = heads_.head_dim, in_block = position % of_.block_size;
    int64_t block = step_.tables[step_.table_rows[seq] * step_.table_width + position / of_.block_size];
    step_.slots[row] = block * of_.block_size + in_block;
    std::memcpy(step_.cos_sin + row * dim, of_.rope + position * dim, dim * sizeof(float));
    if (!of_.embed && !of_.head.weight) return;
    int64_t token = step_.token_ids[row];
    if (of_.embed)
      std::memcpy(residual(row), (const T *)of_.embed + token * of_.hidden_size, of_.hidden_size * sizeof(T));
    else
      unpack_row(token, residual(row));
  }

  // Row `token` of the head, which is the embedding too.
  void unpack_row(int64_t token, T *to) {
    constexpr int64_t step = 4 / sizeof(T);
    int64_t padded = (of_.head.k + step - 1) / step * step;
    const T *from = (const T *)of_.head.weight + token / kPanel * kPanel * padded + token % kPanel * step;
    for (int64_t i = 0; i < of_.hidden_size; i += step)
      for (int64_t j = i; j < i + step && j < of_.hidden_size; j++) to[j] = from[i * kPanel + j - i];
  }

  // The sum of all ranks' parts; rounded once.
  void add_partial(int64_t row) {
    T *to = residual(row);
    const float *from = step_.partial + row * of_.hidden_size;
    for (int64_t i = 0; i < of_.hidden_size; i++) narrow(to + i, widen(to[i]) + from[i]);
  }

  void add_to_residual(const Linear &by, const T *x, int64_t x_stride) {
    if (step_.partial)
      linear(by, x, x_stride, step_.num_rows, step_.partial, of_.hidden_size, kStore, index_, team_.size);
    else
      linear(by, x, x_stride, step_.num_rows, residual(0), of_.hidden_size, kAdd, index_, team_.size);
  }

  // The residual's norm, all rows of it.
  const T *normed(const T *weight, bool adds) {
    T *out = (T *)step_.normed;
    bool is_shared = step_.num_rows > kFewRows || step_.partial;
    Span rows{0, step_.num_rows};
    if (is_shared) rows = span_of(step_.num_rows, 1, index_, team_.size);
    else out += index_ * kFewRows * step_.normed_stride;
    for (int64_t row = rows.first; row < rows.last; row++) {
      if (adds) add_partial(row);
      rms_norm_row(residual(row), weight, out + row * step_.normed_stride, of_.hidden_size, of_.eps);
    }
    if (is_shared) done(kNorms);
    return out;
  }
};

template <class Work>
void with_dtype(int32_t dtype, Work &&work) {
  if (dtype == kBfloat16) work(bf16{});
  else work(float{});
}

}  // namespace DIPTYCH_ISA

// Layers [first, last) of the only rank; before the first of all, what `begin` does, and after the last of all the head,
// if rows are sampled. Several ranks: (0, 0) and (num_layers, num_layers), and decoder_half between them.
API(decoder_step)(Team *team, const void *decoder, const void *step, int64_t first, int64_t last) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  const Step &now = *(const Step *)step;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      Way<decltype(t)> way(*team, of, now, index);
      if (first == 0) way.begin();
      for (int64_t i = first; i < last; i++) {
        way.attention_half(of.layers[i], false);
        way.mlp_half(of.layers[i], false);
      }
      if (last == of.num_layers && now.num_sampled) way.head();
    });
  });
}

// Half of a layer, 0 attention and 1 MLP, of one of several ranks: its part is in `partial` then, to be summed.
API(decoder_half)(Team *team, const void *decoder, const void *step, int64_t layer, int32_t half) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      Way<decltype(t)> way(*team, of, *(const Step *)step, index);
      if (half) way.mlp_half(of.layers[layer], true);
      else way.attention_half(of.layers[layer], layer > 0);
    });
  });
}
