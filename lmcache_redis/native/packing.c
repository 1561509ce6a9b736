/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of a KV cache differ little in their exponents, and much in all else. An element is
 * rotated left by one bit: its sign moves to the lower end, and its high byte is the exponent, with
 * what there is room for of the mantissa. That byte minus the `base` of its block, a number that a
 * sample of the block decides, is a code of few bits. The largest code stands for an escape, the
 * byte itself.
 *
 * lmcache_redis/chunks/packing.py has the stored form, and all of this in Python, with equal results;
 * tiles.c has the loops.
 */
#include "packing.h"

#include <string.h>

#include "tiles.h"

#define BLOCK_BYTES (32 << 10)

/* What the directory says of a block: 4 bytes. */
typedef struct {
    uint8_t base, width; /* RAW, or the bits of a code */
    uint16_t escapes;
} Entry;

#define RAW 0

static void put_entry(uint8_t *at, Entry entry)
{
    at[0] = entry.base;
    at[1] = entry.width;
    memcpy(at + 2, &entry.escapes, sizeof entry.escapes);
}

static Entry get_entry(const uint8_t *at)
{
    Entry entry = {.base = at[0], .width = at[1]};
    memcpy(&entry.escapes, at + 2, sizeof entry.escapes);
    return entry;
}

/* How a payload is divided: whole tiles in blocks, and a tail that stays as it is. */
typedef struct {
    size_t element_bytes, body, blocks, directory;
} Form;

static Form form_of(size_t nbytes, size_t element_bytes)
{
    const size_t body = nbytes - nbytes % (TILE * element_bytes);
    const size_t blocks = body / BLOCK_BYTES + (body % BLOCK_BYTES != 0);
    return (Form){element_bytes, body, blocks, blocks * sizeof(Entry)};
}

static size_t block_bytes(const Form *form, size_t block)
{
    const size_t left = form->body - block * BLOCK_BYTES;
    return left < BLOCK_BYTES ? left : BLOCK_BYTES;
}

/* -------------------------------------------------------------- choice */

#define PAYLOAD_LINES 8 /* the sample that says whether packing pays */
#define BLOCK_LINES 16  /* that which decides width and base */
#define LINE 32  /* elements */
#define LINE_STEP 40503 /* of 65536, the golden section: the lines are in step with nothing */
#define LEAST_SAVED 32  /* one of so many bytes */

static size_t most_stored(size_t nbytes)
{
    return nbytes - nbytes / LEAST_SAVED;
}

inline static __attribute__((always_inline)) uint8_t high_of(const uint8_t *element,
                                                             size_t element_bytes)
{
    if (element_bytes == 1) {
        return (uint8_t)(*element << 1 | *element >> 7);
    }
    uint16_t upper;
    memcpy(&upper, element + element_bytes - 2, sizeof upper);
    return (uint8_t)(upper >> 7);
}

/* Line `i` of the sample. */
inline static const uint8_t *line_of(const uint8_t *plain, size_t nbytes, size_t element_bytes,
                                     size_t i)
{
    const size_t line_bytes = LINE * element_bytes, lines = nbytes / line_bytes;
    return plain + (i * LINE_STEP % 65536 * lines >> 16) * line_bytes;
}

/* Begin to bring a sample into the cache. */
static void fetch_sample(const uint8_t *plain, size_t nbytes, size_t element_bytes, size_t lines)
{
    for (size_t i = 0; i < lines; i++) {
        __builtin_prefetch(line_of(plain, nbytes, element_bytes, i));
    }
}

/* How many elements of the sample have a high byte below each value. Neighbours are counted apart:
 * they are often alike, and one count would wait for the other. */
inline static __attribute__((always_inline)) void count(const uint8_t *plain, size_t nbytes,
                                                        size_t element_bytes, size_t lines,
                                                        uint16_t *below)
{
    uint16_t apart[4][256] = {{0}};
    for (size_t i = 0; i < lines; i++) {
        const uint8_t *at = line_of(plain, nbytes, element_bytes, i);
        for (size_t j = 0; j < LINE; j += 4, at += 4 * element_bytes) {
            apart[0][high_of(at, element_bytes)]++;
            apart[1][high_of(at + element_bytes, element_bytes)]++;
            apart[2][high_of(at + 2 * element_bytes, element_bytes)]++;
            apart[3][high_of(at + 3 * element_bytes, element_bytes)]++;
        }
    }
    for (size_t i = 0; i < 256; i++) {
        apart[0][i] = (uint16_t)(apart[0][i] + apart[1][i] + apart[2][i] + apart[3][i]);
    }
    below[0] = 0;
    for (size_t i = 0; i < 256; i++) {
        below[i + 1] = (uint16_t)(below[i] + apart[0][i]);
    }
}

/* The width and the highest base with which the sample is shortest; RAW if that saves too little. */
static Entry choose(const uint8_t *plain, size_t nbytes, size_t element_bytes, size_t lines)
{
    uint16_t below[257];
    if (element_bytes == 1) {
        count(plain, nbytes, 1, lines, below);
    } else if (element_bytes == 2) {
        count(plain, nbytes, 2, lines, below);
    } else {
        count(plain, nbytes, 4, lines, below);
    }
    const size_t elements = lines * LINE, rest_bits = elements * 8 * (element_bytes - 1);
    size_t least = most_stored(elements * 8 * element_bytes) - rest_bits;
    Entry chosen = {.width = RAW};
    uint16_t covered = 0;
    for (size_t width = 1; width < 8; width++) {
        if (!tile_bytes(element_bytes, width)) {
            continue;
        }
        const size_t window = ((size_t)1 << width) - 1;
        uint16_t most = 0;
        for (size_t base = 0; base <= 256 - window; base++) {
            const uint16_t here = (uint16_t)(below[base + window] - below[base]);
            most = here > most ? here : most;
        }
        const size_t bits = elements * width + 8 * (elements - most);
        if (bits < least) {
            least = bits;
            covered = most;
            chosen.width = (uint8_t)width;
        }
    }
    if (chosen.width != RAW) {
        const int window = (1 << chosen.width) - 1;
        int base = 256 - window;
        while (below[base + window] - below[base] != covered) {
            base--;
        }
        chosen.base = (uint8_t)base;
    }
    return chosen;
}

/* -------------------------------------------------------------- blocks */

/* The bytes of a block in `out`; 0 if the room is too small. */
static size_t pack_block(const uint8_t *plain, size_t nbytes, size_t element_bytes, uint8_t *out,
                         size_t room, Entry *entry)
{
    *entry = choose(plain, nbytes, element_bytes, BLOCK_LINES);
    if (entry->width != RAW) {
        uint8_t escapes[BLOCK_BYTES + ESCAPES_BEHIND];
        const size_t tiles = nbytes / (TILE * element_bytes);
        const size_t packed = tiles * tile_bytes(element_bytes, entry->width);
        if (packed > room) {
            return 0;
        }
        const size_t count = tiles_pack(plain, tiles, element_bytes, entry->width, entry->base, out,
                                        escapes, nbytes - packed);
        if (count <= nbytes - packed) {
            if (count > room - packed) {
                return 0;
            }
            memcpy(out + packed, escapes, count);
            entry->escapes = (uint16_t)count;
            return packed + count;
        }
        *entry = (Entry){.width = RAW}; /* the sample has misled */
    }
    if (nbytes > room) {
        return 0;
    }
    memcpy(out, plain, nbytes);
    return nbytes;
}

size_t pack(const uint8_t *plain, size_t nbytes, size_t element_bytes, uint8_t *out, size_t room)
{
    const Form form = form_of(nbytes, element_bytes);
    room = room < most_stored(nbytes) ? room : most_stored(nbytes);
    fetch_sample(plain, form.body, element_bytes, PAYLOAD_LINES);
    if (!form.body || form.directory > room ||
        choose(plain, form.body, element_bytes, PAYLOAD_LINES).width == RAW) {
        return 0;
    }
    size_t used = form.directory;
    fetch_sample(plain, block_bytes(&form, 0), element_bytes, BLOCK_LINES);
    for (size_t i = 0; i < form.blocks; i++) {
        if (i + 1 < form.blocks) {
            fetch_sample(plain + (i + 1) * BLOCK_BYTES, block_bytes(&form, i + 1), element_bytes,
                         BLOCK_LINES);
        }
        Entry entry;
        const size_t packed = pack_block(plain + i * BLOCK_BYTES, block_bytes(&form, i),
                                         element_bytes, out + used, room - used, &entry);
        if (!packed) {
            return 0;
        }
        put_entry(out + i * sizeof entry, entry);
        used += packed;
    }
    const size_t tail = nbytes - form.body;
    if (tail > room - used) {
        return 0;
    }
    memcpy(out + used, plain + form.body, tail);
    return used + tail;
}

/* The bytes of a block as its entry has them; 0 if there is no such block. */
static size_t stored_bytes_of(const Form *form, size_t block, Entry entry)
{
    const size_t nbytes = block_bytes(form, block);
    if (entry.width == RAW) {
        return entry.base || entry.escapes ? 0 : nbytes;
    }
    const size_t tiles = nbytes / (TILE * form->element_bytes);
    const size_t packed = tiles * tile_bytes(form->element_bytes, entry.width);
    return packed ? packed + entry.escapes : 0;
}

bool unpack(const uint8_t *stored, size_t stored_bytes, size_t element_bytes, uint8_t *plain,
            size_t nbytes)
{
    const Form form = form_of(nbytes, element_bytes);
    const size_t tail = nbytes - form.body;
    if (form.directory + tail > stored_bytes) {
        return false;
    }
    /* The directory decides every bound, so that it is judged before a byte is written. */
    size_t left = stored_bytes - form.directory - tail;
    for (size_t i = 0; i < form.blocks; i++) {
        const size_t packed = stored_bytes_of(&form, i, get_entry(stored + i * sizeof(Entry)));
        if (!packed || packed > left) {
            return false;
        }
        left -= packed;
    }
    if (left) {
        return false;
    }
    const uint8_t *in = stored + form.directory;
    for (size_t i = 0; i < form.blocks; i++) {
        const Entry entry = get_entry(stored + i * sizeof entry);
        const size_t here = block_bytes(&form, i);
        uint8_t *out = plain + i * BLOCK_BYTES;
        if (entry.width == RAW) {
            memcpy(out, in, here);
        } else if (!tiles_unpack(in, here / (TILE * element_bytes), element_bytes, entry.width,
                                 entry.base, entry.escapes, out)) {
            return false;
        }
        in += stored_bytes_of(&form, i, entry);
    }
    memcpy(plain + form.body, in, tail);
    return true;
}
