/* The first pass of low_rank.h: P = M·Qᵀ, with M formed in the same read. */

/* Running sums of each row and each row of Q; the last is the probe's. */
typedef float Sums[TOGETHER][MOST_RANK + 1][16];

#define COLUMNS_LEFT(r) (4096 / (r) / 16 * 16) /* of Q at a time */

/* Add to the sums of R rows, for C rows of Q, the products of columns [from, end). Meanwhile get the same columns
   `ahead` elements on, if that is not 0, of M and of e. */
INLINE void add_products(const int R, const int C, const float *x, const float *e, int64_t m, const float *Q, int64_t from,
                         int64_t end, int64_t ahead, float (*sums)[MOST_RANK + 1][16]) {
    const int64_t whole = from + (end - from) / 16 * 16;
    for (int slice = 0; slice < SLICES; slice++) {
        F own[4][4];
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int c = 0; c < C; c++) own[a][c] = load(sums[a][c] + slice * LANES);
        for (int64_t j = from; j < whole; j += 16) {
            const int64_t at = j + slice * LANES;
            if (ahead && !slice)
                UNROLL for (int a = 0; a < R; a++) {
                    __builtin_prefetch(x + ahead + a * m + j, 1, 3);
                    if (e) __builtin_prefetch(e + ahead + a * m + j, 0, 3);
                }
            F y[4];
            UNROLL for (int a = 0; a < R; a++) y[a] = load(x + a * m + at);
            UNROLL for (int c = 0; c < C; c++) {
                const F q = load(Q + c * m + at);
                UNROLL for (int a = 0; a < R; a++) own[a][c] += y[a] * q;
            }
        }
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int c = 0; c < C; c++) store(sums[a][c] + slice * LANES, own[a][c]);
    }
    for (int a = 0; a < R; a++)
        for (int c = 0; c < C; c++)
            for (int64_t j = whole; j < end; j++) sums[a][c][j - whole] += x[a * m + j] * Q[c * m + j];
}

#define LEFT(R, C) \
    static __attribute__((noinline)) void left_##R##_##C( \
        const float *x, const float *e, int64_t m, const float *Q, int64_t from, int64_t end, int64_t ahead, \
        float (*sums)[MOST_RANK + 1][16]) { \
        add_products(R, C, x, e, m, Q, from, end, ahead, sums); \
    }
LEFT(1, 1)
LEFT(4, 1)
LEFT(4, 2)
#if LANES == 16
#define MOST_LEFT 4 /* rows of Q at a time */
LEFT(4, 4)
#else
#define MOST_LEFT 2
#endif

/* Form columns [from, end) of a row in g's memory. */
INLINE void form(float *g, const float *e, float decay, int64_t from, int64_t end) {
    INDEPENDENT
    for (int64_t j = from; j < end; j++) g[j] = g[j] + e[j] * decay;
}

/* Add up columns [from, end) of 4 rows, or of fewer one by one, for all rows of Q. */
INLINE void add_all(int rows, const float *x, const float *e, int64_t m, int64_t r, const float *Q, int64_t from, int64_t end,
                    int64_t ahead, float (*sums)[MOST_RANK + 1][16], int first) {
    (void)first;
    if (rows < 4) {
        for (int a = 0; a < rows; a++)
            for (int64_t k = 0; k < r; k++)
                left_1_1(x + a * m, e, m, Q + k * m, from, end, 0, (float (*)[MOST_RANK + 1][16])sums[a][k]);
        return;
    }
    int64_t k = 0;
#if MOST_LEFT == 4
    for (; k + 4 <= r; k += 4, ahead = 0)
        left_4_4(x, e, m, Q + k * m, from, end, ahead, (float (*)[MOST_RANK + 1][16])sums[0][k]);
#endif
    for (; k + 2 <= r; k += 2, ahead = 0)
        left_4_2(x, e, m, Q + k * m, from, end, ahead, (float (*)[MOST_RANK + 1][16])sums[0][k]);
    if (k < r) left_4_1(x, e, m, Q + k * m, from, end, ahead, (float (*)[MOST_RANK + 1][16])sums[0][k]);
}

INLINE float in_pairs(float *sums) {
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}

/* Rows [start, end) of a matrix. */
static void left_rows(const Left *pass, const Matrix *M, int64_t start, int64_t end) {
    const int64_t n = M->n, m = M->m, r = M->r, panel = COLUMNS_LEFT(r);
    const float *Q = pass->Q[M->group] + M->place * r * m;
    const float *direction = pass->directions ? pass->directions[M->group] : NULL;
    const float *e = pass->forms ? M->e : NULL;
    float *P = pass->P[M->group] + M->place * r * n;
    Sums sums;
    for (int64_t first = start; first < end; first += TOGETHER) {
        const int rows = at_most((int)(end - first < TOGETHER ? end - first : TOGETHER), TOGETHER);
        memset(sums, 0, sizeof sums);
        for (int64_t from = 0; from < m; from += panel) {
            const int64_t to = m - from < panel ? m : from + panel;
            for (int i = 0; i < rows; i += 4) {
                const int some = rows - i < 4 ? rows - i : 4;
                float *x = M->g + (first + i) * m;
                const float *left = e ? e + (first + i) * m : NULL;
                /* next are the rows below, or of the next panel, or of the next rows that share a panel */
                const int64_t ahead = i + 4 < rows ? 4 * m : to < m ? panel - i * m : 4 * m - from;
                if (e)
                    for (int a = 0; a < some; a++) form(x + a * m, left + a * m, (float)pass->decay, from, to);
                add_all(some, x, left, m, r, Q, from, to, ahead, sums + i, i);
                if (direction)
                    for (int a = 0; a < some; a++)
                        left_1_1(x + a * m, NULL, m, direction, from, to, 0,
                                 (float (*)[MOST_RANK + 1][16])sums[i + a][MOST_RANK]);
            }
        }
        for (int i = 0; i < rows; i++) {
            for (int64_t k = 0; k < r; k++) P[k * n + first + i] = in_pairs(sums[i][k]);
            if (direction) pass->shown[M->group][M->place * n + first + i] = in_pairs(sums[i][MOST_RANK]);
        }
    }
}
