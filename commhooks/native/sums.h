/* Sums in double: 16 running sums, of elements that are 16 apart, added up in pairs; the same at every level. */

#if defined(__AVX512F__)
#define DOUBLES 8
#elif defined(__AVX__)
#define DOUBLES 4
#else
#define DOUBLES 2
#endif
typedef double Doubles __attribute__((vector_size(8 * DOUBLES)));
typedef float Floats __attribute__((vector_size(4 * DOUBLES)));
typedef int32_t Ints __attribute__((vector_size(4 * DOUBLES)));

INLINE void add_16(Doubles *sums, const float *x, const int squares) {
    for (int i = 0; i < 16 / DOUBLES; i++) {
        Ints bits;
        memcpy(&bits, x + i * DOUBLES, sizeof bits);
        bits &= INT32_MAX;
        const Doubles magnitudes = __builtin_convertvector((Floats)bits, Doubles);
        sums[i] += squares ? magnitudes * magnitudes : magnitudes;
    }
}

/* Return the sum of magnitudes, or of their squares. */
INLINE double sum_of(const float *x, int n, const int squares) {
    Doubles sums[16 / DOUBLES];
    double single[16];
    memset(sums, 0, sizeof sums);
    int j = 0;
    for (; j + 16 <= n; j += 16) add_16(sums, x + j, squares);
    if (j < n) {
        float rest[16] = {0};
        memcpy(rest, x + j, (size_t)(n - j) * 4);
        add_16(sums, rest, squares);
    }
    memcpy(single, sums, sizeof sums);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) single[i] += single[i + half];
    return single[0];
}
