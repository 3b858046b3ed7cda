/* The rows of matrices made orthonormal, and scaled, for bases that must be the same on every rank: each operation is
   in double or float, rounds once, and has its place in a fixed order. */

typedef struct {
    int64_t k, r, n;
    const float *from;
    float *to;
} Batch;

typedef struct {
    const Batch *batches;
    int64_t number;
    double epsilon;
} Orthonormal;

/* Bases r×m of a group: the mean's rows, and where they are kept, `step` elements from matrix to matrix. */
typedef struct {
    int64_t k, r, m;
    const float *mean;
    float *kept;
    int64_t step;
} Bases;

typedef struct {
    const Bases *bases;
    int64_t number;
} Keep;

/* Return the sum of the products of n numbers, which are added up in halves: the second half, of what is more than a
   power of two, to the first. */
static double sum_of_products(const double *x, const double *y, int64_t n, double *sums) {
    if (n == 1) return x[0] * y[0];
    int64_t half = 1;
    while (half * 2 < n) half *= 2;
    for (int64_t i = 0; i < n - half; i++) sums[i] = x[i] * y[i] + x[half + i] * y[half + i];
    for (int64_t i = n - half; i < half; i++) sums[i] = x[i] * y[i];
    while (half > 1) {
        half /= 2;
        INDEPENDENT
        for (int64_t i = 0; i < half; i++) sums[i] += sums[half + i];
    }
    return sums[0];
}

INLINE void reflect(double *x, const double *v, double tau, int64_t n, double *sums) {
    const double d = sum_of_products(x, v, n, sums) * tau;
    INDEPENDENT
    for (int64_t i = 0; i < n; i++) x[i] -= d * v[i];
}

/* Return the largest magnitude; NaN, if there is one. */
INLINE float largest_magnitude(const float *x, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t magnitude = bits_of(x[i]) & INT32_MAX;
        largest = magnitude > largest ? magnitude : largest;
    }
    return number_of(largest);
}

/* Householder's reflections, with LAPACK's signs; A and E are r×n, tau and diagonal r, sums n. */
static void orthonormal_one(const float *from, float *to, int64_t r, int64_t n, double epsilon, double *A) {
    double *E = A + r * n, *sums = E + r * n, *tau = sums + n, *diagonal = tau + r;
    for (int64_t j = 0; j < r; j++) {
        const float *row = from + j * n;
        diagonal[j] = largest_magnitude(row, n);
        const double by = diagonal[j] > 0 ? diagonal[j] : 1;
        for (int64_t i = 0; i < n; i++) A[j * n + i] = row[i] / by;
    }
    for (int64_t j = 0; j < r; j++) {
        double *x = A + j * n + j;
        const double squares = sum_of_products(x, x, n - j, sums), lead = x[0];
        const double norm = (float)sqrt((double)(float)squares);
        x[0] += lead < 0 ? -norm : norm;
        tau[j] = norm == 0 ? 0 : 2 / ((squares - lead * lead) + x[0] * x[0]);
        diagonal[j] *= norm;
        for (int64_t i = j + 1; i < r; i++) reflect(A + i * n + j, x, tau[j], n - j, sums);
    }
    memset(E, 0, (size_t)(r * n) * sizeof *E);
    for (int64_t j = r - 1; j >= 0; j--) {
        E[j * n + j] = 1;
        for (int64_t i = j; i < r; i++) reflect(E + i * n + j, A + j * n + j, tau[j], n - j, sums);
    }
    for (int64_t j = 0; j < r; j++) {
        const double factor = epsilon > 0 ? diagonal[j] / (diagonal[j] + epsilon) : 1;
        for (int64_t i = 0; i < n; i++) to[j * n + i] = (float)(E[j * n + i] * factor);
    }
}

/* Make the rows of matrices orthonormal: those whose first element is in [start, end). */
int EXPORTED(orthonormal)(int64_t start, int64_t end, const Orthonormal *pass) {
    int64_t base = 0, most = 0;
    for (int64_t at = 0; at < pass->number; at++) {
        const Batch *batch = pass->batches + at;
        const int64_t needed = 2 * batch->r * batch->n + batch->n + 2 * batch->r;
        most = needed > most ? needed : most;
    }
    double *work = malloc((size_t)most * sizeof *work);
    if (!work) return NO_MEMORY;
    for (int64_t at = 0; at < pass->number; at++) {
        const Batch *batch = pass->batches + at;
        const int64_t size = batch->r * batch->n;
        const int64_t last = begun(end, base, size, batch->k);
        for (int64_t i = begun(start, base, size, batch->k); i < last; i++)
            orthonormal_one(batch->from + i * size, batch->to + i * size, batch->r, batch->n, pass->epsilon, work);
        base += batch->k * size;
    }
    free(work);
    return DONE;
}

/* Keep rows of the means, divided by their largest magnitude; not a row of zeros, or with a NaN. */
int EXPORTED(keep)(int64_t start, int64_t end, const Keep *pass) {
    int64_t base = 0;
    for (int64_t at = 0; at < pass->number; at++) {
        const Bases *bases = pass->bases + at;
        const int64_t r = bases->r, m = bases->m, last = begun(end, base, m, bases->k * r);
        for (int64_t row = begun(start, base, m, bases->k * r); row < last; row++) {
            const float *mean = bases->mean + row * m, largest = largest_magnitude(mean, m);
            float *kept = bases->kept + row / r * bases->step + row % r * m;
            if (largest > 0)
                for (int64_t i = 0; i < m; i++) kept[i] = mean[i] / largest;
        }
        base += bases->k * r * m;
    }
    return DONE;
}
