#include "norm.h"

#include "api.h"

namespace DIPTYCH_ISA {

template <class T>
static void norm_rows(Team &team, const void *x, int64_t x_stride, void *residual, int64_t residual_stride,
                      const float *weight, void *out, int64_t num_rows, int64_t dim, float eps) {
  team.run([&](int index) {
    if (residual)
      add_rms_norm((const T *)x, x_stride, (T *)residual, residual_stride, weight, (T *)out, dim, num_rows,
                   dim, eps, index, team.size);
    else
      rms_norm((const T *)x, x_stride, weight, (T *)out, dim, num_rows, dim, eps, index, team.size);
  });
}

}  // namespace DIPTYCH_ISA

// x, residual: num_rows rows of dim, their stride elements apart; weight: [dim]; out: [num_rows, dim].
// residual null: the norm of x; otherwise residual += x, and its norm.
API(rms_norm)(Team *team, int32_t dtype, const void *x, int64_t x_stride, void *residual, int64_t residual_stride,
              const float *weight, void *out, int64_t num_rows, int64_t dim, float eps) {
  using namespace DIPTYCH_ISA;
  auto rows = dtype == kBfloat16 ? norm_rows<bf16> : norm_rows<float>;
  rows(*team, x, x_stride, residual, residual_stride, weight, out, num_rows, dim, eps);
}
