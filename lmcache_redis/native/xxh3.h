/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3, 64 bits, seed 0, of inputs longer than XXH3_SHORT_BYTES: the checksum of payloads.
 *
 * Written from the specification (xxHash's doc/xxhash_spec.md); the tests compare it with the
 * xxhash package. That package is compiled for the oldest x86-64; this code uses the widest vectors
 * of the processor, and hashes an input in steps while it arrives.
 */
#ifndef LMCR_XXH3_H
#define LMCR_XXH3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XXH3_SHORT_BYTES 240
#define XXH3_BLOCK_BYTES 1024

typedef struct {
    uint64_t lanes[8];
    size_t blocks; /* consumed so far */
} __attribute__((aligned(64))) Xxh3;

/* Use "plain", "avx2", "avx512" or "neon" from now on; false if the processor does not have it. */
bool xxh3_use(const char *vectors);

void xxh3_begin(Xxh3 *hash);

/* Consume the bytes of an input that have arrived: data[0] is its first byte, `there` of `nbytes` are
 * present. Consumes whole blocks only, and never the last one: xxh3_end does. */
void xxh3_update(Xxh3 *hash, const uint8_t *data, size_t there, size_t nbytes);

/* The hash of data[0..nbytes), however much of it was consumed before. */
uint64_t xxh3_end(Xxh3 *hash, const uint8_t *data, size_t nbytes);

#endif
