#include "experts.h"

#include <cstring>

#include "api.h"

namespace DIPTYCH_ISA {

namespace {

constexpr int64_t kFreeRows = 16;     // so many are multiplied in the time that reading the weights takes
constexpr int64_t kSumColumns = 256;  // of a row, summed by one thread

int64_t cost_of(int64_t num_rows) { return num_rows == 0 ? 0 : num_rows < kFreeRows ? kFreeRows : num_rows; }

int64_t rounded_up(int64_t of, int64_t by) { return (of + by - 1) / by; }

// Calls work(expert, its places, panels) for all that thread `index` does of a product in which every expert has as many
// panels.
template <class Work>
void share_panels(const Experts &of, const ExpertRows &to, int64_t num_panels, int index, int size, Work &&work) {
  int64_t total = 0;
  for (int64_t e = 0; e < of.count; e++) total += cost_of(to.starts[e + 1] - to.starts[e]) * num_panels;
  int64_t first = total * index / size, last = total * (index + 1) / size;  // counted from expert e on
  for (int64_t e = 0; e < of.count && last > 0; e++) {
    const int64_t cost = cost_of(to.starts[e + 1] - to.starts[e]);
    if (cost == 0) continue;
    const int64_t begin = first > 0 ? rounded_up(first, cost) : 0, end = rounded_up(last, cost);
    const Span panels{begin, end < num_panels ? end : num_panels};
    if (panels.first < panels.last) work(e, Span{to.starts[e], to.starts[e + 1]}, panels);
    first -= cost * num_panels;
    last -= cost * num_panels;
  }
}

// The rows at `places` one below another: where they are, or a copy. stride: of what is returned.
template <class T>
const T *gather(const Experts &of, const ExpertRows &from, Span places, const T *x, int64_t x_stride, T *copy) {
  if (places.last - places.first == 1) return x + from.rows[places.first] * x_stride;
  for (int64_t i = 0; i < places.last - places.first; i++)
    std::memcpy(copy + i * from.gathered_stride, x + from.rows[places.first + i] * x_stride, of.hidden_size * sizeof(T));
  return copy;
}

}  // namespace

void count_tokens(const Mixture &of, const ExpertRows &rows) {
  if (!of.expert_tokens) return;
  for (int64_t pair = 0; pair < rows.num_rows * of.experts.top_k; pair++) of.expert_tokens[rows.ids[pair]]++;
}

void sort_by_expert(const Experts &of, const ExpertRows &to) {
  const int64_t num_pairs = to.num_rows * of.top_k;
  int32_t *const next = to.starts + 1;  // of each expert the next place: in the end where it ends
  std::memset(to.starts, 0, (of.count + 2) * sizeof(int32_t));
  auto index_of = [&](int64_t pair) -> int64_t {
    const int64_t e = to.ids[pair] - of.first;
    return 0 <= e && e < of.count ? e : -1;
  };
  for (int64_t pair = 0; pair < num_pairs; pair++)
    if (const int64_t e = index_of(pair); e >= 0) next[e + 1]++;
  for (int64_t e = 0; e < of.count; e++) next[e + 1] += next[e];
  for (int64_t pair = 0; pair < num_pairs; pair++) {
    const int64_t e = index_of(pair);
    to.places[pair] = e < 0 ? -1 : next[e]++;
    if (e >= 0) to.rows[to.places[pair]] = int32_t(pair / of.top_k);
  }
}

template <class T>
void expert_inner(const Experts &of, const ExpertRows &to, const T *x, int64_t x_stride, int index, int size) {
  const Epilogue epilogue(EpilogueKind(of.gate), of.alpha, of.limit);
  T *copy = (T *)to.gathered + index * kMostRowsAtOnce * to.gathered_stride;
  share_panels(of, to, num_panels(of.gate_up[0]), index, size, [&](int64_t e, Span places, Span panels) {
    const Linear &weights = of.gate_up[e];
    const int64_t count = places.last - places.first, num_blocks = rounded_up(count, rows_at_once<T>(weights));
    for (int64_t block = 0; block < num_blocks; block++) {
      const Span some{places.first + count * block / num_blocks, places.first + count * (block + 1) / num_blocks};
      linear_panels(weights, gather(of, to, some, x, x_stride, copy), to.gathered_stride, some.last - some.first,
                    (T *)to.inner + some.first * to.inner_stride, to.inner_stride, epilogue, panels);
    }
  });
}

template <class T>
void expert_outputs(const Experts &of, const ExpertRows &to, int index, int size) {
  share_panels(of, to, num_panels(of.down[0]), index, size, [&](int64_t e, Span places, Span panels) {
    linear_panels(of.down[e], (const T *)to.inner + places.first * to.inner_stride, to.inner_stride,
                  places.last - places.first, (T *)to.outputs + places.first * of.hidden_size, of.hidden_size, kStore,
                  panels);
  });
}

template <class T, class Out>
void sum_of_experts(const Experts &of, const ExpertRows &to, Out *out, int64_t out_stride, bool adds, int index, int size) {
  const int64_t parts = rounded_up(of.hidden_size, kSumColumns);
  const Span cells = span_of(to.num_rows * parts, 1, index, size);
  for (int64_t cell = cells.first; cell < cells.last; cell++) {
    const int64_t row = cell / parts, first = cell % parts * kSumColumns;
    const int64_t last = first + kSumColumns < of.hidden_size ? first + kSumColumns : of.hidden_size;
    const int32_t *places = to.places + row * of.top_k;
    const float *weights = to.weights + row * of.top_k;
    for (int64_t i = first; i < last; i += kLanes) {
      const int64_t count = last - i;
      f32x16 total{};
      for (int64_t j = 0; j < of.top_k; j++) {
        if (places[j] < 0) continue;
        const T *from = (const T *)to.outputs + places[j] * of.hidden_size + i;
        total += weights[j] * (count < kLanes ? load_some(from, count) : load(from));
      }
      Out *at = out + row * out_stride + i;
      if (count < kLanes) store_some(at, adds ? load_some(at, count) + total : total, count);
      else store(at, adds ? load(at) + total : total);
    }
  }
}

template void expert_inner(const Experts &, const ExpertRows &, const float *, int64_t, int, int);
template void expert_inner(const Experts &, const ExpertRows &, const bf16 *, int64_t, int, int);
template void expert_outputs<float>(const Experts &, const ExpertRows &, int, int);
template void expert_outputs<bf16>(const Experts &, const ExpertRows &, int, int);
template void sum_of_experts<float>(const Experts &, const ExpertRows &, float *, int64_t, bool, int, int);
template void sum_of_experts<bf16>(const Experts &, const ExpertRows &, float *, int64_t, bool, int, int);
template void sum_of_experts<bf16>(const Experts &, const ExpertRows &, bf16 *, int64_t, bool, int, int);

namespace {

template <class T, class Out>
void all_of_it(Team &team, const Experts &of, const ExpertRows &to, const void *x, int64_t x_stride, void *out,
               int64_t out_stride, bool adds) {
  team.run([&](int index) {
    if (index == 0) sort_by_expert(of, to);
    team.barrier();
    expert_inner(of, to, (const T *)x, x_stride, index, team.size);
    team.barrier();
    expert_outputs<T>(of, to, index, team.size);
    team.barrier();
    sum_of_experts<T>(of, to, (Out *)out, out_stride, adds, index, team.size);
  });
}

}  // namespace

}  // namespace DIPTYCH_ISA

// x: rows of `dtype`, x_stride elements apart; out: of `out_dtype`, `dtype` or float.
API(experts)(Team *team, const void *of, const void *to, int32_t dtype, const void *x, int64_t x_stride,
             int32_t out_dtype, void *out, int64_t out_stride, int32_t adds) {
  using namespace DIPTYCH_ISA;
  const auto run = dtype == kFloat32       ? all_of_it<float, float>
                   : out_dtype == kFloat32 ? all_of_it<bf16, float>
                                           : all_of_it<bf16, bf16>;
  run(*team, *(const Experts *)of, *(const ExpertRows *)to, x, x_stride, out, out_stride, adds != 0);
}
