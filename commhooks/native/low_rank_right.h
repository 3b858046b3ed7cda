/* The second pass of low_rank.h: Q = P·M. */

#define COLUMNS_RIGHT 512 /* at a time: the rows below, and Q, stay in the first cache */
#define ROWS_RIGHT 8      /* whose products are added to Q in one go */

/* Add to C rows of Q, in V vectors of columns from j on, the products of rows with C of their numbers in P. Meanwhile
   get the same columns `ahead` elements on, if that is not 0. */
INLINE void add_to_columns(const int C, const int V, const float *x, int64_t m, int rows, F (*P)[MOST_RANK], float *Q,
                           int64_t ahead) {
    F own[4][4];
    UNROLL for (int c = 0; c < C; c++)
        UNROLL for (int v = 0; v < V; v++) own[c][v] = load(Q + c * m + v * LANES);
    for (int b = 0; b < rows; b++) {
        if (ahead)
            for (int line = 0; line < V * LANES; line += 16) __builtin_prefetch(x + ahead + b * m + line, 0, 3);
        F y[4];
        UNROLL for (int v = 0; v < V; v++) y[v] = load(x + b * m + v * LANES);
        UNROLL for (int c = 0; c < C; c++)
            UNROLL for (int v = 0; v < V; v++) own[c][v] += y[v] * P[b][c];
    }
    UNROLL for (int c = 0; c < C; c++)
        UNROLL for (int v = 0; v < V; v++) store(Q + c * m + v * LANES, own[c][v]);
}

#define RIGHT(C, V) \
    static __attribute__((noinline)) void right_##C(const float *x, int64_t m, int rows, F (*P)[MOST_RANK], float *Q, \
                                                    int64_t columns, int64_t ahead) { \
        int64_t j = 0; \
        for (; j + V * LANES <= columns; j += V * LANES) add_to_columns(C, V, x + j, m, rows, P, Q + j, ahead); \
        for (; j + LANES <= columns; j += LANES) add_to_columns(C, 1, x + j, m, rows, P, Q + j, ahead); \
        for (; j < columns; j++) \
            for (int c = 0; c < C; c++) \
                for (int b = 0; b < rows; b++) Q[c * m + j] += x[b * m + j] * P[b][c][0]; \
    }
RIGHT(1, 4)
RIGHT(2, 4)
RIGHT(4, 2)

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
            const float *x = M->g + i * m + from;
            int64_t ahead = ROWS_RIGHT * m, k = 0;
            F numbers[ROWS_RIGHT][MOST_RANK];
            for (int b = 0; b < rows; b++)
                for (int64_t c = 0; c < r; c++) numbers[b][c] = all(P[c * n + i + b]);
            F (*own)[MOST_RANK] = numbers;
            for (; k + 4 <= r; k += 4, ahead = 0)
                right_4(x, m, rows, (F (*)[MOST_RANK])(own[0] + k), Q + k * m + from, columns, ahead);
            if (k + 2 <= r) {
                right_2(x, m, rows, (F (*)[MOST_RANK])(own[0] + k), Q + k * m + from, columns, ahead);
                k += 2, ahead = 0;
            }
            if (k < r) right_1(x, m, rows, (F (*)[MOST_RANK])(own[0] + k), Q + k * m + from, columns, ahead);
        }
    }
}
