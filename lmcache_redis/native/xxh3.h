/* XXH3, 64 bits, seed 0, of inputs longer than XXH3_SHORT_BYTES: the checksum of payloads.
 *
 * Written from the specification (xxHash's doc/xxhash_spec.md); the tests compare it with the
 * xxhash package. That package is compiled for the oldest x86-64; this takes the widest vectors
 * the processor has, and hashes an input in steps, while it arrives.
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

/* Compute with "plain", "avx2" or "avx512" from now on; false where the processor has no such. */
bool xxh3_use(const char *vectors);

void xxh3_begin(Xxh3 *hash);

/* Consume what is there of an input: data[0] is its first byte, `there` of `nbytes` have come.
 * Whole blocks only, and never the last: that is for xxh3_end. */
void xxh3_update(Xxh3 *hash, const uint8_t *data, size_t there, size_t nbytes);

/* The hash of data[0..nbytes), whatever of it was consumed before. */
uint64_t xxh3_end(Xxh3 *hash, const uint8_t *data, size_t nbytes);

#endif
