/* SPDX-License-Identifier: Apache-2.0 */
/* Stripes between slots and sockets, many in one call; see moves.c. Independent of Python. */
#ifndef LMCR_MOVES_H
#define LMCR_MOVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "header.h"
#include "xxh3.h"

#define MOST_LANES 64
#define MOST_TASKS 256
#define MOST_HEAD_BYTES 32   /* "$", a length and CRLF */
#define MOST_LINE_BYTES 4096 /* of an error reply */

/* How a stripe ended; resp/bulk.py explains each. From OTHER_LENGTH on the connection is out of
 * step. WAIT: it is not finished. */
enum { WAIT = -1, DONE, NOTHING, LINE, MISMATCH, OTHER_LENGTH, GARBAGE, LOST };

typedef struct {
    uint8_t *data;
    size_t nbytes;
} Bytes;

/* The progress of the stripe on a lane; kept by the caller between calls. Zeroed when the stripe
 * starts, up to `first`. */
typedef struct {
    size_t sent; /* bytes of the request */
    size_t got;  /* bytes of the reply: `first`, then the payload, then `tail` */
    size_t line; /* bytes of the first line of an unexpected reply; 0: incomplete */
    bool is_other;
    size_t stored;   /* bytes of a packed payload, whose header is good; 0: it is none */
    uint8_t tail[2]; /* the bytes after the payload */
    Xxh3 hash;
    uint8_t first[MOST_LINE_BYTES];
} Progress;

typedef struct {
    Bytes command; /* of a SET: the bytes before the header */
    Bytes header;  /* of a GET: the expected bytes, beginning with $length CRLF */
    Bytes payload;
    Bytes end;     /* of a SET: the bytes after the payload; of a GET: room for a packed payload */
    int lane;
} Task;

typedef struct {
    int end;   /* WAIT where it is none */
    int error; /* LOST: errno; 0 if the connection was closed */
    /* LINE: the line. MISMATCH, OTHER_LENGTH: the header. */
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

    int sending; /* 0; EAGAIN if the last task in flight was sent in part; else its errno */
    Result bad;  /* of the task before `done`, if it failed */
    uint8_t headers[MOST_TASKS][HEADER_BYTES]; /* of loads that are DONE */
} Call;

/* Send and receive as much as possible; return after the first stripe that fails. */
void move(Call *call);

#endif
