/* SPDX-License-Identifier: Apache-2.0 */
/* Loops that compilers turn into vectors: one body, compiled for each kind of them (on aarch64 for
 * NEON, which every such processor has). Only escapes are found by hand.
 */
#include "tiles.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the value format is little-endian, and so is this code"
#endif

#define inlined static inline __attribute__((always_inline))

/* Every possible tile: the bytes of an element, and the bits of a code. */
#define TILES(TILE_OF)                                                                             \
    TILE_OF(1, 6) TILE_OF(1, 7) TILE_OF(2, 3) TILE_OF(2, 4) TILE_OF(2, 6) TILE_OF(4, 3) TILE_OF(4, 4)
#define NAME_OF(element_bytes, width) (8 * (element_bytes) + (width))

size_t tile_bytes(size_t element_bytes, size_t width)
{
    if (width >= 8) {
        return 0;
    }
    switch (NAME_OF(element_bytes, width)) {
#define BYTES_CASE(bytes, bits)                                                                    \
    case NAME_OF(bytes, bits):                                                                     \
        return TILE * (bytes - 1) + TILE / 8 * bits;
        TILES(BYTES_CASE)
    }
    return 0;
}

/* ------------------------------------------------------------- escapes */

/* Append the high byte of each code that is `top`, and at most 64 bytes behind them. */
typedef uint8_t *TakeEscapes(const uint8_t *codes, uint8_t top, const uint8_t *high,
                             uint8_t *escapes);
/* Replace the high byte of each code that is `top`. NULL if there are fewer escapes than such codes;
 * else those that are left. */
typedef const uint8_t *PutEscapes(const uint8_t *codes, uint8_t top, uint8_t *high,
                                  const uint8_t *escapes, const uint8_t *end);

#define EIGHT(byte) (0x0101010101010101u * (uint64_t)(byte))

/* Which of 64 codes are `top`, by one bit each. */
typedef uint64_t Tops(const uint8_t *codes, uint8_t top);

inlined uint8_t *take_by_hand(const uint8_t *codes, uint8_t top, const uint8_t *high,
                              uint8_t *escapes, Tops *tops_of)
{
    for (size_t i = 0; i < TILE; i += 64) {
        for (uint64_t tops = tops_of(codes + i, top); tops; tops &= tops - 1) {
            *escapes++ = high[i + (size_t)__builtin_ctzll(tops)];
        }
    }
    return escapes;
}

inlined const uint8_t *put_by_hand(const uint8_t *codes, uint8_t top, uint8_t *high,
                                   const uint8_t *escapes, const uint8_t *end, Tops *tops_of)
{
    for (size_t i = 0; i < TILE; i += 64) {
        uint64_t tops = tops_of(codes + i, top);
        if (__builtin_popcountll(tops) > end - escapes) {
            return NULL;
        }
        for (; tops; tops &= tops - 1) {
            high[i + (size_t)__builtin_ctzll(tops)] = *escapes++;
        }
    }
    return escapes;
}

#define BY_HAND(vectors, target)                                                                   \
    target static uint8_t *take_escapes_##vectors(const uint8_t *codes, uint8_t top,               \
                                                  const uint8_t *high, uint8_t *escapes)           \
    {                                                                                              \
        return take_by_hand(codes, top, high, escapes, tops_##vectors);                            \
    }                                                                                              \
    target static const uint8_t *put_escapes_##vectors(const uint8_t *codes, uint8_t top,          \
                                                       uint8_t *high, const uint8_t *escapes,      \
                                                       const uint8_t *end)                         \
    {                                                                                              \
        return put_by_hand(codes, top, high, escapes, end, tops_##vectors);                        \
    }

inlined uint64_t tops_plain(const uint8_t *codes, uint8_t top)
{
    uint64_t tops = 0;
    for (int i = 0; i < 64; i += 8) {
        uint64_t eight;
        memcpy(&eight, codes + i, sizeof eight);
        /* One bit of each byte that is `top` (all are below 128); then the eight side by side. */
        eight = ~((eight ^ EIGHT(top)) + EIGHT(0x7f)) >> 7 & EIGHT(1);
        tops |= (eight * 0x0102040810204080u >> 56) << i;
    }
    return tops;
}

BY_HAND(plain, )

#if defined(__x86_64__)

/* What a processor needs to have: compilers are told so, and it is asked for. */
#define AVX2_NEEDS(first, next) first("avx2") next("bmi") next("popcnt")
#define AVX512_NEEDS(first, next)                                                                  \
    first("avx512f") next("avx512bw") next("avx512vl") next("avx512vbmi") next("avx512vbmi2")      \
        next("bmi") next("bmi2") next("popcnt")
#define NAME(feature) feature
#define NEXT_NAME(feature) "," feature
#define HAS(feature) __builtin_cpu_supports(feature)
#define AND_HAS(feature) && __builtin_cpu_supports(feature)

#if defined(__clang__)
#define WIDE "" /* it would ignore all of the attribute */
#else
#define WIDE ",prefer-vector-width=512"
#endif

#define AVX2 __attribute__((target(AVX2_NEEDS(NAME, NEXT_NAME))))
#define AVX512 __attribute__((target(AVX512_NEEDS(NAME, NEXT_NAME) WIDE)))

AVX2 inlined uint64_t tops_avx2(const uint8_t *codes, uint8_t top)
{
    const __m256i all_top = _mm256_set1_epi8((char)top);
    const __m256i low = _mm256_loadu_si256((const __m256i *)codes);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(codes + 32));
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, all_top)) |
           (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, all_top)) << 32;
}

BY_HAND(avx2, AVX2)

AVX512 static uint8_t *take_escapes_avx512(const uint8_t *codes, uint8_t top, const uint8_t *high,
                                           uint8_t *escapes)
{
    const __m512i all_top = _mm512_set1_epi8((char)top);
    for (size_t i = 0; i < TILE; i += 64) {
        const __mmask64 tops = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(codes + i), all_top);
        /* Compressed in a register: into memory is slow on some processors. */
        const __m512i taken = _mm512_maskz_compress_epi8(tops, _mm512_loadu_si512(high + i));
        _mm512_storeu_si512(escapes, taken);
        escapes += __builtin_popcountll(tops);
    }
    return escapes;
}

AVX512 static const uint8_t *put_escapes_avx512(const uint8_t *codes, uint8_t top, uint8_t *high,
                                                const uint8_t *escapes, const uint8_t *end)
{
    const __m512i all_top = _mm512_set1_epi8((char)top);
    for (size_t i = 0; i < TILE; i += 64) {
        const __mmask64 tops = _mm512_cmpeq_epi8_mask(_mm512_loadu_si512(codes + i), all_top);
        const int count = __builtin_popcountll(tops);
        if (count > end - escapes) {
            return NULL;
        }
        /* Reads nothing behind the escapes. */
        const __m512i next = _mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, (unsigned)count), escapes);
        const __m512i others = _mm512_loadu_si512(high + i);
        _mm512_storeu_si512(high + i, _mm512_mask_expand_epi8(others, tops, next));
        escapes += count;
    }
    return escapes;
}

#endif

/* --------------------------------------------------------------- tiles */

/* Some bits of all codes, from `shift` on. Byte i has those of the codes i, i + part, i + 2 * part
 * and so on. Words of eight codes, because not every processor can shift bytes. */
inlined uint8_t *put_plane(const uint8_t *restrict codes, int shift, int bits, uint8_t *restrict out)
{
    const size_t part = TILE / 8 * (size_t)bits;
    const uint64_t mask = EIGHT((1 << bits) - 1);
    for (size_t i = 0; i < part; i += 8) {
        uint64_t plane = 0;
        for (int k = 0; k < 8 / bits; k++) {
            uint64_t eight;
            memcpy(&eight, codes + (size_t)k * part + i, sizeof eight);
            plane |= (eight >> shift & mask) << k * bits;
        }
        memcpy(out + i, &plane, sizeof plane);
    }
    return out + part;
}

inlined const uint8_t *get_plane(const uint8_t *restrict in, int shift, int bits,
                                 uint8_t *restrict codes)
{
    const size_t part = TILE / 8 * (size_t)bits;
    const uint64_t mask = EIGHT((1 << bits) - 1);
    for (size_t i = 0; i < part; i += 8) {
        uint64_t plane;
        memcpy(&plane, in + i, sizeof plane);
        for (int k = 0; k < 8 / bits; k++) {
            uint8_t *at = codes + (size_t)k * part + i;
            uint64_t eight = (plane >> k * bits & mask) << shift;
            if (shift) {
                uint64_t lower;
                memcpy(&lower, at, sizeof lower);
                eight |= lower;
            }
            memcpy(at, &eight, sizeof eight);
        }
    }
    return in + part;
}

/* Planes of 4, 2 and 1 bits: each is there if the width has that bit. */
inlined uint8_t *put_codes(const uint8_t *restrict codes, int width, uint8_t *restrict out)
{
    out = width & 4 ? put_plane(codes, 0, 4, out) : out;
    out = width & 2 ? put_plane(codes, width & 4, 2, out) : out;
    return width & 1 ? put_plane(codes, width & 6, 1, out) : out;
}

inlined void get_codes(const uint8_t *restrict in, int width, uint8_t *restrict codes)
{
    in = width & 4 ? get_plane(in, 0, 4, codes) : in;
    in = width & 2 ? get_plane(in, width & 4, 2, codes) : in;
    if (width & 1) {
        get_plane(in, width & 6, 1, codes);
    }
}

/* Elements, rotated left by one bit: the lower bytes to `out`, the upper one to `high`. */
inlined void divide(const uint8_t *restrict plain, size_t element_bytes, uint8_t *restrict out,
                    uint8_t *restrict high)
{
    for (size_t i = 0; i < TILE; i++) {
        if (element_bytes == 1) {
            high[i] = (uint8_t)(plain[i] << 1 | plain[i] >> 7);
        } else if (element_bytes == 2) {
            uint16_t element;
            memcpy(&element, plain + 2 * i, sizeof element);
            element = (uint16_t)(element << 1 | element >> 15);
            out[i] = (uint8_t)element;
            high[i] = (uint8_t)(element >> 8);
        } else {
            uint32_t element;
            memcpy(&element, plain + 4 * i, sizeof element);
            element = element << 1 | element >> 31;
            const uint16_t low = (uint16_t)element;
            memcpy(out + 2 * i, &low, sizeof low);
            out[2 * TILE + i] = (uint8_t)(element >> 16);
            high[i] = (uint8_t)(element >> 24);
        }
    }
}

inlined void join(const uint8_t *restrict in, const uint8_t *restrict high, size_t element_bytes,
                  uint8_t *restrict plain)
{
    for (size_t i = 0; i < TILE; i++) {
        if (element_bytes == 1) {
            plain[i] = (uint8_t)(high[i] >> 1 | high[i] << 7);
        } else if (element_bytes == 2) {
            uint16_t element = (uint16_t)(high[i] << 8 | in[i]);
            element = (uint16_t)(element >> 1 | element << 15);
            memcpy(plain + 2 * i, &element, sizeof element);
        } else {
            uint16_t low;
            memcpy(&low, in + 2 * i, sizeof low);
            uint32_t element = (uint32_t)high[i] << 24 | (uint32_t)in[2 * TILE + i] << 16 | low;
            element = element >> 1 | element << 31;
            memcpy(plain + 4 * i, &element, sizeof element);
        }
    }
}

/* ------------------------------------------------------------- kernels */

/* How far ahead the input is fetched into the cache. */
#define PREFETCH_BYTES 2048

inlined void prefetch(const uint8_t *tile, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i += 64) {
        __builtin_prefetch(tile + PREFETCH_BYTES + i);
    }
}

typedef size_t Pack(const uint8_t *plain, size_t tiles, size_t element_bytes, size_t width,
                    uint8_t base, uint8_t *out, uint8_t *escapes, size_t most);
typedef bool Unpack(const uint8_t *in, size_t tiles, size_t element_bytes, size_t width,
                    uint8_t base, size_t escapes, uint8_t *plain);

inlined size_t pack_tiles(const uint8_t *plain, size_t tiles, size_t element_bytes, int width,
                          uint8_t base, uint8_t *out, uint8_t *escapes, size_t most,
                          TakeEscapes *take_escapes)
{
    uint8_t high[TILE] __attribute__((aligned(64))), codes[TILE] __attribute__((aligned(64)));
    const uint8_t top = (uint8_t)((1 << width) - 1), *first = escapes;
    for (; tiles && (size_t)(escapes - first) <= most; tiles--) {
        prefetch(plain, TILE * element_bytes);
        divide(plain, element_bytes, out, high);
        for (size_t i = 0; i < TILE; i++) {
            const uint8_t code = (uint8_t)(high[i] - base);
            codes[i] = code < top ? code : top;
        }
        plain += TILE * element_bytes;
        out = put_codes(codes, width, out + TILE * (element_bytes - 1));
        escapes = take_escapes(codes, top, high, escapes);
    }
    return (size_t)(escapes - first);
}

inlined bool unpack_tiles(const uint8_t *in, size_t tiles, size_t element_bytes, int width,
                          uint8_t base, size_t count, uint8_t *plain, PutEscapes *put_escapes)
{
    uint8_t high[TILE] __attribute__((aligned(64))), codes[TILE] __attribute__((aligned(64)));
    const uint8_t top = (uint8_t)((1 << width) - 1);
    const size_t step = TILE * (element_bytes - 1) + TILE / 8 * (size_t)width;
    const uint8_t *escapes = in + tiles * step, *end = escapes + count;
    for (; tiles; tiles--) {
        prefetch(in, step);
        get_codes(in + TILE * (element_bytes - 1), width, codes);
        for (size_t i = 0; i < TILE; i++) {
            high[i] = (uint8_t)(codes[i] + base);
        }
        escapes = put_escapes(codes, top, high, escapes, end);
        if (escapes == NULL) {
            return false;
        }
        join(in, high, element_bytes, plain);
        plain += TILE * element_bytes;
        in += step;
    }
    return escapes == end;
}

/* Both directions, for one kind of vectors. */
#define KERNELS(vectors, target)                                                                   \
    target static size_t pack_##vectors(const uint8_t *plain, size_t tiles, size_t element_bytes,  \
                                        size_t width, uint8_t base, uint8_t *out,                  \
                                        uint8_t *escapes, size_t most)                             \
    {                                                                                              \
        TakeEscapes *const take = take_escapes_##vectors;                                          \
        switch (NAME_OF(element_bytes, width)) {                                                   \
            TILES(PACK_CASE)                                                                       \
        }                                                                                          \
        return SIZE_MAX;                                                                           \
    }                                                                                              \
    target static bool unpack_##vectors(const uint8_t *in, size_t tiles, size_t element_bytes,     \
                                        size_t width, uint8_t base, size_t escapes,                \
                                        uint8_t *plain)                                            \
    {                                                                                              \
        PutEscapes *const put = put_escapes_##vectors;                                             \
        switch (NAME_OF(element_bytes, width)) {                                                   \
            TILES(UNPACK_CASE)                                                                     \
        }                                                                                          \
        return false;                                                                              \
    }
#define PACK_CASE(bytes, bits)                                                                     \
    case NAME_OF(bytes, bits):                                                                     \
        return pack_tiles(plain, tiles, bytes, bits, base, out, escapes, most, take);
#define UNPACK_CASE(bytes, bits)                                                                   \
    case NAME_OF(bytes, bits):                                                                     \
        return unpack_tiles(in, tiles, bytes, bits, base, escapes, plain, put);

KERNELS(plain, )
#if defined(__x86_64__)
KERNELS(avx2, AVX2)
KERNELS(avx512, AVX512)
#endif

static Pack *pack_with = pack_plain;
static Unpack *unpack_with = unpack_plain;

bool tiles_use(const char *vectors)
{
    if (strcmp(vectors, "plain") == 0) {
        pack_with = pack_plain;
        unpack_with = unpack_plain;
        return true;
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(vectors, "avx2") == 0 && AVX2_NEEDS(HAS, AND_HAS)) {
        pack_with = pack_avx2;
        unpack_with = unpack_avx2;
        return true;
    }
    if (strcmp(vectors, "avx512") == 0 && AVX512_NEEDS(HAS, AND_HAS)) {
        pack_with = pack_avx512;
        unpack_with = unpack_avx512;
        return true;
    }
#endif
    return false;
}

size_t tiles_pack(const uint8_t *plain, size_t tiles, size_t element_bytes, size_t width,
                  uint8_t base, uint8_t *out, uint8_t *escapes, size_t most)
{
    return pack_with(plain, tiles, element_bytes, width, base, out, escapes, most);
}

bool tiles_unpack(const uint8_t *in, size_t tiles, size_t element_bytes, size_t width, uint8_t base,
                  size_t escapes, uint8_t *plain)
{
    return unpack_with(in, tiles, element_bytes, width, base, escapes, plain);
}
