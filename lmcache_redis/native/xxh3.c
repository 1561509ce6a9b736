/* SPDX-License-Identifier: Apache-2.0 */
#include "xxh3.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the value format is little-endian, and so is this hash"
#endif

#define STRIPE_BYTES 64 /* a stripe in the specification: one step of all lanes */
#define SECRET_BYTES 192
#define SECRET_STEP 8
#define STRIPES_A_BLOCK ((SECRET_BYTES - STRIPE_BYTES) / SECRET_STEP)

static const uint64_t PRIME32_1 = 0x9E3779B1u;
static const uint64_t PRIME32_2 = 0x85EBCA77u;
static const uint64_t PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u;
static const uint64_t PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9u;
static const uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5u;
static const uint64_t PRIME_MX1 = 0x165667919E3779F9u;

/* The specification's default secret. */
static const uint8_t SECRET[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t read64(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* ---- consume `count` stripes into the lanes, with the secret from one offset on ---- */

typedef void Accumulate(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, size_t count);
typedef void Scramble(uint64_t *lanes);

/* How far ahead an input is prefetched into the cache. */
#define PREFETCH_BYTES 2048
#define prefetch(data) __builtin_prefetch((data) + PREFETCH_BYTES)

#define SCRAMBLE_SECRET (SECRET + SECRET_BYTES - STRIPE_BYTES)

static void accumulate_plain(uint64_t *lanes, const uint8_t *data, const uint8_t *secret,
                             size_t count)
{
    for (; count; count--, data += STRIPE_BYTES, secret += SECRET_STEP) {
        prefetch(data);
        for (int lane = 0; lane < 8; lane++) {
            const uint64_t value = read64(data + 8 * lane);
            const uint64_t key = value ^ read64(secret + 8 * lane);
            lanes[lane ^ 1] += value;
            lanes[lane] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
    }
}

static void scramble_plain(uint64_t *lanes)
{
    for (int lane = 0; lane < 8; lane++) {
        const uint64_t value = lanes[lane];
        lanes[lane] = (value ^ (value >> 47) ^ read64(SCRAMBLE_SECRET + 8 * lane)) * PRIME32_1;
    }
}

static Accumulate *accumulate = accumulate_plain;
static Scramble *scramble = scramble_plain;

#if defined(__x86_64__)

/* Swaps neighbouring 64-bit lanes, seen as pairs of 32 bits. */
#define SWAP_PAIRS 0x4E
/* Brings the upper half of each 64-bit lane to its lower half. */
#define UPPER_HALVES 0x31

__attribute__((target("avx2"))) static void accumulate_avx2(uint64_t *lanes, const uint8_t *data,
                                                            const uint8_t *secret, size_t count)
{
    __m256i *stored = (__m256i *)lanes;
    __m256i low = _mm256_load_si256(stored), high = _mm256_load_si256(stored + 1);
    for (; count; count--, data += STRIPE_BYTES, secret += SECRET_STEP) {
        prefetch(data);
        const __m256i a = _mm256_loadu_si256((const __m256i *)data);
        const __m256i b = _mm256_loadu_si256((const __m256i *)(data + 32));
        const __m256i x = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)secret));
        const __m256i y = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(secret + 32)));
        low = _mm256_add_epi64(low, _mm256_shuffle_epi32(a, SWAP_PAIRS));
        high = _mm256_add_epi64(high, _mm256_shuffle_epi32(b, SWAP_PAIRS));
        low = _mm256_add_epi64(low, _mm256_mul_epu32(x, _mm256_shuffle_epi32(x, UPPER_HALVES)));
        high = _mm256_add_epi64(high, _mm256_mul_epu32(y, _mm256_shuffle_epi32(y, UPPER_HALVES)));
    }
    _mm256_store_si256(stored, low);
    _mm256_store_si256(stored + 1, high);
}

__attribute__((target("avx2"))) static void scramble_avx2(uint64_t *lanes)
{
    __m256i *stored = (__m256i *)lanes;
    const __m256i *secret = (const __m256i *)SCRAMBLE_SECRET;
    const __m256i prime = _mm256_set1_epi64x((long long)PRIME32_1);
    for (int half = 0; half < 2; half++) {
        __m256i value = _mm256_load_si256(stored + half);
        value = _mm256_xor_si256(value, _mm256_srli_epi64(value, 47));
        value = _mm256_xor_si256(value, _mm256_loadu_si256(secret + half));
        const __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(value, 32), prime);
        value = _mm256_add_epi64(_mm256_mul_epu32(value, prime), _mm256_slli_epi64(upper, 32));
        _mm256_store_si256(stored + half, value);
    }
}

__attribute__((target("avx512f"))) static void
accumulate_avx512(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, size_t count)
{
    __m512i all = _mm512_load_si512(lanes);
    for (; count; count--, data += STRIPE_BYTES, secret += SECRET_STEP) {
        prefetch(data);
        const __m512i a = _mm512_loadu_si512(data);
        const __m512i x = _mm512_xor_si512(a, _mm512_loadu_si512(secret));
        const __m512i upper = _mm512_shuffle_epi32(x, (_MM_PERM_ENUM)UPPER_HALVES);
        all = _mm512_add_epi64(all, _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)SWAP_PAIRS));
        all = _mm512_add_epi64(all, _mm512_mul_epu32(x, upper));
    }
    _mm512_store_si512(lanes, all);
}

__attribute__((target("avx512f"))) static void scramble_avx512(uint64_t *lanes)
{
    const __m512i prime = _mm512_set1_epi64((long long)PRIME32_1);
    __m512i value = _mm512_load_si512(lanes);
    value = _mm512_xor_si512(value, _mm512_srli_epi64(value, 47));
    value = _mm512_xor_si512(value, _mm512_loadu_si512(SCRAMBLE_SECRET));
    const __m512i upper = _mm512_mul_epu32(_mm512_srli_epi64(value, 32), prime);
    value = _mm512_add_epi64(_mm512_mul_epu32(value, prime), _mm512_slli_epi64(upper, 32));
    _mm512_store_si512(lanes, value);
}

#elif defined(__aarch64__)

static inline uint64x2_t load_neon(const uint8_t *at)
{
    return vreinterpretq_u64_u8(vld1q_u8(at));
}

static void accumulate_neon(uint64_t *lanes, const uint8_t *data, const uint8_t *secret,
                            size_t count)
{
    uint64x2_t sums[4];
    for (int pair = 0; pair < 4; pair++) {
        sums[pair] = vld1q_u64(lanes + 2 * pair);
    }
    for (; count; count--, data += STRIPE_BYTES, secret += SECRET_STEP) {
        prefetch(data);
        for (int pair = 0; pair < 4; pair++) {
            const uint64x2_t value = load_neon(data + 16 * pair);
            const uint64x2_t key = veorq_u64(value, load_neon(secret + 16 * pair));
            const uint64x2_t sum = vaddq_u64(sums[pair], vextq_u64(value, value, 1));
            sums[pair] = vmlal_u32(sum, vmovn_u64(key), vshrn_n_u64(key, 32));
        }
    }
    for (int pair = 0; pair < 4; pair++) {
        vst1q_u64(lanes + 2 * pair, sums[pair]);
    }
}

static void scramble_neon(uint64_t *lanes)
{
    const uint32x2_t prime = vdup_n_u32((uint32_t)PRIME32_1);
    for (int pair = 0; pair < 4; pair++) {
        uint64x2_t value = vld1q_u64(lanes + 2 * pair);
        value = veorq_u64(value, vshrq_n_u64(value, 47));
        value = veorq_u64(value, load_neon(SCRAMBLE_SECRET + 16 * pair));
        const uint64x2_t upper = vmull_u32(vshrn_n_u64(value, 32), prime);
        value = vmlal_u32(vshlq_n_u64(upper, 32), vmovn_u64(value), prime);
        vst1q_u64(lanes + 2 * pair, value);
    }
}

#endif

bool xxh3_use(const char *vectors)
{
    if (strcmp(vectors, "plain") == 0) {
        accumulate = accumulate_plain;
        scramble = scramble_plain;
        return true;
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(vectors, "avx2") == 0 && __builtin_cpu_supports("avx2")) {
        accumulate = accumulate_avx2;
        scramble = scramble_avx2;
        return true;
    }
    if (strcmp(vectors, "avx512") == 0 && __builtin_cpu_supports("avx512f")) {
        accumulate = accumulate_avx512;
        scramble = scramble_avx512;
        return true;
    }
#elif defined(__aarch64__) /* every such processor has them */
    if (strcmp(vectors, "neon") == 0) {
        accumulate = accumulate_neon;
        scramble = scramble_neon;
        return true;
    }
#endif
    return false;
}

void xxh3_begin(Xxh3 *hash)
{
    const uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(hash->lanes, lanes, sizeof lanes);
    hash->blocks = 0;
}

void xxh3_update(Xxh3 *hash, const uint8_t *data, size_t there, size_t nbytes)
{
    /* The last block differs, even if it is complete: it is not scrambled. */
    const size_t most = (nbytes - 1) / XXH3_BLOCK_BYTES;
    size_t blocks = there / XXH3_BLOCK_BYTES;
    if (blocks > most) {
        blocks = most;
    }
    data += hash->blocks * XXH3_BLOCK_BYTES;
    for (; hash->blocks < blocks; hash->blocks++, data += XXH3_BLOCK_BYTES) {
        accumulate(hash->lanes, data, SECRET, STRIPES_A_BLOCK);
        scramble(hash->lanes);
    }
}

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t xxh3_end(Xxh3 *hash, const uint8_t *data, size_t nbytes)
{
    xxh3_update(hash, data, nbytes, nbytes);
    const size_t before = hash->blocks * XXH3_BLOCK_BYTES;
    accumulate(hash->lanes, data + before, SECRET, (nbytes - 1 - before) / STRIPE_BYTES);
    /* The last 64 bytes, which may overlap what has been consumed. */
    accumulate(hash->lanes, data + nbytes - STRIPE_BYTES, SECRET + SECRET_BYTES - STRIPE_BYTES - 7,
               1);
    uint64_t result = nbytes * PRIME64_1;
    for (int pair = 0; pair < 4; pair++) {
        const uint8_t *secret = SECRET + 11 + 16 * pair;
        result += fold(hash->lanes[2 * pair] ^ read64(secret),
                       hash->lanes[2 * pair + 1] ^ read64(secret + 8));
    }
    result ^= result >> 37;
    result *= PRIME_MX1;
    return result ^ (result >> 32);
}
