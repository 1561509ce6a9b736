/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of packing.c: tiles of 512 elements, as lmcache_redis/chunks/packing.py has them. */
#ifndef LMCR_TILES_H
#define LMCR_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TILE 512 /* elements */

/* Use "plain", "avx2" or "avx512" from now on; false if the processor does not have it. */
bool tiles_use(const char *vectors);

/* The bytes of a tile whose codes have so many bits; 0 if there is no such tile. */
size_t tile_bytes(size_t element_bytes, size_t width);

/* Room behind the escapes that tiles_pack may need. */
#define ESCAPES_BEHIND (TILE + 64)

/* Pack tiles into `out`, and their escapes apart. The number of escapes; if it is above `most`, the
 * rest was left. There must be such tiles. */
size_t tiles_pack(const uint8_t *plain, size_t tiles, size_t element_bytes, size_t width,
                  uint8_t base, uint8_t *out, uint8_t *escapes, size_t most);

/* Bring back tiles that their escapes follow. False if these are too many or too few. */
bool tiles_unpack(const uint8_t *in, size_t tiles, size_t element_bytes, size_t width, uint8_t base,
                  size_t escapes, uint8_t *plain);

#endif
