#include "api.h"
#include "step_thread.h"

// Layers [first, last) of the only rank; before the first of all, what `begin` does, and after the last of all the head,
// if rows are sampled. Several ranks: (0, 0), whose residual is to be summed, decoder_half of each, and then
// (num_layers, num_layers).
API(decoder_step)(Team *team, const void *decoder, void *step, int64_t first, int64_t last) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  Step &now = *(Step *)step;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      StepThread<decltype(t)> thread(*team, of, now, index);
      if (first == 0) {
        thread.begin();
        thread.take(0);
      }
      for (int64_t i = first; i < last; i++) {
        thread.attention_half(i);
        thread.mlp_half(i);
        thread.take(i + 1);
      }
      if (last == of.num_layers && now.num_sampled) thread.head();
    });
  });
}

// Half of a layer, 0 attention and 1 MLP, of one of several ranks: its part is in `partial` then, to be summed.
API(decoder_half)(Team *team, const void *decoder, void *step, int64_t layer, int32_t half) {
  using namespace DIPTYCH_ISA;
  const Decoder &of = *(const Decoder *)decoder;
  with_dtype(of.dtype, [&](auto t) {
    team->run([&](int index) {
      StepThread<decltype(t)> thread(*team, of, *(Step *)step, index);
      if (half) thread.mlp_half(layer);
      else thread.attention_half(layer);
    });
  });
}
