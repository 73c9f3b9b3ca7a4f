/* The compiled loop: GGUF blocks to codes, scales and biases in one pass.
 *
 * Gives the bits that the functions of blocks.py give, or says that it cannot: a scale that is no
 * number, or a bias beyond float16, is left to them to judge. Optional; plain C99 without
 * intrinsics. Blocks are taken in batches whose codes lie side by side in small local arrays, where
 * any compiler turns the loops into vector instructions. Knows nothing about files or tensors; the
 * size of every buffer is checked before the first byte moves, because files are not trusted.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* Python 3.11, the first with buffers in the limited API */
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__)
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF blocks are little-endian; without this file numpy does the work."
#endif
#endif

/* The same loops once more for wider vectors, chosen by the loader, where the tools can do that. */
#if defined(__GNUC__) && defined(__x86_64__) && defined(__GLIBC__)
#define WIDER __attribute__((target_clones("avx2", "default")))
#else
#define WIDER
#endif

enum { BATCH = 32, K_GROUPS = 8 };
#define LOW_NIBBLES 0x0f0f0f0f0f0f0f0fu
#define FIFTH_BITS 0x1010101010101010u

/* Where the next batch goes. Scales and biases are float16, or float32 where `wide`. */
typedef struct {
    uint8_t *codes, *scales, *biases;
    int wide;
} Output;

static uint16_t load16(const uint8_t *from) {
    uint16_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint64_t load64(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static void store_float(uint8_t *to, size_t index, float value) {
    memcpy(to + 4 * index, &value, sizeof value);
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* A finite float16 in float32; subnormals by way of a whole number, which no processor flushes. */
static float widen(uint16_t half) {
    uint32_t magnitude = half & 0x7fffu, bits = (magnitude << 13) + (112u << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    if (magnitude < 0x400) value = (float)magnitude / 16777216.0f;
    return half & 0x8000 ? -value : value;
}

/* -scale * 2 ** power, exactly; 0x7c00 or more, sign aside, where it is beyond float16. */
static uint16_t zero_point(uint16_t scale, unsigned power) {
    uint32_t magnitude = scale & 0x7fffu, sign = ~scale & 0x8000u, raised = 0;
    if (magnitude >= 0x400) {
        magnitude += power << 10;
        if (magnitude > 0x7c00) magnitude = 0x7c00;
    } else {
        for (magnitude <<= power; magnitude >= 0x800; magnitude >>= 1) raised += 0x400;
    }
    return (uint16_t)(sign | (magnitude + raised));
}

/* Whether none of BATCH float16 numbers is infinite or NaN. */
static inline int all_finite(const uint16_t *halves) {
    uint16_t seen = 0;
    for (int i = 0; i < BATCH; i++) seen |= (uint16_t)((halves[i] & 0x7c00) + 0x400);
    return !(seen & 0x8000);
}

/* Biases of BATCH scales whose codes count from -2 ** power. */
static inline void zero_points(const uint16_t *scales, unsigned power, uint16_t *biases) {
    uint16_t out_of_range = 0, most = (uint16_t)(30 - power);
    for (int i = 0; i < BATCH; i++) {
        uint16_t exponent = scales[i] >> 10 & 0x1f;
        out_of_range |= (uint16_t)(exponent - 1) | (uint16_t)(most - exponent);
        biases[i] = (uint16_t)(scales[i] + 0x8000u + (power << 10));
    }
    if (!(out_of_range & 0x8000)) return;
    for (int i = 0; i < BATCH; i++) biases[i] = zero_point(scales[i], power);
}

/* n float16 numbers in the width of the output. */
static void put_halves(uint8_t *to, const uint16_t *halves, size_t n, int wide) {
    if (!wide) {
        memcpy(to, halves, 2 * n);
        return;
    }
    for (size_t i = 0; i < n; i++) store_float(to, i, widen(halves[i]));
}

/* Scale and bias that begin each block; returns whether they can be kept. */
WIDER static int put_stored(const uint8_t *blocks, size_t size, size_t n, const Output *out) {
    uint16_t scales[BATCH] = {0}, biases[BATCH] = {0};
    for (size_t i = 0; i < n; i++) {
        scales[i] = load16(blocks + size * i);
        biases[i] = load16(blocks + size * i + 2);
    }
    put_halves(out->scales, scales, n, out->wide);
    put_halves(out->biases, biases, n, out->wide);
    return all_finite(scales) & all_finite(biases);
}

/* The scale that begins each block, and the bias of codes that count from -2 ** power. */
WIDER static int put_centred(const uint8_t *blocks, size_t size, size_t n, unsigned power,
                       const Output *out) {
    uint16_t scales[BATCH] = {0}, biases[BATCH];
    for (size_t i = 0; i < n; i++) scales[i] = load16(blocks + size * i);
    put_halves(out->scales, scales, n, out->wide);
    if (out->wide) {
        float factor = (float)(1 << power);
        for (size_t i = 0; i < n; i++) store_float(out->biases, i, -(widen(scales[i]) * factor));
        return all_finite(scales);
    }
    zero_points(scales, power, biases);
    put_halves(out->biases, biases, n, 0);
    return all_finite(scales) & all_finite(biases);
}

/* d * s and -(dmin * m) of the eight groups of each K block. */
static int put_k(const uint8_t *blocks, size_t size, size_t n, const Output *out) {
    uint16_t scales[BATCH] = {0}, least[BATCH] = {0};
    for (size_t i = 0; i < n; i++) {
        const uint8_t *first = blocks + size * i + 4, *second = first + 4, *third = first + 8;
        uint8_t steps[2 * K_GROUPS];
        float d, dmin;
        scales[i] = load16(first - 4);
        least[i] = load16(first - 2);
        d = widen(scales[i]);
        dmin = -widen(least[i]);
        for (int k = 0; k < 4; k++) {
            steps[k] = first[k] & 0x3f;
            steps[4 + k] = (uint8_t)((third[k] & 0x0f) | (first[k] >> 2 & 0x30));
            steps[8 + k] = second[k] & 0x3f;
            steps[12 + k] = (uint8_t)(third[k] >> 4 | (second[k] >> 2 & 0x30));
        }
        for (size_t k = 0; k < K_GROUPS; k++) {
            store_float(out->scales, K_GROUPS * i + k, d * (float)steps[k]);
            store_float(out->biases, K_GROUPS * i + k, dmin * (float)steps[8 + k]);
        }
    }
    return all_finite(scales) & all_finite(least);
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* 2 n bytes that hold two codes each, to n bytes of the low codes and n of the high ones. */
static inline void pair_nibbles(const uint16_t *pairs, int n, uint8_t *low, uint8_t *high) {
    for (int i = 0; i < n; i++) {
        low[i] = (uint8_t)((pairs[i] & 0x0f) | (pairs[i] >> 4 & 0xf0));
        high[i] = (uint8_t)((pairs[i] >> 4 & 0x0f) | (pairs[i] >> 8 & 0xf0));
    }
}

/* The 16 bytes at `start` of each block, low codes first. */
WIDER static void pair_batch(const uint8_t *blocks, size_t size, size_t start, size_t n, uint8_t *codes) {
    uint16_t pairs[8 * BATCH];
    uint8_t low[8 * BATCH], high[8 * BATCH];
    if (n < BATCH) memset(pairs, 0, sizeof pairs);
    for (size_t i = 0; i < n; i++) memcpy(pairs + 8 * i, blocks + size * i + start, 16);
    pair_nibbles(pairs, 8 * BATCH, low, high);
    for (size_t i = 0; i < n; i++) {
        memcpy(codes + 16 * i, low + 8 * i, 8);
        memcpy(codes + 16 * i + 8, high + 8 * i, 8);
    }
}

/* The same for 128 bytes: four times 32, low codes of each 32 first. */
WIDER static void pair_k_batch(const uint8_t *blocks, size_t n, uint8_t *codes) {
    uint16_t pairs[64 * BATCH];
    uint8_t low[64 * BATCH], high[64 * BATCH];
    if (n < BATCH) memset(pairs, 0, sizeof pairs);
    for (size_t i = 0; i < n; i++) memcpy(pairs + 64 * i, blocks + 144 * i + 16, 128);
    pair_nibbles(pairs, 64 * BATCH, low, high);
    for (size_t i = 0; i < 4 * n; i++) {
        memcpy(codes + 32 * i, low + 16 * i, 16);
        memcpy(codes + 32 * i + 16, high + 16 * i, 16);
    }
}

/* Words of eight 5-bit codes, one a byte, to words of 40 bits. */
static inline void close_ranks(uint64_t *words, int n) {
    for (int i = 0; i < n; i++) {
        uint64_t word = words[i];
        word = (word & 0x001f001f001f001fu) | (word >> 3 & 0x03e003e003e003e0u);
        word = (word & 0x000003ff000003ffu) | (word >> 6 & 0x000ffc00000ffc00u);
        words[i] = (word & 0x00000000000fffffu) | (word >> 12 & 0x000000fffff00000u);
    }
}

/* Four words of 40 bits to 20 bytes: each store overwrites the empty end of the one before. */
static void put_forties(uint8_t *codes, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t last = c >> 16 | d << 24;
    memcpy(codes, &a, 8);
    memcpy(codes + 5, &b, 8);
    memcpy(codes + 10, &c, 8);
    memcpy(codes + 12, &last, 8);
}

/* FIFTHS[mask]: bit i of the mask as bit 4 of byte i. */
#define BIT(mask, i) ((uint64_t)((mask) >> (i) & 1) << (8 * (i) + 4))
#define SPREAD(mask)                                                                        \
    (BIT(mask, 0) | BIT(mask, 1) | BIT(mask, 2) | BIT(mask, 3) | BIT(mask, 4) | BIT(mask, 5) | \
     BIT(mask, 6) | BIT(mask, 7))
#define FOUR(mask) SPREAD(mask), SPREAD((mask) + 1), SPREAD((mask) + 2), SPREAD((mask) + 3)
#define SIXTEEN(mask) FOUR(mask), FOUR((mask) + 4), FOUR((mask) + 8), FOUR((mask) + 12)
#define MANY(mask) SIXTEEN(mask), SIXTEEN((mask) + 16), SIXTEEN((mask) + 32), SIXTEEN((mask) + 48)
static const uint64_t FIFTHS[256] = {MANY(0), MANY(64), MANY(128), MANY(192)};

/* Blocks of a 32-bit mask at `start` and 16 bytes of low codes behind it. */
WIDER static void five_bits(const uint8_t *blocks, size_t size, size_t start, size_t n, uint8_t *codes) {
    uint64_t words[4 * BATCH];
    if (n < BATCH) memset(words, 0, sizeof words);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *mask = blocks + size * i + start;
        uint64_t one = load64(mask + 4), two = load64(mask + 12);
        words[4 * i] = (one & LOW_NIBBLES) | FIFTHS[mask[0]];
        words[4 * i + 1] = (two & LOW_NIBBLES) | FIFTHS[mask[1]];
        words[4 * i + 2] = (one >> 4 & LOW_NIBBLES) | FIFTHS[mask[2]];
        words[4 * i + 3] = (two >> 4 & LOW_NIBBLES) | FIFTHS[mask[3]];
    }
    close_ranks(words, 4 * BATCH);
    for (size_t i = 0; i < n; i++) {
        const uint64_t *word = words + 4 * i;
        put_forties(codes + 20 * i, word[0], word[1], word[2], word[3]);
    }
}

/* Blocks of K_GROUPS masks, bit k of byte j for code j of group k, and 128 bytes of low codes. */
WIDER static void five_k_bits(const uint8_t *blocks, size_t n, uint8_t *codes) {
    uint64_t words[4 * K_GROUPS * BATCH];
    if (n < BATCH) memset(words, 0, sizeof words);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *masks = blocks + 176 * i + 16, *pairs = masks + 32;
        uint64_t *word = words + 4 * K_GROUPS * i;
        for (int k = 0; k < K_GROUPS; k += 2, pairs += 32, word += 8) {
            for (int j = 0; j < 4; j++) {
                uint64_t pair = load64(pairs + 8 * j), mask = load64(masks + 8 * j) >> k;
                word[j] = (pair & LOW_NIBBLES) | (mask << 4 & FIFTH_BITS);
                word[j + 4] = (pair >> 4 & LOW_NIBBLES) | (mask << 3 & FIFTH_BITS);
            }
        }
    }
    close_ranks(words, 4 * K_GROUPS * BATCH);
    for (size_t i = 0; i < K_GROUPS * n; i++) {
        const uint64_t *word = words + 4 * i;
        put_forties(codes + 20 * i, word[0], word[1], word[2], word[3]);
    }
}

/* ---- types: at most BATCH blocks each; whether all scales can be kept ------------------------- */

static int q4_0(const uint8_t *blocks, size_t n, const Output *out) {
    pair_batch(blocks, 18, 2, n, out->codes);
    return put_centred(blocks, 18, n, 3, out);
}

static int q4_1(const uint8_t *blocks, size_t n, const Output *out) {
    pair_batch(blocks, 20, 4, n, out->codes);
    return put_stored(blocks, 20, n, out);
}

static int q5_0(const uint8_t *blocks, size_t n, const Output *out) {
    five_bits(blocks, 22, 2, n, out->codes);
    return put_centred(blocks, 22, n, 4, out);
}

static int q5_1(const uint8_t *blocks, size_t n, const Output *out) {
    five_bits(blocks, 24, 4, n, out->codes);
    return put_stored(blocks, 24, n, out);
}

static int q8_0(const uint8_t *blocks, size_t n, const Output *out) {
    for (size_t i = 0; i < n; i++) {
        uint64_t words[4];
        memcpy(words, blocks + 34 * i + 2, 32);
        for (int k = 0; k < 4; k++) words[k] ^= 0x8080808080808080u;
        memcpy(out->codes + 32 * i, words, 32);
    }
    return put_centred(blocks, 34, n, 7, out);
}

static int q4_k(const uint8_t *blocks, size_t n, const Output *out) {
    pair_k_batch(blocks, n, out->codes);
    return put_k(blocks, 144, n, out);
}

static int q5_k(const uint8_t *blocks, size_t n, const Output *out) {
    five_k_bits(blocks, n, out->codes);
    return put_k(blocks, 176, n, out);
}

static int mxfp4(const uint8_t *blocks, size_t n, const Output *out) {
    int kept = 1;
    for (size_t i = 0; i < n; i++) {
        out->scales[i] = blocks[17 * i];
        kept &= blocks[17 * i] != 0xff;
    }
    pair_batch(blocks, 17, 1, n, out->codes);
    return kept;
}

/* ---- Python ---------------------------------------------------------------------------------- */

/* Bytes of a block and of its codes, scales in it, and widths that a scale may have. */
typedef struct {
    int kind; /* GGUF's number */
    Py_ssize_t block, codes, groups, narrow, wide;
    int biases;
    int (*run)(const uint8_t *, size_t, const Output *);
} Type;

static const Type TYPES[] = {
    {2, 18, 16, 1, 2, 4, 1, q4_0},          {3, 20, 16, 1, 2, 4, 1, q4_1},
    {6, 22, 20, 1, 2, 4, 1, q5_0},          {7, 24, 20, 1, 2, 4, 1, q5_1},
    {8, 34, 32, 1, 2, 4, 1, q8_0},          {12, 144, 128, K_GROUPS, 4, 4, 1, q4_k},
    {13, 176, 160, K_GROUPS, 4, 4, 1, q5_k}, {39, 17, 16, 1, 1, 1, 0, mxfp4},
};
enum { N_TYPES = sizeof TYPES / sizeof TYPES[0] };

static const Type *find(int kind) {
    for (size_t i = 0; i < N_TYPES; i++) {
        if (TYPES[i].kind == kind) return TYPES + i;
    }
    PyErr_Format(PyExc_ValueError, "[loop] No loop for GGUF type %d.", kind);
    return NULL;
}

/* Bytes of a scale, or 0 with an exception where the buffers do not belong together. */
static Py_ssize_t width_of(const Type *type, Py_ssize_t blocks, Py_ssize_t codes,
                           Py_ssize_t scales, Py_ssize_t biases) {
    Py_ssize_t n = blocks / type->block;
    Py_ssize_t width = scales == n * type->groups * type->wide ? type->wide : type->narrow;
    if (blocks % type->block == 0 && codes == n * type->codes &&
        scales == n * type->groups * width && biases == (type->biases ? scales : 0)) {
        return width;
    }
    PyErr_Format(PyExc_ValueError,
                 "[loop] Buffers must fit %zd-byte blocks, got %zd bytes of blocks, %zd of codes, "
                 "%zd of scales, %zd of biases.",
                 type->block, blocks, codes, scales, biases);
    return 0;
}

static int run_all(const Type *type, const uint8_t *blocks, size_t n, Output out, size_t width) {
    int kept = 1;
    while (n) {
        size_t now = n < BATCH ? n : BATCH, groups = now * (size_t)type->groups;
        kept &= type->run(blocks, now, &out);
        blocks += now * (size_t)type->block;
        out.codes += now * (size_t)type->codes;
        out.scales += groups * width;
        if (type->biases) out.biases += groups * width;
        n -= now;
    }
    return kept;
}

static PyObject *repack(PyObject *self, PyObject *args) {
    Py_buffer blocks, codes, scales, biases = {0};
    int kind, kept = -1;
    const Type *type;
    Py_ssize_t width;
    (void)self;
    if (!PyArg_ParseTuple(args, "iy*w*w*|w*:repack", &kind, &blocks, &codes, &scales, &biases)) {
        return NULL;
    }
    type = find(kind);
    width = type ? width_of(type, blocks.len, codes.len, scales.len, biases.len) : 0;
    if (width) {
        Output out = {codes.buf, scales.buf, biases.buf, width == 4};
        size_t n = (size_t)(blocks.len / type->block);
        Py_BEGIN_ALLOW_THREADS;
        kept = run_all(type, blocks.buf, n, out, (size_t)width);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&scales);
    PyBuffer_Release(&biases);
    return kept < 0 ? NULL : PyBool_FromLong(kept);
}

PyDoc_STRVAR(repack_doc, "repack(kind, blocks, codes, scales[, biases]) -> bool");

static PyMethodDef METHODS[] = {{"repack", repack, METH_VARARGS, repack_doc}, {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot SLOTS[] = {{0, NULL}};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "spec_convert._loop", NULL, 0, METHODS, SLOTS, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__loop(void) { return PyModuleDef_Init(&MODULE); }
