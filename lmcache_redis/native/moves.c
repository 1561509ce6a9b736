/* Stripes between slots and sockets, many in one call and without the GIL.
 *
 * A call works on several connections ("lanes") that each have one command under way. It sends
 * what waits on lanes that are free, and receives replies in the order in which they were asked
 * for. It does only what goes well: whatever else happens on a lane (another reply, a wait of more
 * than some milliseconds, the end of the connection) ends the call, which says how far it came,
 * and Python goes on from there. lmcache_redis/native/__init__.pyi says what goes in and out.
 *
 * Sockets may block or not: every call here is MSG_DONTWAIT, and waits are in poll().
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* setup.py limits it to the stable ABI */

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

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
#define MOST_HEAD_BYTES 32 /* "$", a length and CRLF */

/* A payload is hashed in pieces of that size, while they are warm from the socket. */
#define PIECE_BYTES (128 << 10)

#define OK_LINE "+OK\r\n"
#define OK_BYTES 5

/* How a call ended; see the .pyi. */
enum { DONE, QUIET, REPLY, PART, VALUE, LOST, SENT_PART, SEND_LOST };

typedef struct {
    Py_buffer command; /* of a SET: what comes before the header */
    Py_buffer header;  /* of a GET: what is expected, beginning with $length CRLF */
    Py_buffer payload;
    Py_buffer end;     /* of a SET: what follows the payload */
    int lane;
} Task;

typedef struct {
    int fds[MOST_LANES];
    Task tasks[MOST_TASKS];
    int idle[MOST_LANES]; /* lanes; used from the last on */
    int lanes, idle_count;
    int count, asked, done, held;
    int quiet_ms;
    double until; /* CLOCK_MONOTONIC, seconds */
    bool is_load, verify, drain;

    int why, error;
    size_t moved; /* of a PART: bytes of the payload; of a SENT_PART: of the whole command */
    size_t first_bytes;
    uint8_t first[MOST_HEAD_BYTES + HEADER_BYTES]; /* what came first of the reply */
    uint8_t tail[2]; /* what followed the payload */
    uint8_t store_ids[MOST_TASKS][STORE_ID_BYTES];
} Call;

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
static ssize_t receive(Call *call, int fd, void *into, size_t nbytes)
{
    for (;;) {
        const ssize_t received = recv(fd, into, nbytes, MSG_DONTWAIT);
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
    seal(task->header.buf, task->payload.buf, (size_t)task->payload.len);
    struct iovec parts[4] = {
        {task->command.buf, (size_t)task->command.len},
        {task->header.buf, (size_t)task->header.len},
        {task->payload.buf, (size_t)task->payload.len},
        {task->end.buf, (size_t)task->end.len},
    };
    return send_all(call, call->fds[task->lane], parts, 4);
}

static int receive_ok(Call *call, const Task *task)
{
    call->first_bytes = 0;
    while (call->first_bytes < OK_BYTES) {
        const ssize_t received =
            receive(call, call->fds[task->lane], call->first + call->first_bytes,
                    sizeof call->first - call->first_bytes);
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
    struct iovec part = {task->command.buf, (size_t)task->command.len};
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
    const uint8_t *expected = task->header.buf;
    const size_t wanted = (size_t)task->header.len, head = wanted - HEADER_BYTES;
    const uint8_t *header = call->first + head;
    uint8_t *payload = task->payload.buf;
    const size_t nbytes = (size_t)task->payload.len;

    call->first_bytes = call->moved = 0;
    while (call->first_bytes < wanted) {
        const ssize_t received =
            receive(call, fd, call->first + call->first_bytes, wanted - call->first_bytes);
        if (received < 0) {
            return LOST;
        }
        if (received == 0) {
            return call->first_bytes ? REPLY : QUIET;
        }
        call->first_bytes += (size_t)received;
        if (memcmp(call->first, expected, call->first_bytes < head ? call->first_bytes : head)) {
            return REPLY;
        }
    }
    Xxh3 hash;
    xxh3_begin(&hash);
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

/* Tasks are asked for in order, and done in order: [0, done) [done, asked) under way [asked, count). */
static void move(Call *call)
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

/* ---- Python ---- */

static void release_tasks(Call *call)
{
    for (int i = 0; i < call->held; i++) {
        PyBuffer_Release(&call->tasks[i].command);
        PyBuffer_Release(&call->tasks[i].header);
        PyBuffer_Release(&call->tasks[i].payload);
        PyBuffer_Release(&call->tasks[i].end);
    }
    call->held = 0;
}

static bool take_lanes(Call *call, PyObject *fds)
{
    const Py_ssize_t count = PyList_Size(fds);
    if (count < 0) {
        return false;
    }
    if (count < 1 || count > MOST_LANES) {
        PyErr_Format(PyExc_ValueError, "%zd lanes: 1 to %d are possible", count, MOST_LANES);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const long fd = PyLong_AsLong(PyList_GetItem(fds, i));
        if (fd < 0 || fd > INT_MAX) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "%ld is no file descriptor", fd);
            }
            return false;
        }
        call->fds[i] = (int)fd;
    }
    call->lanes = (int)count;
    return true;
}

static bool check_task(const Call *call, const Task *task)
{
    if (task->payload.len <= XXH3_SHORT_BYTES) {
        PyErr_Format(PyExc_ValueError, "a payload of %zd bytes: more than %d are needed",
                     task->payload.len, XXH3_SHORT_BYTES);
        return false;
    }
    const Py_ssize_t most = call->is_load ? HEADER_BYTES + MOST_HEAD_BYTES : HEADER_BYTES;
    const Py_ssize_t least = call->is_load ? HEADER_BYTES + 1 : HEADER_BYTES;
    if (task->header.len < least || task->header.len > most) {
        PyErr_Format(PyExc_ValueError, "a header of %zd bytes", task->header.len);
        return false;
    }
    return true;
}

/* One task: (command, header, payload, end), and where it is under way its lane. */
static bool take_task(Call *call, PyObject *given, int lane)
{
    Task *task = &call->tasks[call->held];
    PyObject *command, *header, *payload, *end;
    memset(task, 0, sizeof *task);
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a task is a tuple (command, header, payload, end)");
        return false;
    }
    if (!PyArg_ParseTuple(given, "OOOO:task", &command, &header, &payload, &end)) {
        return false;
    }
    /* From here on release_tasks has it: releasing a buffer that was not had does nothing. */
    call->held++;
    task->lane = lane;
    const int to_header = call->is_load ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    const int to_payload = call->is_load ? PyBUF_WRITABLE : PyBUF_SIMPLE;
    return PyObject_GetBuffer(command, &task->command, PyBUF_SIMPLE) == 0 &&
           PyObject_GetBuffer(header, &task->header, to_header) == 0 &&
           PyObject_GetBuffer(payload, &task->payload, to_payload) == 0 &&
           PyObject_GetBuffer(end, &task->end, PyBUF_SIMPLE) == 0 && check_task(call, task);
}

/* The first tasks are under way, on the first lanes; the other lanes are idle. */
static bool take_tasks(Call *call, PyObject *tasks, int under_way)
{
    const Py_ssize_t count = PyList_Size(tasks);
    if (count < 0) {
        return false;
    }
    if (count > MOST_TASKS || under_way < 0 || under_way > count || under_way > call->lanes) {
        PyErr_Format(PyExc_ValueError, "%zd tasks, %d of them under way on %d lanes", count,
                     under_way, call->lanes);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const int lane = i < under_way ? (int)i : -1;
        if (!take_task(call, PyList_GetItem(tasks, i), lane)) {
            return false;
        }
    }
    call->count = (int)count;
    call->asked = under_way;
    for (int lane = call->lanes - 1; lane >= under_way; lane--) {
        call->idle[call->idle_count++] = lane;
    }
    return true;
}

static PyObject *result_of(const Call *call, int under_way)
{
    PyObject *lanes = PyList_New(call->asked - under_way);
    PyObject *done = PyList_New(call->done);
    PyObject *first = NULL, *tail = NULL;
    if (lanes == NULL || done == NULL) {
        goto failed;
    }
    for (int i = under_way; i < call->asked; i++) {
        PyObject *lane = PyLong_FromLong(call->tasks[i].lane);
        if (lane == NULL) {
            goto failed;
        }
        PyList_SetItem(lanes, i - under_way, lane);
    }
    for (int i = 0; i < call->done; i++) {
        PyObject *store_id =
            PyBytes_FromStringAndSize((const char *)call->store_ids[i],
                                      call->is_load ? STORE_ID_BYTES : 0);
        if (store_id == NULL) {
            goto failed;
        }
        PyList_SetItem(done, i, store_id);
    }
    const bool replied = call->why == REPLY || call->why == PART || call->why == VALUE;
    first = PyBytes_FromStringAndSize((const char *)call->first,
                                      replied ? (Py_ssize_t)call->first_bytes : 0);
    tail = PyBytes_FromStringAndSize((const char *)call->tail, sizeof call->tail);
    if (first == NULL || tail == NULL) {
        goto failed;
    }
    const bool sending = call->why == SENT_PART || call->why == SEND_LOST;
    const int lane = sending ? call->tasks[call->asked].lane : -1;
    return Py_BuildValue("NNiiniNN", lanes, done, call->why, lane, (Py_ssize_t)call->moved,
                         call->error, first, tail);
failed:
    Py_XDECREF(lanes);
    Py_XDECREF(done);
    Py_XDECREF(first);
    Py_XDECREF(tail);
    return NULL;
}

static PyObject *run(PyObject *args, bool is_load)
{
    PyObject *fds, *tasks;
    int under_way, drain, quiet_ms, verify = 1;
    double until;
    if (!PyArg_ParseTuple(args, is_load ? "OOipidp" : "OOipid", &fds, &tasks, &under_way, &drain,
                          &quiet_ms, &until, &verify)) {
        return NULL;
    }
    Call *call = calloc(1, sizeof *call);
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    call->is_load = is_load;
    call->drain = drain;
    call->verify = verify;
    call->quiet_ms = quiet_ms;
    call->until = until;
    PyObject *result = NULL;
    if (take_lanes(call, fds) && take_tasks(call, tasks, under_way)) {
        Py_BEGIN_ALLOW_THREADS
        move(call);
        Py_END_ALLOW_THREADS
        result = result_of(call, under_way);
    }
    release_tasks(call);
    free(call);
    return result;
}

static PyObject *load(PyObject *Py_UNUSED(self), PyObject *args)
{
    return run(args, true);
}

static PyObject *store(PyObject *Py_UNUSED(self), PyObject *args)
{
    return run(args, false);
}

static PyObject *xxh3_64(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t step = 0;
    if (!PyArg_ParseTuple(args, "y*|n", &data, &step)) {
        return NULL;
    }
    if (data.len <= XXH3_SHORT_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd bytes: more than %d are needed", data.len,
                     XXH3_SHORT_BYTES);
        PyBuffer_Release(&data);
        return NULL;
    }
    Xxh3 hash;
    xxh3_begin(&hash);
    for (Py_ssize_t there = step; step > 0 && there < data.len; there += step) {
        xxh3_update(&hash, data.buf, (size_t)there, (size_t)data.len);
    }
    const uint64_t result = xxh3_end(&hash, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLongLong(result);
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, "GET stripes into slots; see _moves.pyi."},
    {"store", store, METH_VARARGS, "SET stripes from slots; see _moves.pyi."},
    {"xxh3_64", xxh3_64, METH_VARARGS, "The checksum of a payload, in steps; for tests."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_moves", "Stripes between slots and sockets, without the GIL.",
    -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__moves(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && PyModule_AddStringConstant(made, "vectors", xxh3_init()) != 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
