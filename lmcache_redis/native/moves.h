/* SPDX-License-Identifier: Apache-2.0 */
/* Stripes between slots and sockets, many in one call; see moves.c. Independent of Python. */
#ifndef LMCR_MOVES_H
#define LMCR_MOVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "xxh3.h"

/* The header of a stripe (all of it: chunks/frame.py). A reader does not know these fields in advance. */
#define HEADER_BYTES 640
#define STORE_ID_AT 8
#define STORE_ID_BYTES 16
#define FLAGS_AT 28
#define SEALED 1 /* in the first byte of the flags: the payload is encrypted */
#define PAYLOAD_CHECKSUM_AT 56
#define CREATED_AT 160
#define OWN_CHECKSUM_AT 168
#define CHECKSUM_BYTES 8
#define STORED_FORM_AT 176 /* codec u8, element bytes u8, zeros, stored bytes u64 */
#define PACKED 1           /* the codec; 0: plain */
#define ELEMENT_BYTES_AT 177
#define STORED_BYTES_AT 184
#define PLAIN_CHECKSUM_AT 192 /* and the tenant */
#define METADATA_AT 208
#define SEAL_AT 592
#define SEAL_BYTES 48

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
