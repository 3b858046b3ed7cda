/* The last pass of low_rank.h: what is unsent, and the mean. */

#define COLUMNS_FINISH(r) (2048 / (r) / 16 * 16) /* at a time, of two Q */

/* Store past the caches, where a line would be read before it is written. `to` is aligned. */
INLINE void store_past(float *to, F v) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX__)
    __builtin_ia32_movntps256(to, v);
#elif defined(__SSE__)
    __builtin_ia32_movntps(to, v);
#else
    store(to, v);
#endif
}

INLINE void store_fence(void) {
#if defined(__SSE__)
    __builtin_ia32_sfence();
#endif
}

/* Where R rows of a matrix are, and whether what is unsent, and the mean, are stored past the caches. */
typedef struct {
    int64_t m, r;
    const float *x, *sent, *means;
    float *e, *mean;
    int past_e, past_mean;
} Rows_;

INLINE void finish_some(const int R, const int keeps, const Rows_ *of, F (*P)[4], int64_t from, int64_t end) {
    const int64_t m = of->m, r = of->r;
    const float *x = of->x, *sent = of->sent, *means = of->means;
    int64_t j = from;
    for (; j + 16 <= end; j += 16) {
        if (keeps)
            UNROLL for (int a = 0; a < R; a++) __builtin_prefetch(x + (R + a) * m + j, 1, 3);
        UNROLL for (int slice = 0; slice < SLICES; slice++) {
            const int64_t at = j + slice * LANES;
            F s[4], t[4];
            F q = load(means + at), o = keeps ? load(sent + at) : q;
            UNROLL for (int a = 0; a < R; a++) t[a] = P[0][a] * q;
            if (keeps)
                UNROLL for (int a = 0; a < R; a++) s[a] = P[0][a] * o;
            for (int64_t k = 1; k < r; k++) {
                q = load(means + k * m + at);
                UNROLL for (int a = 0; a < R; a++) t[a] += P[k][a] * q;
                if (keeps) {
                    o = load(sent + k * m + at);
                    UNROLL for (int a = 0; a < R; a++) s[a] += P[k][a] * o;
                }
            }
            UNROLL for (int a = 0; a < R; a++) {
                if (keeps) {
                    const F unsent = load(x + a * m + at) - s[a];
                    of->past_e ? store_past(of->e + a * m + at, unsent) : store(of->e + a * m + at, unsent);
                }
                of->past_mean ? store_past(of->mean + a * m + at, t[a]) : store(of->mean + a * m + at, t[a]);
            }
        }
    }
    for (; j < end; j++)
        for (int a = 0; a < R; a++) {
            float s = keeps ? P[0][a][0] * sent[j] : 0, t = P[0][a][0] * means[j];
            for (int64_t k = 1; k < r; k++) {
                if (keeps) s += P[k][a][0] * sent[k * m + j];
                t += P[k][a][0] * means[k * m + j];
            }
            if (keeps) of->e[a * m + j] = x[a * m + j] - s;
            of->mean[a * m + j] = t;
        }
}

static __attribute__((noinline)) void finish_4_keeping(const Rows_ *of, F (*P)[4], int64_t from, int64_t end) {
    finish_some(4, 1, of, P, from, end);
}
static __attribute__((noinline)) void finish_1_keeping(const Rows_ *of, F (*P)[4], int64_t from, int64_t end) {
    finish_some(1, 1, of, P, from, end);
}
static __attribute__((noinline)) void finish_4(const Rows_ *of, F (*P)[4], int64_t from, int64_t end) {
    finish_some(4, 0, of, P, from, end);
}
static __attribute__((noinline)) void finish_1(const Rows_ *of, F (*P)[4], int64_t from, int64_t end) {
    finish_some(1, 0, of, P, from, end);
}

INLINE int is_aligned(const float *x, int64_t m) { return m % 16 == 0 && (uintptr_t)x % 64 == 0; }

/* Rows [start, end) of a matrix. */
static void finish_rows(const Finish *pass, const Matrix *M, int64_t start, int64_t end) {
    const int64_t n = M->n, m = M->m, r = M->r, panel = COLUMNS_FINISH(r);
    const float *P = pass->P[M->group] + M->place * r * n;
    const int64_t at = M->place * r * m;
    const int keeps = pass->keeps && M->e;
    const int past_e = keeps && is_aligned(M->e, m);
    const int past_mean = is_aligned(M->mean, m) && !(keeps && M->mean == M->g); /* M has just been read there */
    F numbers[MOST_RANK][4];
    for (int64_t first = start; first < end; first += TOGETHER) {
        const int64_t last = end - first < TOGETHER ? end : first + TOGETHER;
        for (int64_t from = 0; from < m; from += panel) {
            const int64_t to = m - from < panel ? m : from + panel;
            for (int64_t i = first; i < last;) {
                const int R = last - i < 4 ? 1 : 4;
                for (int64_t k = 0; k < r; k++)
                    for (int a = 0; a < R; a++) numbers[k][a] = all(P[k * n + i + a]);
                const Rows_ rows = {m, r, M->g + i * m, pass->sent[M->group] + at, pass->means[M->group] + at,
                                    M->e + i * m, M->mean + i * m, past_e, past_mean};
                if (R == 4)
                    keeps ? finish_4_keeping(&rows, numbers, from, to) : finish_4(&rows, numbers, from, to);
                else
                    keeps ? finish_1_keeping(&rows, numbers, from, to) : finish_1(&rows, numbers, from, to);
                i += R;
            }
        }
    }
}
