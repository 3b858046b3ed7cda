/* Integers from -levels to levels, `parts` to a byte as balanced digits: int8, int4, QSGD and TernGrad. */

INLINE float scale_by_largest(const float *x, int n, int levels) {
    return above_zero(number_of(largest_of(x, n)) / (float)levels);
}

/* A finite block has a finite scale. */
INLINE float scale_by_norm(const float *x, int n, int levels) {
    const double scale = sqrt(sum_of(x, n, 1)) / levels;
    return above_zero(scale > FLT_MAX && scale <= DBL_MAX ? FLT_MAX : (float)scale);
}

/* Number k + p·n/parts of a block is digit p of byte k, in base 2^(8/parts). Negative levels: the scale is made of the
   norm. */
INLINE void encode_uniform(
    const int parts, const int draws, int n, int levels, const float *x, uint8_t *scales, int8_t *codes, Noise noise
) {
    const int bytes = n / parts, base = 1 << 8 / parts;
    const float scale = levels < 0 ? scale_by_norm(x, n, -levels) : scale_by_largest(x, n, levels);
    const Division by = division_by(scale);
    const float most = (float)abs(levels);
    INDEPENDENT
    for (int k = 0; k < bytes; k++) {
        int packed = 0;
        for (int p = parts - 1; p >= 0; p--) {
            const int j = k + p * bytes;
            float number = divided(x[j], by);
            number = draws ? rounded_down(number + uniform_of(noise, j)) : nearest_integer(number);
            number = number > -most ? number : -most; /* NaN too: only integers may be converted */
            number = number < most ? number : most;
            packed = packed * base + (int)number;
        }
        codes[k] = (int8_t)packed;
    }
    write_float(scales, scale);
}

INLINE void decode_uniform(const int parts, int n, float scale, const int8_t *codes, const Sink sink) {
    const int bytes = n / parts, bits = 8 / parts;
    INDEPENDENT
    for (int k = 0; k < bytes; k++) {
        int rest = codes[k];
        for (int p = 0; p < parts; p++) {
            const int digit = (int)((unsigned)rest << (32 - bits)) >> (32 - bits);
            rest = (rest - digit) >> bits;
            put(sink, k + p * bytes, (float)digit * scale);
        }
    }
}

#define UNIFORM_CODE(name, parts) \
    ENCODE(name##_drawn) { encode_uniform(parts, 1, n, levels, x, scales, (int8_t *)codes, noise); } \
    ENCODE(name##_nearest) { encode_uniform(parts, 0, n, levels, x, scales, (int8_t *)codes, noise); } \
    DECODED(name, decode_uniform, parts, n, read_float(scales), (const int8_t *)codes)

UNIFORM_CODE(bytes, 1)
UNIFORM_CODE(halves, 2)
UNIFORM_CODE(quarters, 4)
