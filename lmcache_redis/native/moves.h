/* Stripes between slots and sockets, many in one call; moves.c has the how. No Python here. */
#ifndef LMCR_MOVES_H
#define LMCR_MOVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "xxh3.h"

/* The header of a stripe: stripe.py has all of it. A reader does not know these fields before. */
#define HEADER_BYTES 512
#define STORE_ID_AT 8
#define STORE_ID_BYTES 16
#define PAYLOAD_CHECKSUM_AT 56
#define CREATED_AT 160
#define OWN_CHECKSUM_AT 168
#define CHECKSUM_BYTES 8

#define MOST_LANES 64
#define MOST_TASKS 256
#define MOST_HEAD_BYTES 32   /* "$", a length and CRLF */
#define MOST_LINE_BYTES 4096 /* of an error reply */

/* What became of a stripe; resp/bulk.py says what each means. From OTHER_LENGTH on the connection
 * is out of step. WAIT: it is not finished. */
enum { WAIT = -1, DONE, NOTHING, LINE, MISMATCH, OTHER_LENGTH, GARBAGE, LOST };

typedef struct {
    uint8_t *data;
    size_t nbytes;
} Bytes;

/* How far the stripe on a lane has come; kept by the caller between calls. Zeroed at its begin, up
 * to `first`. */
typedef struct {
    size_t sent; /* bytes of the request */
    size_t got;  /* bytes of the reply: `first`, then the payload, then `tail` */
    size_t line; /* bytes of the first line of a reply that is not the expected one; 0: not whole */
    bool is_other;
    uint8_t tail[2]; /* what follows the payload */
    Xxh3 hash;
    uint8_t first[MOST_LINE_BYTES];
} Progress;

typedef struct {
    Bytes command; /* of a SET: what comes before the header */
    Bytes header;  /* of a GET: what is expected, beginning with $length CRLF */
    Bytes payload;
    Bytes end; /* of a SET: what follows the payload */
    int lane;
} Task;

typedef struct {
    int end;   /* WAIT where it is none */
    int error; /* LOST: errno; 0 where the connection was closed */
    /* DONE: the store id of a load. LINE: the line. MISMATCH, OTHER_LENGTH: the header. */
    const uint8_t *data;
    size_t nbytes;
} Result;

typedef struct {
    int fds[MOST_LANES];
    Progress *progress[MOST_LANES];
    int idle[MOST_LANES]; /* lanes; the last is used first */
    int lanes, idle_count;
    Task tasks[MOST_TASKS];
    int count, asked, done; /* tasks before `done` are finished, before `asked` in flight */
    int quiet_ms;
    double until; /* CLOCK_MONOTONIC, seconds */
    bool is_load, verify, drain;

    int sending; /* 0, EAGAIN where the last task in flight was sent in part, else its errno */
    Result bad;  /* of the task before `done`, where it did not end well */
    uint8_t store_ids[MOST_TASKS][STORE_ID_BYTES];
} Call;

/* Send and receive what can be, and return at the first stripe that does not end well. */
void move(Call *call);

#endif
