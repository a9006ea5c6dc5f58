#include "head.h"

#include <cmath>

#include "api.h"
#include "step_thread.h"

namespace DIPTYCH_ISA {

namespace {

void add(Tally &to, float logit, float mass, int64_t id) {
  if (logit > to.logit) {
    to.mass *= std::exp(to.logit - logit);
    to.logit = logit;
    to.id = id;
  } else {
    mass *= std::exp(logit - to.logit);
  }
  to.mass += mass;
}

float mass_of(const float *logits, int64_t n, float best) {
  f32x16 total{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) total += exp(load(logits + i) - best);
  if (i < n) total += exp(load_or_least(logits + i, n - i) - best);
  return sum(total);
}

// What `best_of_part` finds, and the mass of all; not capped.
template <class T>
void tally_part(const Linear &head, const T *x, int64_t x_stride, int64_t num_rows, Tally *tallies, float *scratch,
                int index, int size) {
  const Span span = span_of((head.n + kPanel - 1) / kPanel, kGreedyPanels, index, size);
  for (int64_t row = 0; row < num_rows; row++) tallies[row] = {-INFINITY, 0.0f, 0};
  for (int64_t start = 0; start < num_rows; start += kGreedyRows) {
    const int64_t rows = num_rows - start < kGreedyRows ? num_rows - start : kGreedyRows;
    for (int64_t panel = span.first; panel < span.last; panel += kGreedyPanels) {
      const Linear some = panels_of<T>(head, panel, kGreedyPanels);
      linear(some, x + start * x_stride, x_stride, rows, scratch, some.n, kStore, 0, 1);
      for (int64_t row = 0; row < rows; row++) {
        const float *logits = scratch + row * some.n, best = largest_of(logits, some.n);
        if (best > -INFINITY)  // else none is a number
          add(tallies[start + row], best, mass_of(logits, some.n, best), panel * kPanel + argmax_of(logits, some.n));
      }
    }
  }
}

// One thread's way through the passes.
template <class T>
class HeadThread : StepThread<T> {
 public:
  // step: this thread's own, of which each pass changes the numbers of rows and sequences.
  HeadThread(Team &team, const Head &head, const Passes &passes, Step &step, int index)
      : StepThread<T>(team, *head.layers, step, index), head_(head), passes_(passes), now_(step) {}

  void run() {
    if (passes_.aux) take_in((const T *)passes_.aux);
    if (!passes_.num_passes) return store();
    for (int64_t i = 0; i < passes_.num_passes; i++) {
      if (i) now_.num_rows = now_.num_seqs = passes_.num_active[i];
      enter();
      for (int64_t layer = 0; layer < of_.num_layers; layer++) {
        project(layer, input_of(layer));
        this->attend(layer);
        this->mlp_half(layer);
      }
      leave();
      if (!passes_.ids) return logits();
      choose(i);
    }
  }

 private:
  using Base = StepThread<T>;
  using Rows = typename Base::Rows;
  using Base::index_, Base::of_, Base::project, Base::residual, Base::team_;

  const Head &head_;
  const Passes &passes_;
  Step &now_;
  const int64_t size_ = of_.hidden_size;

  T *hidden(int64_t row) { return (T *)passes_.hidden + row * size_; }

  // The hidden states of the first pass, of what the target left.
  void take_in(const T *aux) {
    if (head_.fc.weight) {
      linear(head_.fc, aux, head_.fc.k, now_.num_rows, hidden(0), size_, kStore, index_, team_.size);
      return team_.barrier();
    }
    const Span rows = span_of(now_.num_rows, 1, index_, team_.size);  // which this thread enters, too
    std::memcpy(hidden(rows.first), aux + rows.first * size_, (rows.last - rows.first) * size_ * sizeof(T));
  }

  void look_up(int64_t token, T *to) {
    if (of_.embed) std::memcpy(to, (const T *)of_.embed + token * size_, size_ * sizeof(T));
    else Base::unpack_row(token, to);
  }

  // Entries: an embedding and a hidden state each, side by side.
  void enter() {
    Base::begin_with([&](int64_t row) {
      T *out = (T *)passes_.wide + row * passes_.wide_stride, *own = out + size_;
      const T *from = hidden(row);
      look_up(now_.token_ids[row], out);
      rms_norm_row(out, head_.embed_norm, out, size_, of_.eps);
      rms_norm_row(from, head_.hidden_norm, own, size_, of_.eps);
      if (!head_.joined.weight) std::memcpy(residual(row), head_.norms_residual ? own : from, size_ * sizeof(T));
    });
    if (!head_.joined.weight) return;
    const Rows wide = entries();
    linear(head_.joined, wide.first, wide.stride, now_.num_rows, residual(0), size_, kStore, index_, team_.size);
    team_.barrier();
  }

  Rows entries() const { return {(const T *)passes_.wide, passes_.wide_stride}; }

  Rows input_of(int64_t layer) {
    if (!layer && !head_.joined.weight) return entries();
    return Base::normed(of_.layers[layer].input_norm, Base::left_before(layer));
  }

  // KV of the entries alone: of the last layer nothing else is computed.
  void store() {
    enter();
    for (int64_t layer = 0; layer < of_.num_layers; layer++) {
      project(layer, input_of(layer));
      if (layer + 1 == of_.num_layers) return;
      this->attend(layer);
      this->mlp_half(layer);
    }
  }

  // Of each sequence's last entry: what is fed back, and what its logits are made of.
  void leave() {
    const auto left = Base::left_before(of_.num_layers);
    Span seqs = span_of(now_.num_seqs, 1, index_, team_.size);
    for (int64_t s = seqs.first; s < seqs.last; s++) {
      const int64_t row = now_.query_starts[s + 1] - 1;
      T *x = (T *)now_.normed + s * now_.normed_stride;
      if (left.is_any) Base::add_partial(row, left.norm);
      rms_norm_row(residual(row), of_.norm, x, size_, of_.eps);
      std::memcpy(hidden(s), head_.norms_output ? x : residual(row), size_ * sizeof(T));
    }
    team_.barrier();
  }

  void logits() {
    linear(of_.head, (const T *)now_.normed, now_.normed_stride, now_.num_seqs, now_.logits, of_.head.n, kStore, index_,
           team_.size);
  }

  // The likeliest token of each sequence, which the next pass makes an entry of.
  void choose(int64_t pass) {
    const int64_t num = now_.num_seqs, most = passes_.num_active[0];
    tally_part(of_.head, (const T *)now_.normed, now_.normed_stride, num, passes_.tallies + index_ * num,
               now_.few_logits + index_ * kGreedyScratch, index_, team_.size);
    team_.barrier();
    if (index_ == 0) {
      for (int64_t s = 0; s < num; s++) {
        Tally &best = passes_.tallies[s];
        for (int i = 1; i < team_.size; i++) {
          const Tally &other = passes_.tallies[i * num + s];
          if (other.logit > -INFINITY) add(best, other.logit, other.mass, other.id);
        }
        const int64_t id = head_.to_target ? head_.to_target[best.id] : best.id;
        passes_.ids[pass * most + s] = passes_.token_ids[s] = id;
        passes_.chances[pass * most + s] = best.mass >= 1.0f ? 1.0f / best.mass : 0.0f;  // not a number: 0
        passes_.num_new[s] = 1;
        passes_.context_lens[s]++;
      }
    }
    team_.barrier();
  }
};

}  // namespace

}  // namespace DIPTYCH_ISA

API(head_passes)(Team *team, const void *head, const void *passes) {
  using namespace DIPTYCH_ISA;
  const Head &of = *(const Head *)head;
  const Passes &wanted = *(const Passes *)passes;
  with_dtype(of.layers->dtype, [&](auto t) {
    team->run([&](int index) {
      Step step = *wanted.step;
      HeadThread<decltype(t)>(*team, of, wanted, step, index).run();
    });
  });
}
