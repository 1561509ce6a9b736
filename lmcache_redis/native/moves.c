/* A call works on several connections ("lanes") that each have one command under way. It sends what
 * waits on lanes that are free, and receives replies in the order in which they were asked for. It
 * does only what goes well: whatever else happens on a lane (another reply, a wait of more than some
 * milliseconds, the end of the connection) ends the call, which says how far it came, and Python
 * goes on from there.
 *
 * Sockets may block or not: every call here is MSG_DONTWAIT, and waits are in poll().
 */
#include "moves.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include "xxh3.h"

/* A payload is hashed in pieces of that size, while they are warm from the socket. */
#define PIECE_BYTES (128 << 10)

#define OK_LINE "+OK\r\n"
#define OK_BYTES 5

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

/* 1: ready, 0: nothing for `quiet_ms` or until `until`, -1: errno is set. */
static int wait_for(const Call *call, int fd, short events)
{
    struct pollfd poll_fd = {.fd = fd, .events = events};
    for (;;) {
        const double left_ms = (call->until - now()) * 1e3;
        if (left_ms <= 0) {
            return 0;
        }
        const int wait_ms = left_ms < call->quiet_ms ? (int)left_ms + 1 : call->quiet_ms;
        const int ready = poll(&poll_fd, 1, wait_ms);
        if (ready >= 0 || errno != EINTR) {
            return ready;
        }
    }
}

/* Bytes received, at least one; 0: none came in time; -1: the connection is lost (call->error). */
static ssize_t receive(Call *call, int fd, struct iovec *parts, size_t count)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    for (;;) {
        const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT);
        if (received > 0) {
            return received;
        }
        if (received == 0) {
            call->error = 0;
            return -1;
        }
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const int ready = wait_for(call, fd, POLLIN);
            if (ready == 0) {
                return 0;
            }
            if (ready > 0) {
                continue;
            }
        }
        if (errno != EINTR) {
            call->error = errno;
            return -1;
        }
    }
}

/* True: sent. False: call->why says what happened, call->moved how much was sent. */
static bool send_all(Call *call, int fd, struct iovec *parts, size_t count)
{
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
    call->moved = 0;
    while (message.msg_iovlen) {
        ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                const int ready = wait_for(call, fd, POLLOUT);
                if (ready > 0) {
                    continue;
                }
                if (ready == 0) {
                    call->why = SENT_PART;
                    return false;
                }
            }
            call->why = SEND_LOST;
            call->error = errno;
            return false;
        }
        call->moved += (size_t)sent;
        while (message.msg_iovlen && (size_t)sent >= message.msg_iov->iov_len) {
            sent -= (ssize_t)message.msg_iov->iov_len;
            message.msg_iov++;
            message.msg_iovlen--;
        }
        if (message.msg_iovlen) {
            message.msg_iov->iov_base = (char *)message.msg_iov->iov_base + sent;
            message.msg_iov->iov_len -= (size_t)sent;
        }
    }
    return true;
}

static uint64_t xxh3_of(const uint8_t *data, size_t nbytes)
{
    Xxh3 hash;
    xxh3_begin(&hash);
    return xxh3_end(&hash, data, nbytes);
}

/* ---- SET ---- */

/* Write the checksums of payload and header into the header. */
static void seal(uint8_t *header, const uint8_t *payload, size_t nbytes)
{
    const uint64_t of_payload = xxh3_of(payload, nbytes);
    memcpy(header + PAYLOAD_CHECKSUM_AT, &of_payload, CHECKSUM_BYTES);
    memset(header + OWN_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    const uint64_t own = xxh3_of(header, HEADER_BYTES);
    memcpy(header + OWN_CHECKSUM_AT, &own, CHECKSUM_BYTES);
}

static bool send_set(Call *call, const Task *task)
{
    seal(task->header.data, task->payload.data, task->payload.nbytes);
    struct iovec parts[4] = {
        {task->command.data, task->command.nbytes},
        {task->header.data, task->header.nbytes},
        {task->payload.data, task->payload.nbytes},
        {task->end.data, task->end.nbytes},
    };
    return send_all(call, call->fds[task->lane], parts, 4);
}

static int receive_ok(Call *call, const Task *task)
{
    call->first_bytes = 0;
    while (call->first_bytes < OK_BYTES) {
        struct iovec part = {call->first + call->first_bytes,
                             sizeof call->first - call->first_bytes};
        const ssize_t received = receive(call, call->fds[task->lane], &part, 1);
        if (received < 0) {
            return LOST;
        }
        if (received == 0) {
            return call->first_bytes ? REPLY : QUIET;
        }
        call->first_bytes += (size_t)received;
        const size_t most = call->first_bytes < OK_BYTES ? call->first_bytes : OK_BYTES;
        if (call->first_bytes > OK_BYTES || memcmp(call->first, OK_LINE, most) != 0) {
            return REPLY;
        }
    }
    return DONE;
}

/* ---- GET ---- */

static bool send_get(Call *call, const Task *task)
{
    struct iovec part = {task->command.data, task->command.nbytes};
    return send_all(call, call->fds[task->lane], &part, 1);
}

/* Whether a header is the expected one: its own checksum, and every field that is known. */
static bool is_expected(const uint8_t *header, const uint8_t *expected)
{
    uint8_t masked[HEADER_BYTES];
    uint64_t own;
    memcpy(masked, header, HEADER_BYTES);
    memcpy(&own, masked + OWN_CHECKSUM_AT, CHECKSUM_BYTES);
    memset(masked + OWN_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    if (own != xxh3_of(masked, HEADER_BYTES)) {
        return false;
    }
    memset(masked + STORE_ID_AT, 0, STORE_ID_BYTES);
    memset(masked + PAYLOAD_CHECKSUM_AT, 0, CHECKSUM_BYTES);
    memset(masked + CREATED_AT, 0, CHECKSUM_BYTES);
    return memcmp(masked, expected, HEADER_BYTES) == 0;
}

static int receive_value(Call *call, const Task *task)
{
    const int fd = call->fds[task->lane];
    const uint8_t *expected = task->header.data;
    const size_t wanted = task->header.nbytes, head = wanted - HEADER_BYTES;
    const uint8_t *header = call->first + head;
    uint8_t *payload = task->payload.data;
    const size_t nbytes = task->payload.nbytes;

    call->first_bytes = call->moved = 0;
    while (call->first_bytes < wanted) {
        /* With the first piece of the payload, which most often is there as well. */
        struct iovec parts[2] = {
            {call->first + call->first_bytes, wanted - call->first_bytes},
            {payload, nbytes < PIECE_BYTES ? nbytes : PIECE_BYTES},
        };
        const ssize_t received = receive(call, fd, parts, 2);
        if (received < 0) {
            return LOST;
        }
        if (received == 0) {
            return call->first_bytes ? REPLY : QUIET;
        }
        call->first_bytes += (size_t)received;
        if (call->first_bytes > wanted) {
            call->moved = call->first_bytes - wanted;
            call->first_bytes = wanted;
        }
        if (memcmp(call->first, expected, call->first_bytes < head ? call->first_bytes : head)) {
            return REPLY;
        }
    }
    Xxh3 hash;
    xxh3_begin(&hash);
    if (call->verify && call->moved) {
        xxh3_update(&hash, payload, call->moved, nbytes);
    }
    const size_t whole = nbytes + sizeof call->tail;
    while (call->moved < whole) {
        const bool in_payload = call->moved < nbytes;
        ssize_t received;
        if (in_payload && nbytes - call->moved <= PIECE_BYTES) {
            /* The last piece, and the CRLF in the same call where it is there. */
            struct iovec parts[2] = {{payload + call->moved, nbytes - call->moved},
                                     {call->tail, sizeof call->tail}};
            struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
            received = recvmsg(fd, &message, MSG_DONTWAIT);
        } else if (in_payload) {
            received = recv(fd, payload + call->moved, PIECE_BYTES, MSG_DONTWAIT);
        } else {
            received = recv(fd, call->tail + (call->moved - nbytes), whole - call->moved,
                            MSG_DONTWAIT);
        }
        if (received > 0) {
            call->moved += (size_t)received;
            if (call->verify && in_payload) {
                xxh3_update(&hash, payload, call->moved < nbytes ? call->moved : nbytes, nbytes);
            }
            continue;
        }
        if (received < 0 && errno == EINTR) {
            continue;
        }
        if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            const int ready = wait_for(call, fd, POLLIN);
            if (ready > 0) {
                continue;
            }
            if (ready == 0) {
                return PART;
            }
        }
        call->error = received < 0 ? errno : 0;
        return LOST;
    }
    if (memcmp(call->tail, "\r\n", sizeof call->tail) || !is_expected(header, expected + head)) {
        return VALUE;
    }
    if (call->verify) {
        uint64_t checksum;
        memcpy(&checksum, header + PAYLOAD_CHECKSUM_AT, CHECKSUM_BYTES);
        if (checksum != xxh3_end(&hash, payload, nbytes)) {
            return VALUE;
        }
    }
    memcpy(call->store_ids[call->done], header + STORE_ID_AT, STORE_ID_BYTES);
    return DONE;
}

/* ---- the call ---- */

/* Tasks are asked for in order, and done in that order. */
void move(Call *call)
{
    call->why = DONE;
    for (;;) {
        while (call->asked < call->count && call->idle_count) {
            Task *task = &call->tasks[call->asked];
            task->lane = call->idle[call->idle_count - 1];
            if (!(call->is_load ? send_get(call, task) : send_set(call, task))) {
                return;
            }
            call->idle_count--;
            call->asked++;
        }
        if (call->done == call->asked || (!call->drain && call->asked == call->count)) {
            return;
        }
        const Task *front = &call->tasks[call->done];
        call->why = call->is_load ? receive_value(call, front) : receive_ok(call, front);
        if (call->why != DONE) {
            return;
        }
        call->idle[call->idle_count++] = front->lane;
        call->done++;
        if (now() >= call->until) {
            return;
        }
    }
}
