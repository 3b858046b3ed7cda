/* One bit per element: bit b of byte k is the sign of element k + b·n/8, 1 if negative. Sign and vote. */

INLINE float signed_number(uint32_t sign, float magnitude) {
    return number_of((int32_t)(sign << 31 | (uint32_t)bits_of(magnitude)));
}

/* The scale of `sign` is the mean magnitude. A vote has none, and draws the signs of zeros: they are positive if the
   noise is below 1/2. */
INLINE void encode_signs(const int is_vote, const int keeps, const Source block) {
    const float *x = block.x;
    const int bytes = block.n / 8;
    const float scale = is_vote ? 1.0f : (float)(sum_of(x, block.n, 0) / block.n);
    for (int start = 0; start < bytes; start += SOME) {
        const int m = at_most(bytes - start, SOME);
        int32_t drawn[8][SOME], codes[SOME];
        for (int b = 0; is_vote && b < 8; b++) draw(block.noise, start + b * bytes, m, drawn[b]);
        INDEPENDENT
        for (int i = 0; i < m; i++) {
            uint32_t packed = 0;
            for (int b = 0; b < 8; b++) {
                const int j = start + i + b * bytes;
                uint32_t sign = (uint32_t)bits_of(x[j]) >> 31;
                if (is_vote) sign = x[j] == 0.0f ? (uint32_t)drawn[b][i] >> 15 : sign;
                packed |= sign << b;
                leave_out(keeps, block, j, signed_number(sign, scale));
            }
            codes[i] = (int32_t)packed;
        }
        narrow(codes, m, block.codes + start);
    }
    if (!is_vote) write_float(block.scales, scale);
}

INLINE void decode_signs(float scale, const Sink sink) {
    const int bytes = sink.n / 8;
    for (int start = 0; start < bytes; start += SOME) {
        const int m = at_most(bytes - start, SOME);
        int32_t codes[SOME];
        widen(sink.codes + start, m, codes);
        INDEPENDENT
        for (int i = 0; i < m; i++)
            for (int b = 0; b < 8; b++) put(sink, start + i + b * bytes, signed_number((uint32_t)codes[i] >> b, scale));
    }
}

ENCODED(sign_encode, encode_signs, 0)
DECODED(sign, decode_signs, read_float(scales))
ENCODED(vote_encode, encode_signs, 1)
DECODED(vote, decode_signs, 1.0f)
