/* SPDX-License-Identifier: Apache-2.0 */
/* A call works on several connections ("lanes") with one stripe in flight on each. It sends waiting
 * requests on free lanes, and receives replies in the order of the requests. Each stripe ends with a
 * definite result: stored or loaded, another reply of the server, or a connection that is lost or out
 * of step. A call that would wait long returns; the next one continues from the `Progress` of each
 * lane. The caller keeps deadlines and interprets results.
 *
 * Sockets may be blocking or not: every call here is MSG_DONTWAIT, and waits are in poll().
 */
#define _GNU_SOURCE /* memmem */
#include "moves.h"
#include "packing.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

/* A payload is hashed in pieces of this size while they are still in the processor's cache. */
#define PIECE_BYTES (128 << 10)

#define OK_LINE "+OK\r\n"
#define OK_BYTES 5

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* After a system call that failed. WAIT: nothing for `quiet_ms` or until `until`. LOST:
 * call->bad.error says why. 0: try again. */
static int wait_or_lost(Call *call, int fd, short events)
{
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
        const double left_ms = (call->until - now()) * 1e3;
        if (left_ms <= 0) {
            return WAIT;
        }
        struct pollfd poll_fd = {.fd = fd, .events = events};
        const int wait_ms = left_ms < call->quiet_ms ? (int)left_ms + 1 : call->quiet_ms;
        const int ready = poll(&poll_fd, 1, wait_ms);
        if (ready >= 0) {
            return ready ? 0 : WAIT;
        }
    }
    if (errno == EINTR) {
        return 0;
    }
    call->bad.error = errno;
    return LOST;
}

/* Receive some bytes into parts, and add them to `got`. 0: at least one arrived; else as above. */
static int receive(Call *call, int fd, struct iovec *parts, size_t count, size_t *got)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    for (;;) {
        const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT);
        if (received > 0) {
            *got += (size_t)received;
            return 0;
        }
        if (received == 0) {
            call->bad.error = 0;
            return LOST;
        }
        const int result = wait_or_lost(call, fd, POLLIN);
        if (result) {
            return result;
        }
    }
}

/* Send the rest of a request. 0: all of it was sent; else as above. */
static int send_rest(Call *call, int fd, struct iovec *parts, size_t count, size_t *sent)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    size_t skip = *sent;
    for (;;) {
        while (message.msg_iovlen && skip >= message.msg_iov->iov_len) {
            skip -= message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (!message.msg_iovlen) {
            return 0;
        }
        message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + skip;
        message.msg_iov->iov_len -= skip;
        skip = 0;
        const ssize_t now_sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (now_sent >= 0) {
            *sent += (size_t)now_sent;
            skip = (size_t)now_sent;
            continue;
        }
        const int result = wait_or_lost(call, fd, POLLOUT);
        if (result) {
            return result;
        }
    }
}

/* ---- requests ---- */

/* A GET is a command alone. */
static int send_request(Call *call, const Task *task, Progress *progress)
{
    if (!call->is_load && !progress->sent && task->payload.nbytes > XXH3_SHORT_BYTES) {
        header_add_checksums(task->header.data, task->payload.data, task->payload.nbytes);
    }
    struct iovec parts[4] = {
        {task->command.data, task->command.nbytes},
        {task->header.data, task->header.nbytes},
        {task->payload.data, task->payload.nbytes},
        {task->end.data, task->end.nbytes},
    };
    return send_rest(call, call->fds[task->lane], parts, call->is_load ? 1 : 4, &progress->sent);
}

/* ---- lines ---- */

static int ends(Call *call, int end, const uint8_t *data, size_t nbytes)
{
    call->bad.data = data;
    call->bad.nbytes = nbytes;
    return end;
}

/* The length in a line "$n", as servers write it: -1 for a null, -2 if it is malformed. */
static int64_t length_of(const uint8_t *line, size_t nbytes)
{
    if (nbytes == 3 && line[1] == '-' && line[2] == '1') {
        return -1;
    }
    if (nbytes < 2 || nbytes > 14 || (line[1] == '0' && nbytes > 2)) {
        return -2;
    }
    int64_t length = 0;
    for (size_t i = 1; i < nbytes; i++) {
        if (line[i] < '0' || line[i] > '9') {
            return -2;
        }
        length = 10 * length + (line[i] - '0');
    }
    return length <= ((int64_t)1 << 40) ? length : -2;
}

/* Receive the first line of another reply, which begins with one of `kinds`. 0: it is complete. */
static int receive_line(Call *call, const Task *task, Progress *p, const char *kinds)
{
    while (!p->line) {
        if (p->got && !memchr(kinds, p->first[0], strlen(kinds))) {
            return GARBAGE;
        }
        const size_t have = p->got < sizeof p->first ? p->got : sizeof p->first;
        const uint8_t *end = have > 1 ? memmem(p->first, have, "\r\n", 2) : NULL;
        if (end != NULL) {
            p->line = (size_t)(end - p->first) + 2;
            return 0;
        }
        if (have == sizeof p->first) {
            return GARBAGE;
        }
        struct iovec part = {p->first + have, sizeof p->first - have};
        const int result = receive(call, call->fds[task->lane], &part, 1, &p->got);
        if (result) {
            return result;
        }
    }
    return 0;
}

static int receive_ok(Call *call, const Task *task, Progress *p)
{
    const int result = receive_line(call, task, p, "+-:");
    if (result) {
        return result;
    }
    if (p->got != p->line) {
        return GARBAGE;
    }
    return p->line == OK_BYTES && memcmp(p->first, OK_LINE, OK_BYTES) == 0
               ? DONE
               : ends(call, LINE, p->first, p->line - 2);
}

/* ---- values ---- */

/* Receive the rest of a value whose payload begins at byte `start` of the reply. 0: it is complete. */
static int receive_rest(Call *call, const Task *task, Progress *p, size_t start, uint8_t *into,
                        size_t nbytes)
{
    const size_t whole = start + nbytes + sizeof p->tail;
    while (p->got < whole) {
        const size_t there = p->got - start;
        /* The last piece, and in the same call the CRLF if it has arrived. */
        struct iovec parts[2] = {{into + there, nbytes - there}, {p->tail, sizeof p->tail}};
        size_t count = 2;
        if (there >= nbytes) {
            parts[0] = (struct iovec){p->tail + (there - nbytes), whole - p->got};
            count = 1;
        } else if (nbytes - there > PIECE_BYTES) {
            parts[0].iov_len = PIECE_BYTES;
            count = 1;
        }
        const int result = receive(call, call->fds[task->lane], parts, count, &p->got);
        if (result) {
            return result;
        }
        if (call->verify && there < nbytes) {
            const size_t now_there = p->got - start;
            xxh3_update(&p->hash, into, now_there < nbytes ? now_there : nbytes, nbytes);
        }
    }
    return memcmp(p->tail, "\r\n", sizeof p->tail) ? GARBAGE : 0;
}

/* Short ones are verified by the caller. */
static bool is_verified(const Call *call, Progress *p, const uint8_t *header, const uint8_t *stored,
                        size_t nbytes)
{
    uint64_t checksum;
    memcpy(&checksum, header + PAYLOAD_CHECKSUM_AT, CHECKSUM_BYTES);
    return !call->verify ||
           (nbytes > XXH3_SHORT_BYTES && checksum == xxh3_end(&p->hash, stored, nbytes));
}

/* ---- packed payloads ---- */

static const uint8_t *expected_of(const Task *task)
{
    return task->header.data + (task->header.nbytes - HEADER_BYTES);
}

/* Where the stored bytes go: sealed ones are opened by the caller, in the slot. */
static Bytes room_of(const Task *task, const uint8_t *header)
{
    return (header[FLAGS_AT] | expected_of(task)[FLAGS_AT]) & SEALED ? task->payload : task->end;
}

/* Whether one is sealed and the other is not. */
static bool is_other_kind(const Task *task, const uint8_t *header)
{
    return (header[FLAGS_AT] ^ expected_of(task)[FLAGS_AT]) & SEALED;
}

/* A value of another length begins with this header: whether it is a packed one that was asked for,
 * or differs from that in the seal alone, and is received for the sake of the connection. What has
 * arrived behind the header is then where the rest follows. */
static bool begin_packed(Call *call, const Task *task, Progress *p, size_t stored)
{
    const size_t wanted = task->header.nbytes, nbytes = task->payload.nbytes;
    const uint8_t *header = p->first + p->line;
    const Bytes room = room_of(task, header);
    uint8_t expected[HEADER_BYTES];
    memcpy(expected, expected_of(task), HEADER_BYTES);
    expected[FLAGS_AT] ^= is_other_kind(task, header) ? SEALED : 0;
    if (stored >= nbytes || stored > room.nbytes ||
        !header_is_expected(header, expected, stored, nbytes)) {
        return false;
    }
    /* `first` has the first bytes of the reply, and the slot those from `wanted` on, if any. */
    const size_t start = p->line + HEADER_BYTES, arrived = p->got - start;
    const size_t there = arrived < stored ? arrived : stored;
    const size_t first = sizeof p->first - start, in_first = there < first ? there : first;
    for (size_t i = 0; i < arrived - there && i < sizeof p->tail; i++) {
        const size_t at = start + stored + i;
        p->tail[i] = at < sizeof p->first ? p->first[at] : task->payload.data[at - wanted];
    }
    uint8_t *into = room.data;
    if (there > in_first) { /* first: it may be the slot itself */
        memmove(into + in_first, task->payload.data + (start + in_first - wanted), there - in_first);
    }
    memcpy(into, p->first + start, in_first);
    p->stored = stored;
    xxh3_begin(&p->hash);
    if (call->verify) {
        xxh3_update(&p->hash, into, there, stored);
    }
    return true;
}

/* Whether the payload is in its slot, and the one that was packed. */
static bool unpack_whole(const Call *call, const Task *task, const uint8_t *header,
                         const uint8_t *stored, size_t nbytes)
{
    const Bytes payload = task->payload;
    return unpack(stored, nbytes, header[ELEMENT_BYTES_AT], payload.data, payload.nbytes) &&
           (!call->verify || header_is_of_plain(header, payload.data, payload.nbytes));
}

static int receive_packed(Call *call, const Task *task, Progress *p)
{
    const uint8_t *header = p->first + p->line;
    const size_t start = p->line + HEADER_BYTES, stored = p->stored;
    const Bytes room = room_of(task, header);
    uint8_t *into = room.data;
    if (p->got > start + stored + sizeof p->tail || stored > room.nbytes) {
        return GARBAGE;
    }
    const int result = receive_rest(call, task, p, start, into, stored);
    if (result) {
        return result;
    }
    const bool is_sealed = header[FLAGS_AT] & SEALED;
    if (is_other_kind(task, header) || !is_verified(call, p, header, into, stored) ||
        (!is_sealed && !unpack_whole(call, task, header, into, stored))) {
        return ends(call, MISMATCH, header, HEADER_BYTES);
    }
    memcpy(call->headers[call->done], header, HEADER_BYTES);
    return DONE;
}

/* ---- replies that are not the expected one ---- */

/* Receive more of a reply that is not the expected value. */
static int receive_other(Call *call, const Task *task, Progress *p)
{
    const size_t wanted = task->header.nbytes;
    if (!p->is_other) {
        p->is_other = true;
        if (p->got > wanted) {
            const size_t behind = p->got - wanted, room = sizeof p->first - wanted;
            memcpy(p->first + wanted, task->payload.data, behind < room ? behind : room);
        }
    }
    int result = receive_line(call, task, p, "-$");
    if (result) {
        return result;
    }
    const size_t line = p->line - 2;
    const int64_t length = p->first[0] == '$' ? length_of(p->first, line) : -1;
    if (length >= 0) {
        const size_t kept = length < HEADER_BYTES ? (size_t)length : HEADER_BYTES;
        while (!result && p->got < p->line + kept) {
            struct iovec part = {p->first + p->got, p->line + kept - p->got};
            result = receive(call, call->fds[task->lane], &part, 1, &p->got);
        }
        if (result) {
            return result;
        }
        if (kept == HEADER_BYTES && begin_packed(call, task, p, (size_t)length - kept)) {
            return receive_packed(call, task, p);
        }
        return ends(call, OTHER_LENGTH, p->first + p->line, kept);
    }
    if (length < -1 || p->got != p->line) {
        return GARBAGE;
    }
    return p->first[0] == '-' ? ends(call, LINE, p->first, line) : NOTHING;
}

/* ---- whole values ---- */

static int receive_value(Call *call, const Task *task, Progress *p)
{
    const uint8_t *expected = task->header.data;
    const size_t wanted = task->header.nbytes, head = wanted - HEADER_BYTES;
    const uint8_t *header = p->first + head;
    uint8_t *payload = task->payload.data;
    const size_t nbytes = task->payload.nbytes;

    if (p->stored) {
        return receive_packed(call, task, p);
    }
    if (p->is_other) {
        return receive_other(call, task, p);
    }
    while (p->got < wanted) {
        /* With the first piece of the payload, which has usually arrived as well. */
        struct iovec parts[2] = {
            {p->first + p->got, wanted - p->got},
            {payload, nbytes < PIECE_BYTES ? nbytes : PIECE_BYTES},
        };
        const int result = receive(call, call->fds[task->lane], parts, 2, &p->got);
        if (result) {
            return result;
        }
        if (memcmp(p->first, expected, p->got < head ? p->got : head)) {
            return receive_other(call, task, p);
        }
        if (p->got >= wanted) {
            xxh3_begin(&p->hash);
            if (call->verify) {
                xxh3_update(&p->hash, payload, p->got - wanted, nbytes);
            }
        }
    }
    const int result = receive_rest(call, task, p, wanted, payload, nbytes);
    if (result) {
        return result;
    }
    if (!header_is_expected(header, expected + head, nbytes, nbytes) ||
        !is_verified(call, p, header, payload, nbytes)) {
        return ends(call, MISMATCH, header, HEADER_BYTES);
    }
    memcpy(call->headers[call->done], header, HEADER_BYTES);
    return DONE;
}

/* ---- the call ---- */

/* Send the next request, or the rest of the last one. False: it has to wait, or failed. */
static bool send_next(Call *call)
{
    if (!call->sending) {
        call->tasks[call->asked].lane = call->idle[--call->idle_count];
        memset(call->progress[call->tasks[call->asked].lane], 0, offsetof(Progress, first));
        call->asked++;
    }
    const Task *task = &call->tasks[call->asked - 1];
    Progress *progress = call->progress[task->lane];
    const int result = send_request(call, task, progress);
    call->sending = result == LOST ? call->bad.error : result == WAIT ? EAGAIN : 0;
    return !call->sending;
}

/* Requests are sent in order, and finished in that order. */
void move(Call *call)
{
    for (;;) {
        while (call->sending || (call->asked < call->count && call->idle_count)) {
            if (!send_next(call)) {
                return;
            }
        }
        if (call->done == call->asked || (!call->drain && call->asked == call->count)) {
            return;
        }
        const Task *front = &call->tasks[call->done];
        Progress *progress = call->progress[front->lane];
        call->bad.end = call->is_load ? receive_value(call, front, progress)
                                      : receive_ok(call, front, progress);
        if (call->bad.end == WAIT) {
            return;
        }
        call->done++;
        if (call->bad.end != DONE) {
            return;
        }
        call->idle[call->idle_count++] = front->lane;
        if (now() >= call->until) {
            return;
        }
    }
}
