/* The three passes of a code in two hops, over k blocks of n elements, at one level: send, serve and write.

   A code is one or two payloads: scales (MXFP4: exponents; a vote has none) and bytes. Each block is read, encoded and
   decoded while it is in the first cache. `passes.py` says what the arguments are, and checks them. */
#include "common.h"
#include "sums.h"

#include "floats.h"
#include "signs.h"
#include "uniform.h"

enum { UNIFORM, QSGD, SIGN, VOTE, FP8, NATURAL, MXFP4 };
enum { DONE = 0, NO_MEMORY = -1, NO_SUCH_ROW = -2, NO_SUCH_CODE = -3 };
#define ON_STACK 4096 /* floats */

typedef struct {
    void (*encode)(int, int, const float *, uint8_t *, uint8_t *, Noise);
    void (*write)(int, const uint8_t *, const uint8_t *, float *, const float *, float, float);
    void (*add)(int, const uint8_t *, const uint8_t *, float *, const float *, float, float);
    void (*leave_out)(int, const uint8_t *, const uint8_t *, float *, const float *, float, float);
} Code;

#define CODE(encode, name) {encode, name##_write, name##_add, name##_leave_out}

/* Return the functions of a kind, or NULL if there is none with these levels, or with or without noise. */
static const Code *code_of(int kind, int levels, int draws) {
    static const Code integers[3][2] = {
        {CODE(bytes_nearest, bytes), CODE(bytes_drawn, bytes)},
        {CODE(halves_nearest, halves), CODE(halves_drawn, halves)},
        {CODE(quarters_nearest, quarters), CODE(quarters_drawn, quarters)},
    };
    static const Code others[] = {
        [SIGN] = CODE(sign_encode, sign),
        [VOTE] = CODE(vote_encode, vote),
        [FP8] = CODE(fp8_encode, fp8),
        [NATURAL] = CODE(natural_encode, natural),
        [MXFP4] = CODE(mxfp4_encode, mxfp4),
    };
    if (kind == UNIFORM || kind == QSGD)
        return levels < 1 || levels > 127 ? NULL : &integers[levels > 7 ? 0 : levels > 1 ? 1 : 2][draws];
    const int is_known = kind >= SIGN && kind <= MXFP4 && draws == (kind == VOTE || kind == NATURAL);
    return is_known ? &others[kind] : NULL;
}

typedef struct {
    uint8_t *data;
    int64_t rank, row; /* bytes from one to the next */
} Payload;

INLINE uint8_t *at(const Payload *payload, int64_t rank, int64_t row) {
    return payload->data + rank * payload->rank + row * payload->row;
}

/* The rows of a message that blocks take: `rows`, or those from `first` on; row q is row q % b of rank q / b. */
typedef struct {
    const int64_t *rows;
    int64_t first, b, all;
} Rows;

INLINE int row_of(const Rows *rows, int64_t i, int64_t *rank, int64_t *row) {
    const int64_t q = rows->rows ? rows->rows[i] : rows->first + i;
    if (q < 0 || q >= rows->all) return 0;
    *rank = rows->all <= UINT32_MAX ? (uint32_t)q / (uint32_t)rows->b : q / rows->b; /* the first is faster */
    *row = q - *rank * rows->b;
    return 1;
}

typedef struct {
    const uint16_t *table; /* NULL: nothing is drawn */
    int64_t rows;
    const int32_t *row;
    const uint8_t *shift;
    int64_t step; /* bytes from one shift to the next */
} Noises;

INLINE int noise_of(const Noises *noises, int n, int64_t i, Noise *noise) {
    if (!noises->table) return 1;
    const int64_t row = noises->row[i];
    if (row < 0 || row >= noises->rows) return 0;
    noise->row = noises->table + row * n;
    memcpy(&noise->shift, noises->shift + i * noises->step, 2);
    return 1;
}

/* Encode blocks [k, n], from `start` to `end`, into rows of a message. If `keeps`, they become what the codes leave out.
   Returns the bits of a vote's largest magnitude. */
int EXPORTED(send)(
    int64_t start, int64_t end, int kind, int levels, int n, float *blocks,
    const int64_t *rows, int64_t first, int64_t b, int64_t all,
    uint8_t *scales, int64_t scales_rank, int64_t scales_row, uint8_t *codes, int64_t codes_rank, int64_t codes_row,
    const uint16_t *table, int64_t table_rows, const int32_t *row, const uint8_t *shift, int64_t step,
    int keeps, float damping
) {
    const Code *code = code_of(kind, levels, table != NULL);
    if (!code) return NO_SUCH_CODE;
    const Payload to_scales = {scales, scales_rank, scales_row}, to_codes = {codes, codes_rank, codes_row};
    const Rows places = {rows, first, b, all};
    const Noises noises = {table, table_rows, row, shift, step};
    Noise noise = {0};
    int32_t largest = 0;
    for (int64_t i = start; i < end; i++) {
        int64_t rank, place;
        if (!row_of(&places, i, &rank, &place) || !noise_of(&noises, n, i, &noise)) return NO_SUCH_ROW;
        float *x = blocks + i * n;
        uint8_t *own_scales = at(&to_scales, rank, place), *own_codes = at(&to_codes, rank, place);
        if (kind == VOTE) {
            const int32_t bits = largest_of(x, n);
            largest = bits > largest ? bits : largest;
        }
        code->encode(n, kind == QSGD ? -levels : levels, x, own_scales, own_codes, noise);
        if (keeps) code->leave_out(n, own_scales, own_codes, x, x, damping, 1.0f);
    }
    return largest;
}

/* Decode blocks of each rank, from row `start` to `end`, and encode their means plus `error` [k, n] into as many rows;
   `left` [k, n] becomes what these codes leave out. Both may be NULL. */
int EXPORTED(serve)(
    int64_t start, int64_t end, int kind, int levels, int n, int64_t ranks,
    uint8_t *scales, int64_t scales_rank, int64_t scales_row, uint8_t *codes, int64_t codes_rank, int64_t codes_row,
    const float *error, uint8_t *out_scales, int64_t out_scales_row, uint8_t *out_codes, int64_t out_codes_row, float *left,
    const uint16_t *table, int64_t table_rows, const int32_t *row, const uint8_t *shift, int64_t step,
    float damping
) {
    const Code *code = code_of(kind, levels, table != NULL);
    if (!code) return NO_SUCH_CODE;
    const Payload of_scales = {scales, scales_rank, scales_row}, of_codes = {codes, codes_rank, codes_row};
    const Noises noises = {table, table_rows, row, shift, step};
    Noise noise = {0};
    float on_stack[ON_STACK];
    float *y = n <= ON_STACK ? on_stack : malloc((size_t)n * sizeof *y);
    if (!y) return NO_MEMORY;
    float share = 1.0f; /* the largest power of two that is at most 1/ranks, so that no sum of finite numbers is inf */
    while ((float)ranks * share > 1.0f) share *= 0.5f;
    const float rest = (float)ranks * share;
    int done = DONE;
    for (int64_t i = start; i < end; i++) {
        if (!noise_of(&noises, n, i, &noise)) {
            done = NO_SUCH_ROW;
            break;
        }
        for (int j = 0; j < n; j++) y[j] = -0.0f; /* plus any number is that number, -0 too */
        for (int64_t rank = 0; rank < ranks; rank++)
            code->add(n, at(&of_scales, rank, i), at(&of_codes, rank, i), y, NULL, damping, share);
        if (rest != 1.0f)
            for (int j = 0; j < n; j++) y[j] /= rest;
        if (error)
            for (int j = 0; j < n; j++) y[j] += error[i * n + j];
        uint8_t *own_scales = out_scales + i * out_scales_row, *own_codes = out_codes + i * out_codes_row;
        code->encode(n, kind == QSGD ? -levels : levels, y, own_scales, own_codes, noise);
        if (left) code->leave_out(n, own_scales, own_codes, left + i * n, y, damping, 1.0f);
    }
    if (y != on_stack) free(y);
    return done;
}

/* Decode rows of a message into blocks [k, n], from `start` to `end`. */
int EXPORTED(write)(
    int64_t start, int64_t end, int kind, int levels, int n, float *blocks,
    const int64_t *rows, int64_t first, int64_t b, int64_t all,
    uint8_t *scales, int64_t scales_rank, int64_t scales_row, uint8_t *codes, int64_t codes_rank, int64_t codes_row,
    float damping
) {
    const Code *code = code_of(kind, levels, kind == VOTE || kind == NATURAL);
    if (!code) return NO_SUCH_CODE;
    const Payload of_scales = {scales, scales_rank, scales_row}, of_codes = {codes, codes_rank, codes_row};
    const Rows places = {rows, first, b, all};
    for (int64_t i = start; i < end; i++) {
        int64_t rank, place;
        if (!row_of(&places, i, &rank, &place)) return NO_SUCH_ROW;
        code->write(n, at(&of_scales, rank, place), at(&of_codes, rank, place), blocks + i * n, NULL, damping, 1.0f);
    }
    return DONE;
}
