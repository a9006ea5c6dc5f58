#include "norm.h"

#include "api.h"

namespace DIPTYCH_ISA {

template <class T>
static void norm_rows(Team &team, const void *x, int64_t x_stride, const float *weight, void *out, int64_t num_rows,
                      int64_t dim, float eps) {
  team.run([&](int index) {
    rms_norm((const T *)x, x_stride, weight, (T *)out, dim, num_rows, dim, eps, index, team.size);
  });
}

}  // namespace DIPTYCH_ISA

// x: num_rows rows of dim, x_stride elements apart; weight: [dim]; out: [num_rows, dim].
API(rms_norm)(Team *team, int32_t dtype, const void *x, int64_t x_stride, const float *weight, void *out,
              int64_t num_rows, int64_t dim, float eps) {
  using namespace DIPTYCH_ISA;
  auto rows = dtype == kBfloat16 ? norm_rows<bf16> : norm_rows<float>;
  rows(*team, x, x_stride, weight, out, num_rows, dim, eps);
}
