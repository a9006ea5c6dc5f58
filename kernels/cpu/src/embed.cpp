#include "embed.h"

#include "api.h"

namespace DIPTYCH_ISA {

template <class T>
static void embed_rows(Team &team, const void *table, const int64_t *ids, void *out, int64_t num_rows, int64_t dim) {
  team.run([&](int index) { embed((const T *)table, ids, (T *)out, dim, num_rows, dim, index, team.size); });
}

}  // namespace DIPTYCH_ISA

// table: [vocab, dim]; ids: [num_rows], each in [0, vocab); out: [num_rows, dim].
API(embed)(Team *team, int32_t dtype, const void *table, const int64_t *ids, void *out, int64_t num_rows,
           int64_t dim) {
  using namespace DIPTYCH_ISA;
  auto rows = dtype == kBfloat16 ? embed_rows<bf16> : embed_rows<float>;
  rows(*team, table, ids, out, num_rows, dim);
}
