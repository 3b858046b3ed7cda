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
    void (*encode)(const Source *);
    void (*write)(int, const uint8_t *, const uint8_t *, float *, float, float);
    void (*add)(int, const uint8_t *, const uint8_t *, float *, float, float);
} Code;

#define CODE(encode, name) {encode, name##_write, name##_add}

/* Return the functions of a kind, or NULL if there is none with these levels, or with or without noise. */
static const Code *code_of(int64_t kind, int64_t levels, int draws) {
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

/* The arguments of a pass, as `passes.py` packs them. */

typedef struct {
    uint8_t *data;
    int64_t rank, row; /* bytes from one to the next */
} Payload;

/* The rows of a message that blocks take: `rows`, or those from `first` on; row q is row q % b of rank q / b. */
typedef struct {
    const int64_t *rows;
    int64_t first, b, all;
} Rows;

typedef struct {
    const uint16_t *table; /* NULL: nothing is drawn */
    int64_t rows;
    const int32_t *row;
    const uint8_t *shift;
    int64_t step; /* bytes from one shift to the next */
} Noises;

typedef struct {
    int64_t kind, levels, n;
    double damping;
} Form;

/* Some blocks of state that lie one after another: those up to `end`, of which number 0 would be at `first`. */
typedef struct {
    int64_t end, first;
} Segment;

typedef struct {
    Form form;
    Payload scales, codes;
    Rows rows;
    float *blocks;
    Noises noises;
    int64_t keeps;
    const Segment *residuals; /* or NULL */
} Send;

typedef struct {
    Form form;
    Payload scales, codes;
    Rows rows;
    float *blocks;
} Write;

typedef struct {
    Form form;
    Payload scales, codes;
    int64_t ranks;
    Payload out_scales, out_codes;
    const float *error; /* or NULL */
    float *left;        /* or NULL */
    Noises noises;
    const Segment *errors; /* or NULL */
} Serve;

INLINE uint8_t *at(const Payload *payload, int64_t rank, int64_t row) {
    return payload->data + rank * payload->rank + row * payload->row;
}

INLINE int row_of(const Rows *rows, int64_t i, int64_t *rank, int64_t *row) {
    const int64_t q = rows->rows ? rows->rows[i] : rows->first + i;
    if (q < 0 || q >= rows->all) return 0;
    *rank = rows->all <= UINT32_MAX ? (uint32_t)q / (uint32_t)rows->b : q / rows->b; /* the first is faster */
    *row = q - *rank * rows->b;
    return 1;
}

INLINE int noise_of(const Noises *noises, int n, int64_t i, Noise *noise) {
    if (!noises->table) return 1;
    const int64_t row = noises->row[i];
    if (row < 0 || row >= noises->rows) return 0;
    noise->row = noises->table + row * n;
    memcpy(&noise->shift, noises->shift + i * noises->step, 2);
    return 1;
}

/* Return block i of state; call it with growing i, and a segment to begin with. */
INLINE float *block_of(const Segment **segment, int n, int64_t i) {
    while (i >= (*segment)->end) ++*segment;
    return (float *)((*segment)->first + i * n * (int64_t)sizeof(float));
}

/* Write y plus a block of state to `sum`, and what the state was to `before`. Either may be `state` or `y`. */
INLINE void add_state(const float *state, int n, const float *y, float *before, float *sum) {
    INDEPENDENT
    for (int j = 0; j < n; j++) {
        const float old = state[j];
        sum[j] = y[j] + old;
        before[j] = old;
    }
}

/* What `encode` takes for levels: negative ones, if a scale is made of the norm. */
INLINE int levels_of(const Form *form) { return (int)(form->kind == QSGD ? -form->levels : form->levels); }

/* Encode blocks [k, n], from `start` to `end`, into rows of a message. If `keeps`, they become what the codes leave out.
   With `residuals`, these are added first and become what the codes leave out, and the blocks become what they were.
   Returns the bits of a vote's largest magnitude. */
int EXPORTED(send)(int64_t start, int64_t end, const Send *pass) {
    const Form *form = &pass->form;
    const Code *code = code_of(form->kind, form->levels, pass->noises.table != NULL);
    if (!code) return NO_SUCH_CODE;
    const int n = (int)form->n, levels = levels_of(form);
    const float damping = (float)form->damping;
    const Segment *segment = pass->residuals;
    float on_stack[ON_STACK];
    float *sum = segment && n > ON_STACK ? malloc((size_t)n * sizeof *sum) : on_stack;
    if (!sum) return NO_MEMORY;
    Noise noise = {0};
    int32_t largest = 0;
    for (int64_t i = start; i < end; i++) {
        int64_t rank, row;
        if (!row_of(&pass->rows, i, &rank, &row) || !noise_of(&pass->noises, n, i, &noise)) {
            largest = NO_SUCH_ROW;
            break;
        }
        float *x = pass->blocks + i * n, *left = pass->keeps ? x : NULL;
        if (segment) {
            left = block_of(&segment, n, i);
            add_state(left, n, x, x, sum);
            x = sum;
        }
        if (form->kind == VOTE) {
            const int32_t bits = largest_of(x, n);
            largest = bits > largest ? bits : largest;
        }
        const Source block = {
            n, levels, x, at(&pass->scales, rank, row), at(&pass->codes, rank, row), noise, left, damping,
        };
        code->encode(&block);
    }
    if (sum != on_stack) free(sum);
    return largest;
}

/* Decode rows of a message into blocks [k, n], from `start` to `end`. */
int EXPORTED(write)(int64_t start, int64_t end, const Write *pass) {
    const Form *form = &pass->form;
    const Code *code = code_of(form->kind, form->levels, form->kind == VOTE || form->kind == NATURAL);
    if (!code) return NO_SUCH_CODE;
    const int n = (int)form->n;
    const float damping = (float)form->damping;
    for (int64_t i = start; i < end; i++) {
        int64_t rank, row;
        if (!row_of(&pass->rows, i, &rank, &row)) return NO_SUCH_ROW;
        code->write(n, at(&pass->scales, rank, row), at(&pass->codes, rank, row), pass->blocks + i * n, damping, 1.0f);
    }
    return DONE;
}

/* Decode rows of all ranks, from `start` to `end`, and encode their means plus `error` [k, n] into as many rows; `left`
   [k, n] becomes what these codes leave out. With `errors`, these are added and become what the codes leave out, and
   `left` becomes what they were. */
int EXPORTED(serve)(int64_t start, int64_t end, const Serve *pass) {
    const Form *form = &pass->form;
    const Code *code = code_of(form->kind, form->levels, pass->noises.table != NULL);
    if (!code) return NO_SUCH_CODE;
    const int n = (int)form->n, levels = levels_of(form);
    const float damping = (float)form->damping;
    float on_stack[ON_STACK];
    float *y = n <= ON_STACK ? on_stack : malloc((size_t)n * sizeof *y);
    if (!y) return NO_MEMORY;
    float share = 1.0f; /* the largest power of two that is at most 1/ranks, so that no sum of finite numbers is inf */
    while ((float)pass->ranks * share > 1.0f) share *= 0.5f;
    const float rest = (float)pass->ranks * share;
    const Segment *segment = pass->errors;
    Noise noise = {0};
    int done = DONE;
    for (int64_t i = start; i < end; i++) {
        if (!noise_of(&pass->noises, n, i, &noise)) {
            done = NO_SUCH_ROW;
            break;
        }
        for (int j = 0; j < n; j++) y[j] = -0.0f; /* plus any number is that number, -0 too */
        for (int64_t rank = 0; rank < pass->ranks; rank++)
            code->add(n, at(&pass->scales, rank, i), at(&pass->codes, rank, i), y, damping, share);
        if (rest != 1.0f)
            for (int j = 0; j < n; j++) y[j] /= rest;
        if (pass->error)
            for (int j = 0; j < n; j++) y[j] += pass->error[i * n + j];
        float *left = pass->left ? pass->left + i * n : NULL;
        if (segment) {
            float *error = block_of(&segment, n, i);
            add_state(error, n, y, left, y);
            left = error;
        }
        const Source block = {n, levels, y, at(&pass->out_scales, 0, i), at(&pass->out_codes, 0, i), noise, left, damping};
        code->encode(&block);
    }
    if (y != on_stack) free(y);
    return done;
}

#include "largest.h"
#include "low_rank.h"
#include "orthonormal.h"
