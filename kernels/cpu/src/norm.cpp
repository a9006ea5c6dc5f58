#include "norm.h"

#include "api.h"

namespace DIPTYCH_ISA {

template <class T>
void rms_norm(Team &team, const T *x, int64_t x_stride, const T *weight, T *out, int64_t num_rows, int64_t dim,
              float eps) {
  team.run([&](int index) {
    Span rows = span_of(num_rows, 1, index, team.size);
    for (int64_t row = rows.first; row < rows.last; row++)
      rms_norm_row(x + row * x_stride, weight, out + row * dim, dim, eps);
  });
}

}  // namespace DIPTYCH_ISA

// x: num_rows rows of dim, x_stride elements apart; weight: [dim]; out: [num_rows, dim].
API(rms_norm)(Team *team, int32_t dtype, const void *x, int64_t x_stride, const void *weight, void *out,
              int64_t num_rows, int64_t dim, float eps) {
  using namespace DIPTYCH_ISA;
  if (dtype == kBfloat16)
    rms_norm(*team, (const bf16 *)x, x_stride, (const bf16 *)weight, (bf16 *)out, num_rows, dim, eps);
  else
    rms_norm(*team, (const float *)x, x_stride, (const float *)weight, (float *)out, num_rows, dim, eps);
}
