/* The two loops that no engine can beat: reading memory, and multiplying bfloat16 that is already in the L1 cache.
   roofline.py compiles this with -O3 -march=native and calls it from one thread a core. */
#include <stddef.h>
#include <stdint.h>

#define STREAMS 4 /* places read in turn, as a kernel that walks several rows does */

/* Sum of num_words words; num_words is a multiple of 8 * STREAMS. */
uint64_t read_words(const uint64_t *restrict words, size_t num_words)
{
    uint64_t lanes[STREAMS][8] = {{0}};
    const size_t part = num_words / STREAMS;
    for (size_t i = 0; i < part; i += 8)
        for (int s = 0; s < STREAMS; s++)
            for (int lane = 0; lane < 8; lane++)
                lanes[s][lane] += words[s * part + i + lane];
    uint64_t sum = 0;
    for (int s = 0; s < STREAMS; s++)
        for (int lane = 0; lane < 8; lane++)
            sum += lanes[s][lane];
    return sum;
}

#ifdef __AVX512BF16__
#include <immintrin.h>

#define ROWS 6
#define COLUMNS 4 /* ROWS * COLUMNS accumulators, the shape of a matrix kernel's inner tile */
#define DEPTH 64  /* pairs of numbers: 4 + 16 KiB of operands, which stay in L1 */

int has_bf16(void) { return 1; }

/* Repeats one tile's product; returns the floating-point operations done. `sink` keeps the result alive. */
double multiply_bf16(size_t repeats, float *sink)
{
    static _Alignas(64) uint16_t a[DEPTH][ROWS][2], b[DEPTH][COLUMNS][32];
    __m512 acc[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            acc[r][c] = _mm512_setzero_ps();
    for (size_t n = 0; n < repeats; n++)
        for (int k = 0; k < DEPTH; k++) {
            __m512bh column[COLUMNS];
            for (int c = 0; c < COLUMNS; c++)
                column[c] = (__m512bh)_mm512_load_si512(b[k][c]);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                const __m512bh row = (__m512bh)_mm512_set1_epi32(*(const volatile int32_t *)a[k][r]);
#pragma GCC unroll 4
                for (int c = 0; c < COLUMNS; c++)
                    acc[r][c] = _mm512_dpbf16_ps(acc[r][c], row, column[c]);
            }
        }
    __m512 sum = _mm512_setzero_ps();
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            sum = _mm512_add_ps(sum, acc[r][c]);
    *sink = _mm512_reduce_add_ps(sum);
    return (double)repeats * DEPTH * ROWS * COLUMNS * 64.0;
}
#else
int has_bf16(void) { return 0; }

double multiply_bf16(size_t repeats, float *sink)
{
    (void)repeats;
    *sink = 0.0f;
    return 0.0;
}
#endif
