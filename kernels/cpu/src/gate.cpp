#include "gate.h"

#include "api.h"

namespace DIPTYCH_ISA {

template <class T>
static void gate_rows(Team &team, const void *gate_up, int64_t gate_up_stride, void *out, int64_t num_rows, int64_t dim,
                      Activation activation) {
  team.run([&](int index) {
    gate_mul((const T *)gate_up, gate_up_stride, (T *)out, dim, num_rows, dim, activation, index, team.size);
  });
}

}  // namespace DIPTYCH_ISA

// gate_up: num_rows rows of 2 * dim, gate_up_stride elements apart; out: [num_rows, dim]; activation: an Activation.
API(gate_mul)(Team *team, int32_t dtype, const void *gate_up, int64_t gate_up_stride, void *out, int64_t num_rows,
              int64_t dim, int32_t activation) {
  using namespace DIPTYCH_ISA;
  auto rows = dtype == kBfloat16 ? gate_rows<bf16> : gate_rows<float>;
  rows(*team, gate_up, gate_up_stride, out, num_rows, dim, Activation(activation));
}
