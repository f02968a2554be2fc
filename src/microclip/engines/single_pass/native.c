/* Two sums over a micro-batch's rows that torch has no single operation for.

   The threads are those of the OpenMP library that torch has loaded: this is not linked to one. */

#include <stddef.h>

typedef float vec __attribute__((vector_size(32)));
typedef float anywhere __attribute__((vector_size(32), aligned(4), may_alias));
typedef float quad __attribute__((vector_size(16)));
typedef double wide __attribute__((vector_size(32)));
typedef int lanes __attribute__((vector_size(32)));
enum { LANES = 8, ROWS = 4, COLUMNS = 3 }; /* 12 sums, 3 rows and 1 fill the 16 registers */

#define FAST __attribute__((target("avx2,fma")))
#define INLINE FAST static inline __attribute__((always_inline))

#ifdef __clang__
#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MIX(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

typedef struct {
    const float *start;
    ptrdiff_t microbatch, row; /* strides, in numbers */
    ptrdiff_t width;
} Rows;

/* ---- sum_rs (left_r . left_s)(right_r . right_s), over one half of the pairs ----

   Products of a matrix with itself are symmetric, and torch has no batched operation that makes use
   of it. Nothing is written in between: products of a few rows at a time stay in registers. */

/* The sums of four vectors. */
INLINE quad sums(vec a, vec b, vec c, vec d) {
    vec ab = MIX(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + MIX(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    vec cd = MIX(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + MIX(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    vec parts = MIX(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + MIX(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
    quad halves[2];
    __builtin_memcpy(halves, &parts, sizeof parts);
    return halves[0] + halves[1];
}

/* The products of four rows with three; past the last row that one is taken again. */
INLINE void products(
    const Rows *of, const float *start, ptrdiff_t i, ptrdiff_t j, ptrdiff_t count,
    quad out[COLUMNS]
) {
    const float *a[ROWS], *b[COLUMNS];
    vec c[COLUMNS][ROWS] = {{{0}}};
    ptrdiff_t k = 0;
    for (int n = 0; n < ROWS; n++) a[n] = start + (i + n < count ? i + n : count - 1) * of->row;
    for (int n = 0; n < COLUMNS; n++) b[n] = start + (j + n < count ? j + n : count - 1) * of->row;
    for (; k + LANES <= of->width; k += LANES) {
        vec b0 = *(const anywhere *)(b[0] + k), b1 = *(const anywhere *)(b[1] + k);
        vec b2 = *(const anywhere *)(b[2] + k);
#pragma GCC unroll 4
        for (int n = 0; n < ROWS; n++) {
            vec x = *(const anywhere *)(a[n] + k);
            c[0][n] += x * b0;
            c[1][n] += x * b1;
            c[2][n] += x * b2;
        }
    }
    for (int m = 0; m < COLUMNS; m++) out[m] = sums(c[m][0], c[m][1], c[m][2], c[m][3]);
    for (; k < of->width; k++)
        for (int m = 0; m < COLUMNS; m++)
            for (int n = 0; n < ROWS; n++) out[m][n] += a[n][k] * b[m][k];
}

/* Two sums: over all pairs, and of each row with itself (r = s) alone. */
FAST static void of_microbatch(
    const Rows *left, const Rows *right, ptrdiff_t at, ptrdiff_t count, double *all, double *own
) {
    const float *l = left->start + at * left->microbatch;
    const float *r = right->start + at * right->microbatch;
    wide total = {0};
    double diagonal = 0;
    for (ptrdiff_t i = 0; i < count; i += ROWS)
        for (ptrdiff_t j = 0; j < i + ROWS && j < count; j += COLUMNS) {
            quad lefts[COLUMNS], rights[COLUMNS];
            products(left, l, i, j, count, lefts);
            products(right, r, i, j, count, rights);
            for (int m = 0; m < COLUMNS; m++) {
                wide both = __builtin_convertvector(lefts[m], wide) *
                            __builtin_convertvector(rights[m], wide);
                if (j + m >= i || i + ROWS > count) { /* at an edge: no pair of rows but once */
                    for (int n = 0; n < ROWS; n++) {
                        if (i + n >= count || j + m > i + n) both[n] = 0;
                        if (j + m == i + n) {
                            if (i + n < count) diagonal += both[n];
                            both[n] /= 2;
                        }
                    }
                }
                total += both;
            }
        }
    *all = 2 * (total[0] + total[1] + total[2] + total[3]);
    *own = diagonal;
}

void microclip_pair_sums(
    Rows left, Rows right, ptrdiff_t count, ptrdiff_t microbatches, double *all, double *own,
    int threads
) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t at = 0; at < microbatches; at++)
        of_microbatch(&left, &right, at, count, all + at, own + at);
}

/* ---- a layer norm's gradients: of its scale sum_r d_r (x_r - mean_r) rstd_r, of its shift sum_r d_r ---- */

FAST static void of_rows(
    const float *restrict x, const float *restrict d, const float *mean, const float *rstd,
    ptrdiff_t rows, ptrdiff_t width, float *restrict scales, float *restrict shifts
) {
    for (ptrdiff_t k = 0; k < width; k++) scales[k] = shifts[k] = 0;
    for (ptrdiff_t r = 0; r < rows; r++, x += width, d += width)
        for (ptrdiff_t k = 0; k < width; k++) {
            scales[k] += d[k] * ((x[k] - mean[r]) * rstd[r]);
            shifts[k] += d[k];
        }
}

void microclip_layer_norm(
    const float *x, const float *d, const float *mean, const float *rstd, ptrdiff_t rows,
    ptrdiff_t width, ptrdiff_t microbatches, float *scales, float *shifts, int threads
) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (ptrdiff_t at = 0; at < microbatches; at++)
        of_rows(
            x + at * rows * width, d + at * rows * width, mean + at * rows, rstd + at * rows, rows,
            width, scales + at * width, shifts + at * width
        );
}

int microclip_runs(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

/* With wider vectors than these, torch's own products gain more by them than by symmetry. */
int microclip_pays(void) { return microclip_runs() && !__builtin_cpu_supports("avx512f"); }
