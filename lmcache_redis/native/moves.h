/* Stripes between slots and sockets, many in one call; moves.c has the how. No Python here. */
#ifndef LMCR_MOVES_H
#define LMCR_MOVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
#define MOST_HEAD_BYTES 32 /* "$", a length and CRLF */

/* How a call ended; resp/moving.py says what each means. */
enum { DONE, QUIET, REPLY, PART, VALUE, LOST, SENT_PART, SEND_LOST };

typedef struct {
    uint8_t *data;
    size_t nbytes;
} Bytes;

typedef struct {
    Bytes command; /* of a SET: what comes before the header */
    Bytes header;  /* of a GET: what is expected, beginning with $length CRLF */
    Bytes payload;
    Bytes end; /* of a SET: what follows the payload */
    int lane;
} Task;

typedef struct {
    int fds[MOST_LANES];
    int idle[MOST_LANES]; /* lanes; the last is used first */
    int lanes, idle_count;
    Task tasks[MOST_TASKS];
    int count, asked, done; /* tasks before `done` are done, before `asked` under way */
    int quiet_ms;
    double until; /* CLOCK_MONOTONIC, seconds */
    bool is_load, verify, drain;

    int why;
    int error;          /* errno; 0 where a connection was closed */
    size_t moved;       /* REPLY: bytes behind `first`, in the payload; PART: of payload and tail;
                           SENT_PART: of the whole command */
    size_t first_bytes; /* of `first` that came */
    uint8_t first[MOST_HEAD_BYTES + HEADER_BYTES]; /* what comes of a reply before its payload */
    uint8_t tail[2];                               /* what follows the payload */
    uint8_t store_ids[MOST_TASKS][STORE_ID_BYTES]; /* of tasks that are done */
} Call;

/* Send and receive what can be, and say in `why` how it ended. */
void move(Call *call);

#endif
