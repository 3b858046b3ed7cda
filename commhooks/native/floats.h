/* Floating-point numbers of 8 or 4 bits: E4M3 (FP8), powers of two (natural), and E2M1 with shared exponents (MXFP4). */

#define LARGEST_E4M3 448.0f

/* Return bits of a float rounded to nearest after `kept` fraction bits (ties to even), and shifted to the right end. */
INLINE int32_t rounded_bits(int32_t bits, const int kept) {
    const int cut = 23 - kept;
    return (bits + ((1 << (cut - 1)) - 1) + (bits >> cut & 1)) >> cut;
}

/* Return the nearest E4M3 number as a byte, and set `rounded` to it. */
INLINE int32_t to_e4m3(float number, float *rounded) {
    const int32_t sign = bits_of(number) & INT32_MIN;
    float magnitude = number_of(bits_of(number) & INT32_MAX);
    magnitude = magnitude < LARGEST_E4M3 ? magnitude : LARGEST_E4M3; /* NaN too */
    const int32_t normal = rounded_bits(bits_of(magnitude), 3);
    const float shifted = magnitude + 0x1p14f; /* where numbers are multiples of 2^-9 */
    const int is_normal = magnitude >= 0x1p-6f;
    const int32_t bits = is_normal ? normal << 20 : bits_of(shifted - 0x1p14f);
    *rounded = number_of(bits | sign);
    return (is_normal ? normal - (127 - 7) * 8 : bits_of(shifted) - bits_of(0x1p14f)) | (sign >> 24 & 128);
}

INLINE float from_e4m3(int32_t byte) {
    const int32_t magnitude = byte & 127;
    int32_t bits = magnitude < 8 ? bits_of((float)magnitude * 0x1p-9f) : (magnitude << 20) + ((127 - 7) << 23);
    bits = magnitude == 127 ? 0x7fc00000 : bits; /* NaN */
    return number_of((int32_t)((uint32_t)bits | (uint32_t)(byte & 128) << 24));
}

/* Return the first power of two that is not below a magnitude, given as bits; NaN if that is inf or NaN. */
INLINE float next_power(int32_t largest) {
    if (largest >= 0x7f800000) return NAN;
    if (largest >= 0x800000) return number_of((largest + 0x7fffff) & 0x7f800000);
    int32_t power = 1; /* a denormal number's bits are how many times SMALLEST it is */
    while (power < largest) power *= 2;
    return number_of(power);
}

/* The noise carries from the fraction into the exponent with the fraction as its probability. */
INLINE int32_t to_natural(float number, int32_t drawn) {
    const int32_t carried = (int32_t)((uint32_t)bits_of(number) + (uint32_t)(drawn << 7 | 64));
    const int32_t exponent = carried >> 23; /* with the sign, two bits further up */
    return exponent | (exponent >> 1 & 128);
}

INLINE float from_natural(int32_t byte) {
    return number_of((int32_t)((uint32_t)(byte & 128) << 24 | (uint32_t)(byte & 127) << 23));
}

/* FP8 and natural: a byte for each element. */
INLINE void encode_bytes(const int is_natural, const int keeps, const Source block) {
    const int32_t largest = largest_of(block.x, block.n);
    const float scale = is_natural ? next_power(largest) : above_zero(number_of(largest) / LARGEST_E4M3);
    const Division by = division_by(scale);
    for (int start = 0; start < block.n; start += SOME) {
        const int m = at_most(block.n - start, SOME);
        int32_t drawn[SOME], codes[SOME];
        if (is_natural) draw(block.noise, start, m, drawn);
        INDEPENDENT
        for (int i = 0; i < m; i++) {
            const float number = divided(block.x[start + i], by);
            float rounded;
            if (is_natural) {
                codes[i] = to_natural(number, drawn[i]);
                rounded = from_natural(codes[i]);
            } else {
                codes[i] = to_e4m3(number, &rounded);
            }
            leave_out(keeps, block, start + i, rounded * scale);
        }
        narrow(codes, m, block.codes + start);
    }
    write_float(block.scales, scale);
}

INLINE void decode_bytes(const int is_natural, float scale, const Sink sink) {
    for (int start = 0; start < sink.n; start += SOME) {
        const int m = at_most(sink.n - start, SOME);
        int32_t codes[SOME];
        widen(sink.codes + start, m, codes);
        INDEPENDENT
        for (int i = 0; i < m; i++)
            put(sink, start + i, (is_natural ? from_natural(codes[i]) : from_e4m3(codes[i])) * scale);
    }
}

ENCODED(fp8_encode, encode_bytes, 0)
DECODED(fp8, decode_bytes, 0, read_float(scales))
ENCODED(natural_encode, encode_bytes, 1)
DECODED(natural, decode_bytes, 1, read_float(scales))

#define GROUP 32

/* Return the power of two of an exponent byte: 2^-127 for 0, which is no normal number, and inf for 255. */
INLINE float power_of(int32_t exponent) { return number_of(exponent ? exponent << 23 : 1 << 22); }

/* Return the nearest of 0, 1/2, 1, 3/2, 2, 3, 4 and 6 as its index, ties to even, and 8 more for negative numbers. */
INLINE int32_t to_e2m1(float number) {
    const float magnitude = number_of(bits_of(number) & INT32_MAX);
    const float limited = magnitude < 6.0f ? magnitude : 6.0f; /* NaN too */
    const int32_t normal = rounded_bits(bits_of(limited), 1) - (127 - 1) * 2;
    const int32_t subnormal = bits_of(limited + 0x1p22f) - bits_of(0x1p22f); /* in steps of 1/2 */
    return (limited < 1.0f ? subnormal : normal) | (number < 0.0f ? 8 : 0);
}

INLINE float from_e2m1(int32_t nibble) {
    const int32_t index = nibble & 7;
    const int32_t bits = index < 2 ? bits_of((float)index * 0.5f) : (index + (127 - 1) * 2) << 22;
    return number_of((int32_t)((uint32_t)bits | (uint32_t)(nibble & 8) << 28));
}

/* Byte k has number k in its low four bits, and number k + n/2 in its high ones. Encode `few` of the bytes, which belong
   to one group each way. */
INLINE void encode_halves(const int few, const int keeps, const Source block, int start) {
    const float *x = block.x;
    const int bytes = block.n / 2;
    const float low = power_of(block.scales[start / GROUP]), high = power_of(block.scales[(start + bytes) / GROUP]);
    const float by_low = 1.0f / low, by_high = 1.0f / high;
    int32_t codes[GROUP];
    INDEPENDENT
    for (int i = 0; i < few; i++) {
        const int j = start + i;
        const int32_t first = to_e2m1(x[j] * by_low), second = to_e2m1(x[j + bytes] * by_high);
        codes[i] = first | second << 4;
        leave_out(keeps, block, j, from_e2m1(first) * low);
        leave_out(keeps, block, j + bytes, from_e2m1(second) * high);
    }
    narrow(codes, few, block.codes + start);
}

INLINE void encode_mxfp4(const int keeps, const Source block) {
    const int bytes = block.n / 2;
    for (int g = 0; g < block.n / GROUP; g++) {
        const int32_t exponent = largest_of(block.x + g * GROUP, GROUP) >> 23; /* 127 more than the largest's */
        block.scales[g] = (uint8_t)(exponent == 255 ? 255 : exponent < 2 ? 0 : exponent - 2);
    }
    if (bytes % GROUP)
        for (int start = 0; start < bytes; start += GROUP / 2) encode_halves(GROUP / 2, keeps, block, start);
    else
        for (int start = 0; start < bytes; start += GROUP) encode_halves(GROUP, keeps, block, start);
}

INLINE void decode_halves(const int few, const Sink sink, int start) {
    const int bytes = sink.n / 2;
    const float low = power_of(sink.scales[start / GROUP]), high = power_of(sink.scales[(start + bytes) / GROUP]);
    int32_t codes[GROUP];
    widen(sink.codes + start, few, codes);
    INDEPENDENT
    for (int i = 0; i < few; i++) {
        put(sink, start + i, from_e2m1(codes[i]) * low);
        put(sink, start + i + bytes, from_e2m1(codes[i] >> 4) * high);
    }
}

INLINE void decode_mxfp4(const Sink sink) {
    const int bytes = sink.n / 2;
    if (bytes % GROUP)
        for (int start = 0; start < bytes; start += GROUP / 2) decode_halves(GROUP / 2, sink, start);
    else
        for (int start = 0; start < bytes; start += GROUP) decode_halves(GROUP, sink, start);
}

static void mxfp4_encode(const Source *block) { block->left ? encode_mxfp4(1, *block) : encode_mxfp4(0, *block); }
DECODE(mxfp4_write) { decode_mxfp4((Sink){0, n, scales, codes, out, damping, share}); }
DECODE(mxfp4_add) { decode_mxfp4((Sink){1, n, scales, codes, out, damping, share}); }
