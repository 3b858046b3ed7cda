/* Integers from -levels to levels, `parts` to a byte as balanced digits: int8, int4, QSGD and TernGrad. */

INLINE float scale_by_largest(const float *x, int n, int levels) {
    return above_zero(number_of(largest_of(x, n)) / (float)levels);
}

/* A finite block has a finite scale. */
INLINE float scale_by_norm(const float *x, int n, int levels) {
    const double scale = sqrt(sum_of(x, n, 1)) / levels;
    return above_zero(scale > FLT_MAX && scale <= DBL_MAX ? FLT_MAX : (float)scale);
}

/* Encode m of the bytes. Number k + p·n/parts of a block is digit p of byte k, in base 2^(8/parts). */
INLINE void encode_digits(
    const int parts, const int draws, const int keeps, const Source block, float scale, Division by, int start, int m
) {
    const int bytes = block.n / parts, base = 1 << 8 / parts;
    const float most = (float)abs(block.levels);
    int32_t drawn[4][SOME], codes[SOME];
    for (int p = 0; draws && p < parts; p++) draw(block.noise, start + p * bytes, m, drawn[p]);
    INDEPENDENT
    for (int i = 0; i < m; i++) {
        int32_t packed = 0;
        for (int p = parts - 1; p >= 0; p--) {
            const int j = start + i + p * bytes;
            float number = divided(block.x[j], by);
            number = draws ? rounded_down(number + uniform_of(drawn[p][i])) : nearest_integer(number);
            number = number > -most ? number : -most; /* NaN too: only integers may be converted */
            number = number < most ? number : most;
            packed = packed * base + (int32_t)number;
            leave_out(keeps, block, j, number * scale);
        }
        codes[i] = packed;
    }
    narrow(codes, m, block.codes + start);
}

/* Negative levels: the scale is made of the norm. */
INLINE void encode_uniform(const int parts, const int draws, const int keeps, const Source block) {
    const float *x = block.x;
    const int n = block.n, bytes = n / parts, some = SOME / parts;
    const float scale = block.levels < 0 ? scale_by_norm(x, n, -block.levels) : scale_by_largest(x, n, block.levels);
    const Division by = division_by(scale);
    int start = 0;
    for (; start + some <= bytes; start += some) encode_digits(parts, draws, keeps, block, scale, by, start, some);
    if (start < bytes) encode_digits(parts, draws, keeps, block, scale, by, start, bytes - start);
    write_float(block.scales, scale);
}

INLINE void decode_uniform(const int parts, float scale, const Sink sink) {
    const int bytes = sink.n / parts, bits = 8 / parts;
    for (int start = 0; start < bytes; start += SOME) {
        const int m = at_most(bytes - start, SOME);
        int32_t codes[SOME];
        widen(sink.codes + start, m, codes);
        INDEPENDENT
        for (int i = 0; i < m; i++) {
            int32_t rest = codes[i];
            for (int p = 0; p < parts; p++) {
                const int32_t digit = parts == 1 ? rest : (int32_t)((uint32_t)rest << (32 - bits)) >> (32 - bits);
                rest = (rest - digit) >> bits;
                put(sink, start + i + p * bytes, (float)digit * scale);
            }
        }
    }
}

#define UNIFORM_CODE(name, parts) \
    ENCODED(name##_drawn, encode_uniform, parts, 1) \
    ENCODED(name##_nearest, encode_uniform, parts, 0) \
    DECODED(name, decode_uniform, parts, read_float(scales))

UNIFORM_CODE(bytes, 1)
UNIFORM_CODE(halves, 2)
UNIFORM_CODE(quarters, 4)
