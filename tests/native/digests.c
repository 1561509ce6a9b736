/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the XXH3 of each input on stdin: its length and a step (8 bytes each), then its bytes.
 *
 * The input lies at another alignment each time, and arrives in pieces of `step` bytes (0: at once).
 * argv[1]: the vectors to use; exit status 3 if this processor does not have them. */
#include "xxh3.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    if (argc != 2 || !xxh3_use(argv[1])) {
        return 3;
    }
    uint64_t head[2];
    for (size_t count = 0; fread(head, sizeof head, 1, stdin) == 1; count++) {
        const size_t nbytes = head[0], step = head[1];
        uint8_t *memory = malloc(nbytes + 64);
        uint8_t *data = memory + count % 64;
        if (memory == NULL || nbytes <= XXH3_SHORT_BYTES || fread(data, nbytes, 1, stdin) != 1) {
            return 1;
        }
        Xxh3 hash;
        xxh3_begin(&hash);
        for (size_t there = step; step != 0 && there < nbytes; there += step) {
            xxh3_update(&hash, data, there, nbytes);
        }
        printf("%016" PRIx64 "\n", xxh3_end(&hash, data, nbytes));
        free(memory);
    }
    return 0;
}
