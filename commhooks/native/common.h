/* What all passes use: constants, bits of numbers, noise, and what becomes of a decoded number. */
#ifndef COMMHOOKS_COMMON_H
#define COMMHOOKS_COMMON_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __FAST_MATH__
#error "all levels must compute the same bits: do not compile with -ffast-math"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "codes and noise are read as little-endian numbers"
#endif

/* Inlined with constant arguments: each call is compiled for its kind of code. */
#define INLINE static inline __attribute__((always_inline))
/* Iterations are independent, although a loop may read and write one array, each at its own index. */
#define INDEPENDENT _Pragma("GCC ivdep")
#define SMALLEST 0x1p-149f /* the smallest number above 0, a denormal one */

/* Each level has its own translation unit, whose exported names end in the level's. */
#define JOINED_(name, level) commhooks_##name##_##level
#define JOINED(name, level) JOINED_(name, level)
#define EXPORTED(name) __attribute__((visibility("default"))) JOINED(name, LEVEL)

INLINE int32_t bits_of(float number) {
    int32_t bits;
    memcpy(&bits, &number, 4);
    return bits;
}

INLINE float number_of(int32_t bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE int32_t read_int(const uint8_t *from) {
    int32_t bits;
    memcpy(&bits, from, 4);
    return bits;
}

INLINE float read_float(const uint8_t *from) { return number_of(read_int(from)); }

INLINE void write_float(uint8_t *to, float number) { memcpy(to, &number, 4); }

/* A block's noise: a row of the step's table, and a number that is added to all of it, modulo 2^16. */
typedef struct {
    const uint16_t *row;
    uint16_t shift;
} Noise;

/* Return a number in (0, 1), of one of 2^16; no operation rounds. */
INLINE float uniform_of(int32_t drawn) { return ((float)drawn + 0.5f) * 0x1p-16f; }

/* Round numbers below 2^22, down or to nearest (ties to even); 0 has no sign. NaN gives NaN. */
#define SHIFTER 0x1.8p23f /* from here on numbers are integers */
INLINE float nearest_integer(float number) { return (number + SHIFTER) - SHIFTER; }
#if defined(__x86_64__) && !defined(__SSE4_1__)
INLINE float rounded_down(float number) {
    const float nearest = nearest_integer(number);
    return nearest > number ? nearest - 1.0f : nearest;
}
#else
INLINE float rounded_down(float number) { return floorf(number); }
#endif

/* Return the bits of the largest magnitude; NaN's are the largest of all. */
INLINE int32_t largest_of(const float *x, int n) {
    int32_t largest = 0;
    for (int j = 0; j < n; j++) {
        const int32_t magnitude = bits_of(x[j]) & INT32_MAX;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Return a scale that is not 0; NaN stays NaN. */
INLINE float above_zero(float scale) { return scale < SMALLEST ? SMALLEST : scale; }

/* What numbers are divided by a scale with: x / scale is (x · up) · inverse, so that denormal numbers are no exception. */
typedef struct {
    float up, inverse;
} Division;

INLINE Division division_by(float scale) {
    const float up = scale < 0x1p-64f ? 0x1p64f : 1.0f;
    return (Division){up, 1.0f / (scale * up)};
}

INLINE float divided(float number, Division by) { return (number * by.up) * by.inverse; }

/* Bytes and 16-bit numbers are converted to 32 bits, and back, some at a time, in loops of their own: vectors are fastest
   in loops over numbers of one width. */
#define SOME 128
#ifdef __AVX512F__
#include <immintrin.h>
#define WHOLE(m) ((m) / 16 * 16)
INLINE void narrow_16(const int32_t *from, uint8_t *to) {
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(_mm512_loadu_si512(from)));
}
INLINE void widen_16(const uint8_t *from, int32_t *to) {
    _mm512_storeu_si512(to, _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
#else
#define WHOLE(m) 0
INLINE void narrow_16(const int32_t *from, uint8_t *to) { (void)from, (void)to; }
INLINE void widen_16(const uint8_t *from, int32_t *to) { (void)from, (void)to; }
#endif

INLINE void narrow(const int32_t *from, int m, uint8_t *to) {
    for (int i = 0; i < WHOLE(m); i += 16) narrow_16(from + i, to + i);
    for (int i = WHOLE(m); i < m; i++) to[i] = (uint8_t)from[i];
}

/* Bytes keep their signs. */
INLINE void widen(const uint8_t *from, int m, int32_t *to) {
    for (int i = 0; i < WHOLE(m); i += 16) widen_16(from + i, to + i);
    for (int i = WHOLE(m); i < m; i++) to[i] = (int8_t)from[i];
}

/* Return what m elements from j on draw: numbers below 2^16. */
INLINE void draw(Noise noise, int j, int m, int32_t *to) {
    for (int i = 0; i < m; i++) to[i] = (uint16_t)(noise.row[j + i] + noise.shift);
}

INLINE int at_most(int m, int most) { return m < most ? m : most; }

/* What a block is encoded from and to. `left` gets what the code leaves out of x; it may be x, or NULL for nobody. */
typedef struct {
    int n, levels;
    const float *x;
    uint8_t *scales, *codes;
    Noise noise;
    float *left;
    float damping;
} Source;

/* Define a function that encodes a block, by one that takes in addition whether something is left out. */
#define ENCODED(name, encode, ...) \
    static void name(const Source *block) { block->left ? encode(__VA_ARGS__, 1, *block) : encode(__VA_ARGS__, 0, *block); }

INLINE void leave_out(const int keeps, const Source block, int j, float decoded) {
    if (keeps) block.left[j] = block.x[j] - decoded * block.damping;
}

/* Where a block is decoded to, and whether it is added there, as one rank's share. */
typedef struct {
    const int adds;
    int n;
    const uint8_t *scales, *codes;
    float *out;
    float damping, share;
} Sink;

INLINE void put(const Sink sink, int j, float decoded) {
    if (sink.adds)
        sink.out[j] += decoded * sink.damping * sink.share;
    else
        sink.out[j] = decoded * sink.damping;
}

#define DECODE(name) \
    static void name(int n, const uint8_t *scales, const uint8_t *codes, float *out, float damping, float share)

/* Define the two functions that decode a kind of code. */
#define DECODED(name, decode, ...) \
    DECODE(name##_write) { decode(__VA_ARGS__, (Sink){0, n, scales, codes, out, damping, share}); } \
    DECODE(name##_add) { decode(__VA_ARGS__, (Sink){1, n, scales, codes, out, damping, share}); }

#endif
