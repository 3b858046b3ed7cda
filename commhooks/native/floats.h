/* Floating-point numbers of 8 or 4 bits: E4M3 (FP8), powers of two (natural), and E2M1 with shared exponents (MXFP4). */

#define LARGEST_E4M3 448.0f

/* Return bits of a float rounded to nearest after `kept` fraction bits (ties to even), and shifted to the right end. */
INLINE int32_t rounded_bits(int32_t bits, const int kept) {
    const int cut = 23 - kept;
    return (bits + ((1 << (cut - 1)) - 1) + (bits >> cut & 1)) >> cut;
}

ENCODE(fp8_encode) {
    const float scale = above_zero(number_of(largest_of(x, n)) / LARGEST_E4M3);
    write_float(scales, scale);
    const Division by = division_by(scale);
    INDEPENDENT
    for (int j = 0; j < n; j++) {
        const float number = divided(x[j], by);
        const int32_t bits = bits_of(number);
        float magnitude = number_of(bits & INT32_MAX);
        magnitude = magnitude < LARGEST_E4M3 ? magnitude : LARGEST_E4M3; /* NaN too */
        const int32_t normal = rounded_bits(bits_of(magnitude), 3) - (127 - 7) * 8;
        const int32_t subnormal = bits_of(magnitude + 0x1p14f) - bits_of(0x1p14f); /* in steps of 2^-9 */
        codes[j] = (uint8_t)((magnitude < 0x1p-6f ? subnormal : normal) | (bits >> 24 & 128));
    }
}

INLINE void decode_fp8(int n, float scale, const uint8_t *codes, const Sink sink) {
    INDEPENDENT
    for (int j = 0; j < n; j++) {
        const int32_t byte = codes[j], magnitude = byte & 127;
        const int32_t normal = (magnitude << 20) + ((127 - 7) << 23);
        int32_t bits = magnitude < 8 ? bits_of((float)magnitude * 0x1p-9f) : normal;
        bits = magnitude == 127 ? 0x7fc00000 : bits; /* NaN */
        put(sink, j, number_of((int32_t)((uint32_t)bits | (uint32_t)(byte & 128) << 24)) * scale);
    }
}

DECODED(fp8, decode_fp8, n, read_float(scales), codes)

/* Return the first power of two that is not below a magnitude, given as bits; NaN if that is inf or NaN. */
INLINE float next_power(int32_t largest) {
    if (largest >= 0x7f800000) return NAN;
    if (largest >= 0x800000) return number_of((largest + 0x7fffff) & 0x7f800000);
    int32_t power = 1; /* a denormal number's bits are how many times SMALLEST it is */
    while (power < largest) power *= 2;
    return number_of(power);
}

/* The noise carries from the fraction into the exponent with the fraction as its probability. */
ENCODE(natural_encode) {
    const float scale = next_power(largest_of(x, n));
    write_float(scales, scale);
    const Division by = division_by(scale);
    INDEPENDENT
    for (int j = 0; j < n; j++) {
        const int32_t carried = (int32_t)((uint32_t)bits_of(divided(x[j], by)) + ((uint32_t)drawn(noise, j) << 7 | 64));
        const int32_t exponent = carried >> 23; /* with the sign, two bits further up */
        codes[j] = (uint8_t)(exponent | (exponent >> 1 & 128));
    }
}

INLINE void decode_natural(int n, float scale, const uint8_t *codes, const Sink sink) {
    INDEPENDENT
    for (int j = 0; j < n; j++) {
        const uint32_t byte = codes[j];
        put(sink, j, number_of((int32_t)((byte & 128) << 24 | (byte & 127) << 23)) * scale);
    }
}

DECODED(natural, decode_natural, n, read_float(scales), codes)

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

ENCODE(mxfp4_encode) {
    for (int g = 0; g < n / GROUP; g++) {
        const int32_t exponent = largest_of(x + g * GROUP, GROUP) >> 23; /* 127 more than the largest's */
        scales[g] = (uint8_t)(exponent == 255 ? 255 : exponent < 2 ? 0 : exponent - 2);
    }
    const int bytes = n / 2;
    for (int start = 0; start < bytes; start += GROUP / 2) {
        const float low = 1.0f / power_of(scales[start / GROUP]);
        const float high = 1.0f / power_of(scales[(start + bytes) / GROUP]);
        INDEPENDENT
        for (int k = start; k < start + GROUP / 2; k++)
            codes[k] = (uint8_t)(to_e2m1(x[k] * low) | to_e2m1(x[k + bytes] * high) << 4);
    }
}

INLINE void decode_mxfp4(int n, const uint8_t *scales, const uint8_t *codes, const Sink sink) {
    const int bytes = n / 2;
    for (int start = 0; start < bytes; start += GROUP / 2) {
        const float low = power_of(scales[start / GROUP]), high = power_of(scales[(start + bytes) / GROUP]);
        INDEPENDENT
        for (int k = start; k < start + GROUP / 2; k++) {
            put(sink, k, from_e2m1(codes[k]) * low);
            put(sink, k + bytes, from_e2m1(codes[k] >> 4) * high);
        }
    }
}

DECODED(mxfp4, decode_mxfp4, n, scales, codes)
