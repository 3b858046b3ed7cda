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

INLINE uint16_t drawn(Noise noise, int j) { return (uint16_t)(noise.row[j] + noise.shift); }

/* Return a number in (0, 1); no operation rounds. */
INLINE float uniform_of(Noise noise, int j) { return ((float)drawn(noise, j) + 0.5f) * 0x1p-16f; }

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

/* What becomes of a decoded number: it is written, or added to a mean as one rank's share, or taken from x. */
typedef enum { WRITTEN, ADDED, LEFT_OUT } Use;

typedef struct {
    const Use use;
    float *out;
    const float *x; /* of LEFT_OUT; may be `out` */
    float damping, share;
} Sink;

INLINE void put(const Sink sink, int j, float decoded) {
    const float damped = decoded * sink.damping;
    switch (sink.use) {
    case WRITTEN: sink.out[j] = damped; break;
    case ADDED: sink.out[j] += damped * sink.share; break;
    case LEFT_OUT: sink.out[j] = sink.x[j] - damped; break;
    }
}

/* A function that encodes a block of n elements x, and one that decodes it. Not all use all arguments. */
#define ENCODE(name) \
    static void name(int n, int levels, const float *x, uint8_t *scales, uint8_t *codes, Noise noise)
#define DECODE(name) \
    static void name(int n, const uint8_t *scales, const uint8_t *codes, float *out, const float *x, float damping, float share)

/* Define the three functions that decode a kind of code, by what becomes of the numbers. */
#define DECODED(name, decode, ...) \
    DECODE(name##_write) { decode(__VA_ARGS__, (Sink){WRITTEN, out, x, damping, share}); } \
    DECODE(name##_add) { decode(__VA_ARGS__, (Sink){ADDED, out, x, damping, share}); } \
    DECODE(name##_leave_out) { decode(__VA_ARGS__, (Sink){LEFT_OUT, out, x, damping, share}); }

#endif
