/* SPDX-License-Identifier: Apache-2.0 */
/* Packs or unpacks each input on stdin, in memory of exactly its size. Built with sanitizers.
 *
 * An input is four numbers (8 bytes each) and bytes: 1 to unpack or 0 to pack, the bytes of an
 * element, the room of the result, and the length. Prints the number of bytes of each result, or "-",
 * and a sum of the bytes.
 * argv[1]: the vectors to use; exit status 3 if this processor does not have them. */
#include "packing.h"
#include "tiles.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t sum_of(const uint8_t *data, size_t nbytes)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < nbytes; i++) {
        sum = sum * 31 + data[i];
    }
    return sum;
}

int main(int argc, char **argv)
{
    if (argc != 2 || !tiles_use(argv[1])) {
        return 3;
    }
    uint64_t head[4];
    while (fread(head, sizeof head, 1, stdin) == 1) {
        const size_t element_bytes = head[1], room = head[2], nbytes = head[3];
        uint8_t *in = malloc(nbytes), *out = malloc(room);
        if (in == NULL || out == NULL || fread(in, 1, nbytes, stdin) != nbytes) {
            return 1;
        }
        size_t used = room;
        bool good = true;
        if (head[0]) {
            good = unpack(in, nbytes, element_bytes, out, room);
        } else {
            used = pack(in, nbytes, element_bytes, out, room);
        }
        if (good) {
            printf("%zu %" PRIu64 "\n", used, sum_of(out, used));
        } else {
            printf("-\n");
        }
        free(in);
        free(out);
    }
    return 0;
}
