/* One bit per element: bit b of byte k is the sign of element k + b·n/8, 1 if negative. Sign and vote. */

/* Signs of zeros are drawn if `draws`: they are positive if the noise is below 1/2. */
INLINE void encode_signs(const int draws, int n, const float *x, uint8_t *codes, Noise noise) {
    const int bytes = n / 8;
    INDEPENDENT
    for (int k = 0; k < bytes; k++) {
        uint32_t packed = 0;
        for (int b = 0; b < 8; b++) {
            const int j = k + b * bytes;
            uint32_t sign = (uint32_t)bits_of(x[j]) >> 31;
            if (draws) sign = x[j] == 0.0f ? (uint32_t)drawn(noise, j) >> 15 : sign;
            packed |= sign << b;
        }
        codes[k] = (uint8_t)packed;
    }
}

INLINE void decode_signs(int n, float scale, const uint8_t *codes, const Sink sink) {
    const int bytes = n / 8;
    INDEPENDENT
    for (int k = 0; k < bytes; k++) {
        const uint32_t packed = codes[k];
        for (int b = 0; b < 8; b++) {
            const uint32_t sign = packed << (31 - b) & 0x80000000u;
            put(sink, k + b * bytes, number_of((int32_t)(sign | (uint32_t)bits_of(scale))));
        }
    }
}

ENCODE(sign_encode) {
    write_float(scales, (float)(sum_of(x, n, 0) / n)); /* the mean magnitude */
    encode_signs(0, n, x, codes, noise);
}
DECODED(sign, decode_signs, n, read_float(scales), codes)

ENCODE(vote_encode) { encode_signs(1, n, x, codes, noise); }
DECODED(vote, decode_signs, n, 1.0f, codes)
