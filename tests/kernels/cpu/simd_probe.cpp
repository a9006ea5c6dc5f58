// What test_simd.py looks at: simd.h over arrays, `n` a multiple of sixteen.
#include "simd.h"

using namespace DIPTYCH_ISA;

extern "C" void exps(const float *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, exp(load(x + i)));
}

extern "C" void to_bf16s(const float *x, bf16 *out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}

extern "C" void narrows(const float *x, bf16 *out, int64_t n) {
  for (int64_t i = 0; i < n; i++) narrow(out + i, x[i]);
}

extern "C" void from_bf16s(const bf16 *x, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}

// a, b: [n, 2]; out: [n], of 0.5 + the sums of products.
extern "C" void dot2s(const bf16 *a, const bf16 *b, float *out, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes)
    store(out + i, dot2(splat(0.5f), load_raw<u32x16>(a + 2 * i), load_raw<u32x16>(b + 2 * i)));
}

// out[0] = the sum and out[1] = the largest of x[0..16); held: lanes above 0, of which the number is returned.
extern "C" int64_t lanes(const float *x, float *out, float *held) {
  f32x16 v = load(x);
  out[0] = sum(v);
  out[1] = largest(v);
  return store_held(held, v, v > 0.0f);
}

extern "C" void some(const bf16 *x, bf16 *out, int64_t count) { store_some(out, load_some(x, count), count); }
