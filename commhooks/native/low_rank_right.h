/* The second pass of low_rank.h: Q = P·M. */

#define COLUMNS_RIGHT 512 /* at a time: of these rows and the next, and of Q, they stay in the first cache */
#define ROWS_RIGHT 8      /* whose products are added to Q in one go */

/* Add to C rows of Q, in V vectors of columns, the products of rows of M with their numbers in P. Fetch the same
   columns `ahead` elements on, if that is not 0. */
INLINE void add_rows(const int C, const int V, const float *x, int64_t m, const int rows, Number (*P)[MOST_RANK],
                     float *Q, int64_t ahead) {
    F own[8][4];
    UNROLL for (int c = 0; c < C; c++)
        UNROLL for (int v = 0; v < V; v++) own[c][v] = load(Q + c * m + v * LANES);
    UNROLL for (int b = 0; b < rows; b++) {
        if (ahead)
            UNROLL for (int at = 0; at < V * LANES; at += 16) __builtin_prefetch(x + ahead + b * m + at, 0, 3);
        F y[4];
        UNROLL for (int v = 0; v < V; v++) y[v] = load(x + b * m + v * LANES);
        UNROLL for (int c = 0; c < C; c++)
            UNROLL for (int v = 0; v < V; v++) own[c][v] += y[v] * P[b][c];
    }
    UNROLL for (int c = 0; c < C; c++)
        UNROLL for (int v = 0; v < V; v++) store(Q + c * m + v * LANES, own[c][v]);
}

#define RIGHT(C, V) \
    NEVER_INLINE void right_##C(const float *x, int64_t m, int rows, Number (*P)[MOST_RANK], float *Q, \
                                int64_t columns, int64_t ahead) { \
        int64_t j = 0; \
        if (rows == ROWS_RIGHT) \
            for (; j + V * LANES <= columns; j += V * LANES) add_rows(C, V, x + j, m, ROWS_RIGHT, P, Q + j, ahead); \
        for (; j + LANES <= columns; j += LANES) add_rows(C, 1, x + j, m, rows, P, Q + j, 0); \
        for (; j < columns; j++) \
            for (int c = 0; c < C; c++) \
                for (int b = 0; b < rows; b++) Q[c * m + j] += x[b * m + j] * first_of(P[b][c]); \
    }
RIGHT(1, 4)
RIGHT(2, 4)
RIGHT(4, 2)
#if LANES == 16
RIGHT(8, 1)
#define RIGHT_OF(C) ((C) == 8 ? right_8 : (C) == 4 ? right_4 : (C) == 2 ? right_2 : right_1)
#define MOST_RIGHT 8
#else
#define RIGHT_OF(C) ((C) == 4 ? right_4 : (C) == 2 ? right_2 : right_1)
#define MOST_RIGHT 4
#endif

/* Columns [start, end) of a matrix. */
static void right_columns(const Right *pass, const Matrix *M, int64_t start, int64_t end) {
    const int64_t n = M->n, m = M->m, r = M->r;
    const float *P = pass->P[M->group] + M->place * r * n;
    float *Q = pass->Q[M->group] + M->place * r * m;
    for (int64_t from = start; from < end; from += COLUMNS_RIGHT) {
        const int64_t columns = end - from < COLUMNS_RIGHT ? end - from : COLUMNS_RIGHT;
        for (int64_t k = 0; k < r; k++) memset(Q + k * m + from, 0, (size_t)columns * 4);
        for (int64_t i = 0; i < n; i += ROWS_RIGHT) {
            const int rows = n - i < ROWS_RIGHT ? (int)(n - i) : ROWS_RIGHT;
            Number numbers[ROWS_RIGHT][MOST_RANK];
            for (int64_t k = 0, C = MOST_RIGHT; k < r; k += C) {
                while (C > r - k) C /= 2;
                for (int b = 0; b < rows; b++)
                    for (int64_t c = 0; c < C; c++) numbers[b][c] = number(P[(k + c) * n + i + b]);
                const int64_t ahead = k ? 0 : ROWS_RIGHT * m;
                RIGHT_OF(C)(M->g + i * m + from, m, rows, numbers, Q + k * m + from, columns, ahead);
            }
        }
    }
}
