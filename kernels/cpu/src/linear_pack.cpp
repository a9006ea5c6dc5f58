// Packs weights for linear.h.
#include <algorithm>

#include "api.h"
#include "linear.h"
#include "linear_tile.h"

namespace DIPTYCH_ISA {

// Rows that lie below one another in the whole weight. Mirrored by linear.py.
struct Part {
  const void *rows;
  int64_t num_rows, stride;  // elements from row to row
};

namespace {

// Where row `n` of the whole weight is; null beyond it.
template <class T>
const T *row_of(const Part *parts, int64_t num_parts, int64_t n) {
  for (int64_t i = 0; i < num_parts; n -= parts[i++].num_rows)
    if (n < parts[i].num_rows) return (const T *)parts[i].rows + n * parts[i].stride;
  return nullptr;
}

// The row that lane `lane` of a panel holds; `num_rows` where it holds none.
int64_t packed_row(int64_t num_rows, bool is_gated, int64_t panel, int64_t lane) {
  if (!is_gated) return std::min(panel * kPanel + lane, num_rows);
  int64_t half = num_rows / 2, i = panel * (kPanel / 2) + lane % (kPanel / 2);
  return i < half ? i + lane / (kPanel / 2) * half : num_rows;
}

// rows: kPanel of them, null: zeros. out: one panel.
template <class T>
void pack_panel(const T *const *rows, int64_t k, T *out) {
  constexpr int kStep = Dot<T>::kStep;
  constexpr int64_t kRun = 64;  // inputs at a time: whole cache lines are read and written
  for (int64_t first = 0; first < k; first += kRun) {
    const int64_t last = std::min(first + kRun, (k + kStep - 1) / kStep * kStep);
    for (int lane = 0; lane < kPanel; lane++)
      for (int64_t i = first; i < last; i++)
        out[i / kStep * kStep * kPanel + lane * kStep + i % kStep] = rows[lane] && i < k ? rows[lane][i] : T{};
  }
}

}  // namespace

template <class T>
void pack(const Part *parts, int64_t num_parts, int64_t n, int64_t k, bool is_gated, T *out, int index, int size) {
  constexpr int kStep = Dot<T>::kStep;
  const Span panels = span_of((n + kPanel - 1) / kPanel, 1, index, size);
  for (int64_t panel = panels.first; panel < panels.last; panel++) {
    const T *rows[kPanel];
    for (int64_t lane = 0; lane < kPanel; lane++)
      rows[lane] = row_of<T>(parts, num_parts, packed_row(n, is_gated, panel, lane));
    pack_panel(rows, k, out + panel * ((k + kStep - 1) / kStep * kStep * kPanel));
  }
}

}  // namespace DIPTYCH_ISA

// parts: together n rows of k elements of `dtype`; out: the panels.
API(pack_linear)(Team *team, int32_t dtype, const void *parts, int64_t num_parts, int64_t n, int64_t k,
                 int32_t is_gated, void *out) {
  using namespace DIPTYCH_ISA;
  team->run([&](int index) {
    const Part *from = (const Part *)parts;
    if (dtype == kFloat32) pack(from, num_parts, n, k, is_gated, (float *)out, index, team->size);
    else pack(from, num_parts, n, k, is_gated, (bf16 *)out, index, team->size);
  });
}
