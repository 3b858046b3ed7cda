/* The first pass of low_rank.h: P = M·Qᵀ, with M formed in the same read. */

/* Columns at a time: of these rows and the next, and of Q, they stay in the first cache. */
#if LANES == 16
#define COLUMNS_LEFT(r) ((r) <= 2 ? 1024 : 256)
#else
#define COLUMNS_LEFT(r) ((r) < 4 ? 256 : 128)
#endif

/* 16 running sums for each row of Q, and last the probe's. */
typedef float Sums[MOST_RANK + 1][16];

/* Some columns of some rows. */
typedef struct {
    float *x;       /* M, or the gradient if it is not formed yet */
    const float *e; /* the residual with which it is formed, or NULL */
    float decay;
    int64_t m, from, end;
    int64_t ahead; /* elements from here to what is fetched meanwhile, or 0 */
} Strip;

/* Add the products of R rows with C rows of Q to their sums; first form M, if it `forms`. As many slices of a line are
   processed at once as there are registers for. */
INLINE void add_products(const int R, const int C, const int forms, const Strip *of, const float *Q, Sums *sums,
                         int64_t k) {
    const int at_once = R * C * SLICES <= 8 ? SLICES : 1;
    float *const x = of->x;
    const float *const e = of->e, decay = of->decay;
    const int64_t m = of->m, end = of->end, whole = of->from + (end - of->from) / 16 * 16, ahead = of->ahead;
    for (int slice = 0; slice < SLICES; slice += at_once) {
        F own[4][8][SLICES];
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int c = 0; c < C; c++)
                UNROLL for (int v = 0; v < at_once; v++) own[a][c][v] = load(sums[a][k + c] + (slice + v) * LANES);
        for (int64_t j = of->from; j < whole; j += 16) {
            if (ahead && !slice)
                UNROLL for (int a = 0; a < R; a++) {
                    __builtin_prefetch(x + ahead + a * m + j, 1, 3);
                    if (forms) __builtin_prefetch(e + ahead + a * m + j, 0, 3);
                }
            UNROLL for (int v = 0; v < at_once; v++) {
                const int64_t at = j + (slice + v) * LANES;
                F y[4];
                UNROLL for (int a = 0; a < R; a++) {
                    y[a] = load(x + a * m + at);
                    if (forms) store(x + a * m + at, y[a] = y[a] + load(e + a * m + at) * decay);
                }
                UNROLL for (int c = 0; c < C; c++) {
                    const F q = load(Q + c * m + at);
                    UNROLL for (int a = 0; a < R; a++) own[a][c][v] += y[a] * q;
                }
            }
        }
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int c = 0; c < C; c++)
                UNROLL for (int v = 0; v < at_once; v++) store(sums[a][k + c] + (slice + v) * LANES, own[a][c][v]);
    }
    for (int a = 0; a < R; a++)
        for (int64_t j = whole; j < end; j++) {
            if (forms) x[a * m + j] = x[a * m + j] + e[a * m + j] * decay;
            for (int c = 0; c < C; c++) sums[a][k + c][j - whole] += x[a * m + j] * Q[c * m + j];
        }
}

#define LEFT(R, C) \
    NEVER_INLINE void left_##R##_##C(const Strip *of, const float *Q, Sums *sums, int64_t k) { \
        of->e ? add_products(R, C, 1, of, Q, sums, k) : add_products(R, C, 0, of, Q, sums, k); \
    }

/* How many rows at a time, and how many of Q, for a rank: as many sums as there are registers for. */
LEFT(4, 1)
LEFT(4, 2)
LEFT(1, 1)
#if LANES == 16
LEFT(4, 4)
LEFT(2, 8)
#define ROWS_LEFT(r) ((r) < 8 ? 4 : 2)
#define LEFT_OF_2(C) left_2_8
#define LEFT_OF_4(C) ((C) == 4 ? left_4_4 : (C) == 2 ? left_4_2 : left_4_1)
#define MOST_LEFT 8
#else
LEFT(2, 1)
LEFT(2, 2)
LEFT(2, 4)
#define ROWS_LEFT(r) ((r) < 4 ? 4 : 2)
#define LEFT_OF_2(C) ((C) == 4 ? left_2_4 : (C) == 2 ? left_2_2 : left_2_1)
#define LEFT_OF_4(C) ((C) == 2 ? left_4_2 : left_4_1)
#define MOST_LEFT 4
#endif

/* Add the products of 1, 2 or 4 rows with all rows of Q. */
INLINE void add_all(int rows, Strip of, int64_t r, const float *Q, Sums *sums) {
    for (int64_t k = 0, C = MOST_LEFT; k < r; k += C) {
        while (C > r - k) C /= 2;
        if (rows == 1) C = 1;
        (rows == 4 ? LEFT_OF_4(C) : rows == 2 ? LEFT_OF_2(C) : left_1_1)(&of, Q + k * of.m, sums, k);
        of.e = NULL; /* it is formed */
        of.ahead = 0;
    }
}

INLINE float in_pairs(float *sums) {
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) sums[l] += sums[l + half];
    return sums[0];
}

/* Rows [start, end) of a matrix. */
static void left_rows(const Left *pass, const Matrix *M, int64_t start, int64_t end) {
    const int64_t n = M->n, m = M->m, r = M->r, columns = COLUMNS_LEFT(r);
    const float *Q = pass->Q[M->group] + M->place * r * m;
    const float *direction = pass->directions ? pass->directions[M->group] : NULL;
    const float *e = pass->forms ? M->e : NULL;
    float *P = pass->P[M->group] + M->place * r * n;
    Sums sums[TOGETHER];
    for (int64_t first = start; first < end; first += TOGETHER) {
        const int64_t rows = end - first < TOGETHER ? end - first : TOGETHER;
        memset(sums, 0, sizeof sums);
        for (int64_t from = 0; from < m; from += columns) {
            const int64_t to = m - from < columns ? m : from + columns;
            for (int64_t i = 0, some = ROWS_LEFT(r); i < rows; i += some) {
                if (rows - i < some) some = 1;
                const int64_t before = (first + i) * m;
                const int64_t ahead = ahead_of(columns, i, rows, m, from, to);
                Strip of = {M->g + before, e ? e + before : NULL, (float)pass->decay, m, from, to, ahead};
                add_all((int)some, of, r, Q, sums + i);
                of.e = NULL;
                of.ahead = 0;
                for (int64_t a = 0; direction && a < some; a++, of.x += m)
                    left_1_1(&of, direction, sums + i + a, MOST_RANK);
            }
        }
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t k = 0; k < r; k++) P[k * n + first + i] = in_pairs(sums[i][k]);
            if (direction) pass->shown[M->group][M->place * n + first + i] = in_pairs(sums[i][MOST_RANK]);
        }
    }
}
