/* The last pass of low_rank.h: what is unsent, and the mean. */

#define COLUMNS_FINISH 256 /* at a time: of these rows and the next, and of Q, they stay in the first cache */
#define ROWS_FINISH 4      /* at a time, with two vectors each */
#define VECTORS_FINISH 2

/* Store past the caches, since a line would be read before it is written. `to` is aligned. */
INLINE void store_past(float *to, F v) {
#if defined(__clang__) && defined(__SSE__) /* which has no GCC names for these */
    __builtin_nontemporal_store(v, (F *)to);
#elif defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX__)
    __builtin_ia32_movntps256(to, v);
#elif defined(__SSE__)
    __builtin_ia32_movntps(to, v);
#else
    store(to, v);
#endif
}

/* Let other threads see what was stored past the caches. */
INLINE void store_fence(void) {
#if defined(__SSE__)
    __builtin_ia32_sfence();
#endif
}

/* A product P·Q of some rows, or what it leaves of x. */
typedef struct {
    const float *Q, *x; /* x: NULL for the product */
    float *to;
    int64_t m, r;
    int64_t ahead; /* elements of x from here to what is fetched meanwhile */
    int past;      /* store past the caches */
} Product;

/* Compute R rows of V vectors from column j on. K is the rank, or 0 if that is not constant. */
INLINE void multiply_some(const int K, const int R, const int V, const Product *of, Number (*P)[ROWS_FINISH],
                          int64_t j) {
    const int64_t m = of->m, r = K ? K : of->r;
    const float *Q = of->Q + j, *x = of->x + (of->x ? j : 0);
    float *to = of->to + j;
    F sums[ROWS_FINISH][VECTORS_FINISH];
    UNROLL for (int a = 0; a < R; a++)
        UNROLL for (int v = 0; v < V; v++) sums[a][v] = P[0][a] * load(Q + v * LANES);
    for (int64_t k = 1; k < r; k++) {
        F q[VECTORS_FINISH];
        UNROLL for (int v = 0; v < V; v++) q[v] = load(Q + k * m + v * LANES);
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int v = 0; v < V; v++) sums[a][v] += P[k][a] * q[v];
    }
    if (x) {
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int v = 0; v < V; v++) sums[a][v] = load(x + a * m + v * LANES) - sums[a][v];
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int at = 0; at < V * LANES; at += 16) __builtin_prefetch(x + of->ahead + a * m + at, 1, 3);
    }
    if (of->past) {
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int v = 0; v < V; v++) store_past(to + a * m + v * LANES, sums[a][v]);
    } else {
        UNROLL for (int a = 0; a < R; a++)
            UNROLL for (int v = 0; v < V; v++) store(to + a * m + v * LANES, sums[a][v]);
    }
}

/* Columns [j, end) of R rows. */
INLINE void multiply(const int K, const int R, const Product *of, Number (*P)[ROWS_FINISH], int64_t j, int64_t end) {
    const int64_t m = of->m, r = K ? K : of->r;
    for (; j + VECTORS_FINISH * LANES <= end; j += VECTORS_FINISH * LANES)
        multiply_some(K, R, VECTORS_FINISH, of, P, j);
    for (; j + LANES <= end; j += LANES) multiply_some(K, R, 1, of, P, j);
    for (; j < end; j++)
        for (int a = 0; a < R; a++) {
            float sum = first_of(P[0][a]) * of->Q[j];
            for (int64_t k = 1; k < r; k++) sum += first_of(P[k][a]) * of->Q[k * m + j];
            of->to[a * m + j] = of->x ? of->x[a * m + j] - sum : sum;
        }
}

#define MULTIPLY(name, K, R) \
    NEVER_INLINE void name(const Product *of, Number (*P)[ROWS_FINISH], int64_t j, int64_t end) { \
        multiply(K, R, of, P, j, end); \
    }
MULTIPLY(multiply_rank_1, 1, ROWS_FINISH)
MULTIPLY(multiply_rank_2, 2, ROWS_FINISH)
MULTIPLY(multiply_rows, 0, ROWS_FINISH)
MULTIPLY(multiply_row, 0, 1)

INLINE int is_aligned(const float *x, int64_t m) { return m % 16 == 0 && (uintptr_t)x % 64 == 0; }

/* Rows [start, end) of a matrix. */
static void finish_rows(const Finish *pass, const Matrix *M, int64_t start, int64_t end) {
    const int64_t n = M->n, m = M->m, r = M->r, at = M->place * r * m;
    const float *P = pass->P[M->group] + M->place * r * n;
    const int keeps = pass->keeps && M->e;
    Product unsent = {.Q = pass->sent[M->group] + at, .m = m, .r = r, .past = keeps && is_aligned(M->e, m)};
    Product mean = {.Q = pass->means[M->group] + at, .m = m, .r = r};
    mean.past = is_aligned(M->mean, m) && !(keeps && M->mean == M->g); /* M has just been read there */
    Number numbers[MOST_RANK][ROWS_FINISH];
    for (int64_t first = start; first < end; first += TOGETHER) {
        const int64_t rows = end - first < TOGETHER ? end - first : TOGETHER;
        for (int64_t from = 0; from < m; from += COLUMNS_FINISH) {
            const int64_t to = m - from < COLUMNS_FINISH ? m : from + COLUMNS_FINISH;
            for (int64_t i = 0, some = ROWS_FINISH; i < rows; i += some) {
                if (rows - i < some) some = 1;
                const int64_t before = (first + i) * m;
                void (*const multiplied)(const Product *, Number (*)[ROWS_FINISH], int64_t, int64_t) =
                    some == 1 ? multiply_row : r == 1 ? multiply_rank_1 : r == 2 ? multiply_rank_2 : multiply_rows;
                for (int64_t k = 0; k < r; k++)
                    for (int64_t a = 0; a < some; a++) numbers[k][a] = number(P[k * n + first + i + a]);
                if (keeps) {
                    unsent.x = M->g + before;
                    unsent.to = M->e + before;
                    unsent.ahead = ahead_of(COLUMNS_FINISH, i, rows, m, from, to);
                    multiplied(&unsent, numbers, from, to);
                }
                mean.to = M->mean + before;
                multiplied(&mean, numbers, from, to);
            }
        }
    }
}
