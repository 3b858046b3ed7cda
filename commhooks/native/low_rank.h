/* PowerSGD's passes over a list of matrices, at one level: P = M·Qᵀ, Q = P·M, and the mean with the residual.

   M is n×m; its factors are kept transposed, P as r×n and Q as r×m, those of the k matrices of a group in one batch.
   Each element's operations are the same at every level, and each rounds once:
   - P[k][i]: 16 running sums, of columns that are 16 apart, added up in pairs;
   - Q[k][j]: a running sum over the rows, first to last;
   - a product of factors: p0·q0 + p1·q1 + ... from left to right.
   Rows are independent in the first and the last pass, and columns in the second: threads share these, which changes no
   bit. `low_rank.py` says what the arguments are, and checks them. */

#define MOST_RANK 8
#define TOGETHER 16 /* rows that use a panel of factors one after another, while it is in the first cache */
#define NEVER_INLINE static __attribute__((noinline))
#define UNROLL _Pragma("GCC unroll 16")
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define SLICES (16 / LANES) /* vectors of 16 columns, which are a line of the cache */
typedef float F __attribute__((vector_size(4 * LANES)));

INLINE F load(const float *x) {
    F v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE void store(float *to, F v) { memcpy(to, &v, sizeof v); }

/* A number that vectors are multiplied by. From AVX on there are instructions for that; else it is a vector itself. */
#if LANES > 4
typedef float Number;
INLINE Number number(float x) { return x; }
INLINE float first_of(Number x) { return x; }
#else
typedef F Number;
INLINE Number number(float x) { return x - (F){0}; }
INLINE float first_of(Number x) { return x[0]; }
#endif

/* The arguments, as `low_rank.py` packs them. */

typedef struct {
    int64_t n, m, r;
    int64_t group, place; /* its factors are P[group] + place·r·n and Q[group] + place·r·m */
    float *g;             /* n×m: the gradient, and M once it is formed */
    float *e;             /* n×m: the residual, or NULL */
    float *mean;          /* n×m; may be g */
} Matrix;

typedef struct {
    const Matrix *matrices;
    int64_t number;
} Matrices;

typedef struct {
    Matrices of;
    const float *const *Q;
    float *const *P;
    const float *const *directions; /* of each group [m]; NULL: there are no probes */
    float *const *shown;            /* of each group [k, n] */
    int64_t forms;
    double decay;
} Left;

typedef struct {
    Matrices of;
    const float *const *P;
    float *const *Q;
} Right;

typedef struct {
    Matrices of;
    const float *const *P, *const *sent, *const *means; /* sent: this rank's own Q; means: the mean Q */
    int64_t keeps;
} Finish;

/* Return the distance in elements from row i to the row that is fetched meanwhile, some rows later. The rows that share a
   panel of columns [from, to) are followed by their next panel, and at the end by the rows below. */
INLINE int64_t ahead_of(int64_t columns, int64_t i, int64_t rows, int64_t m, int64_t from, int64_t to) {
    const int64_t later = columns < 256 ? 8 : 4;
    return i + later < rows ? later * m : to < m ? (later - rows) * m + to - from : later * m - from;
}

#include "low_rank_left.h"
#include "low_rank_right.h"
#include "low_rank_finish.h"

/* The elements of all matrices are numbered, one matrix after another. Of a matrix whose first number is `base`, return
   how many of `most` runs of `width` elements begin before number `end`. */
INLINE int64_t begun(int64_t end, int64_t base, int64_t width, int64_t most) {
    const int64_t runs = end <= base ? 0 : (end - base + width - 1) / width;
    return runs < most ? runs : most;
}

/* Form M = g + decay · e, unless it is formed, and compute P = M·Qᵀ, of rows whose first element is in [start, end). */
int EXPORTED(low_rank_left)(int64_t start, int64_t end, const Left *pass) {
    int64_t base = 0;
    for (int64_t at = 0; at < pass->of.number; at++) {
        const Matrix *M = pass->of.matrices + at;
        if (M->r < 1 || M->r > MOST_RANK) return NO_SUCH_CODE;
        left_rows(pass, M, begun(start, base, M->m, M->n), begun(end, base, M->m, M->n));
        base += M->n * M->m;
    }
    return DONE;
}

/* Compute Q = P·M, of 16 columns at a time. */
int EXPORTED(low_rank_right)(int64_t start, int64_t end, const Right *pass) {
    int64_t base = 0;
    for (int64_t at = 0; at < pass->of.number; at++) {
        const Matrix *M = pass->of.matrices + at;
        if (M->r < 1 || M->r > MOST_RANK) return NO_SUCH_CODE;
        const int64_t groups = (M->m + 15) / 16;
        const int64_t from = begun(start, base, M->n * 16, groups) * 16, to = begun(end, base, M->n * 16, groups) * 16;
        right_columns(pass, M, from, to < M->m ? to : M->m);
        base += M->n * M->m;
    }
    return DONE;
}

/* Compute the mean P·Q of the mean Q, and first what is unsent, e = M - P·Q of this rank's own Q, if it keeps that. */
int EXPORTED(low_rank_finish)(int64_t start, int64_t end, const Finish *pass) {
    int64_t base = 0;
    for (int64_t at = 0; at < pass->of.number; at++) {
        const Matrix *M = pass->of.matrices + at;
        if (M->r < 1 || M->r > MOST_RANK) return NO_SUCH_CODE;
        finish_rows(pass, M, begun(start, base, M->m, M->n), begun(end, base, M->m, M->n));
        base += M->n * M->m;
    }
    store_fence();
    return DONE;
}
