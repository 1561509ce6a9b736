/* SPDX-License-Identifier: Apache-2.0 */
/* The Python side of moves.c: buffers in, a tuple out, without the GIL in between. _moves.pyi
 * documents the functions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* setup.py limits it to the stable ABI */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "moves.h"
#include "tiles.h"
#include "xxh3.h"

#define PROGRESS_BYTES (sizeof(Progress) + _Alignof(Progress))

/* A call, and the buffers that its lanes and tasks point into. */
typedef struct {
    Call call;
    Py_buffer buffers[MOST_LANES + 4 * MOST_TASKS];
    int count;
} Held;

static void release_all(Held *held)
{
    while (held->count > 0) {
        PyBuffer_Release(&held->buffers[--held->count]);
    }
}

static bool take_buffer(Held *held, PyObject *given, int flags, Bytes *bytes)
{
    Py_buffer *buffer = &held->buffers[held->count];
    if (PyObject_GetBuffer(given, buffer, flags) != 0) {
        return false;
    }
    held->count++;
    bytes->data = buffer->buf;
    bytes->nbytes = (size_t)buffer->len;
    return true;
}

/* Lanes are tuples (file descriptor, progress). */
static bool take_lanes(Held *held, PyObject *lanes)
{
    Call *call = &held->call;
    const Py_ssize_t count = PyList_Size(lanes);
    if (count < 0) {
        return false;
    }
    if (count < 1 || count > MOST_LANES) {
        PyErr_Format(PyExc_ValueError, "%zd lanes: 1 to %d are possible", count, MOST_LANES);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *lane = PyList_GetItem(lanes, i), *progress;
        Bytes bytes;
        if (!PyTuple_Check(lane)) {
            PyErr_SetString(PyExc_TypeError, "a lane is a tuple (descriptor, progress)");
            return false;
        }
        if (!PyArg_ParseTuple(lane, "iO:lane", &call->fds[i], &progress) ||
            !take_buffer(held, progress, PyBUF_WRITABLE, &bytes)) {
            return false;
        }
        if (call->fds[i] < 0 || bytes.nbytes < PROGRESS_BYTES) {
            PyErr_Format(PyExc_ValueError, "lane %zd has no file descriptor or room", i);
            return false;
        }
        const uintptr_t past = (uintptr_t)bytes.data % _Alignof(Progress);
        call->progress[i] = (Progress *)(bytes.data + (past ? _Alignof(Progress) - past : 0));
    }
    call->lanes = (int)count;
    return true;
}

/* One task: (command, header, payload, end). */
static bool take_task(Held *held, PyObject *given, Task *task)
{
    const bool is_load = held->call.is_load;
    PyObject *command, *header, *payload, *end;
    if (!PyTuple_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "a task is a tuple (command, header, payload, end)");
        return false;
    }
    if (!PyArg_ParseTuple(given, "OOOO:task", &command, &header, &payload, &end) ||
        !take_buffer(held, command, PyBUF_SIMPLE, &task->command) ||
        !take_buffer(held, header, is_load ? PyBUF_SIMPLE : PyBUF_WRITABLE, &task->header) ||
        !take_buffer(held, payload, is_load ? PyBUF_WRITABLE : PyBUF_SIMPLE, &task->payload) ||
        !take_buffer(held, end, PyBUF_SIMPLE, &task->end)) {
        return false;
    }
    if (is_load && task->end.nbytes && held->buffers[held->count - 1].readonly) {
        PyErr_SetString(PyExc_BufferError, "the room for a packed payload is read-only");
        return false;
    }
    const size_t head_bytes = task->header.nbytes - HEADER_BYTES; /* of a GET's reply */
    if (is_load ? head_bytes < 1 || head_bytes > MOST_HEAD_BYTES : head_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "a header of %zu bytes", task->header.nbytes);
        return false;
    }
    return true;
}

/* The first tasks are in flight, on the first lanes; the other lanes are idle. */
static bool take_tasks(Held *held, PyObject *tasks, int in_flight)
{
    Call *call = &held->call;
    const Py_ssize_t count = PyList_Size(tasks);
    if (count < 0) {
        return false;
    }
    if (count > MOST_TASKS || in_flight < 0 || in_flight > count || in_flight > call->lanes) {
        PyErr_Format(PyExc_ValueError, "%zd tasks, %d of them in flight on %d lanes", count,
                     in_flight, call->lanes);
        return false;
    }
    if (call->sending && !in_flight) {
        PyErr_SetString(PyExc_ValueError, "no task is in flight that could be sent in part");
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        call->tasks[i].lane = (int)i;
        if (!take_task(held, PyList_GetItem(tasks, i), &call->tasks[i])) {
            return false;
        }
    }
    call->count = (int)count;
    call->asked = in_flight;
    for (int lane = call->lanes - 1; lane >= in_flight; lane--) {
        call->idle[call->idle_count++] = lane;
    }
    return true;
}

/* The result of a stripe: its store id, its header if it is sealed, or (end, error, data). */
static PyObject *finished(const Call *call, int i)
{
    const Result *bad = &call->bad;
    if (i == call->done - 1 && bad->end > DONE) {
        const char *data = bad->nbytes ? (const char *)bad->data : "";
        return Py_BuildValue("iiy#", bad->end, bad->end == LOST ? bad->error : 0, data,
                             (Py_ssize_t)bad->nbytes);
    }
    if (!call->is_load) {
        return PyBytes_FromStringAndSize(NULL, 0);
    }
    const char *header = (const char *)call->headers[i];
    return header[FLAGS_AT] & SEALED
               ? PyBytes_FromStringAndSize(header, HEADER_BYTES)
               : PyBytes_FromStringAndSize(header + STORE_ID_AT, STORE_ID_BYTES);
}

static PyObject *result_of(const Call *call, int in_flight)
{
    PyObject *lanes = PyList_New(call->asked - in_flight);
    PyObject *done = PyList_New(call->done);
    bool good = lanes != NULL && done != NULL;
    for (int i = in_flight; good && i < call->asked; i++) {
        PyObject *lane = PyLong_FromLong(call->tasks[i].lane);
        good = lane != NULL && PyList_SetItem(lanes, i - in_flight, lane) == 0;
    }
    for (int i = 0; good && i < call->done; i++) {
        PyObject *result = finished(call, i);
        good = result != NULL && PyList_SetItem(done, i, result) == 0;
    }
    PyObject *result = good ? Py_BuildValue("OOi", lanes, done, call->sending) : NULL;
    Py_XDECREF(lanes);
    Py_XDECREF(done);
    return result;
}

static PyObject *run(PyObject *args, bool is_load)
{
    PyObject *lanes, *tasks;
    int in_flight, is_sending, drain, verify, quiet_ms;
    double until;
    if (!PyArg_ParseTuple(args, "OOippdpi", &lanes, &tasks, &in_flight, &is_sending, &drain, &until,
                          &verify, &quiet_ms)) {
        return NULL;
    }
    Held *held = malloc(sizeof *held);
    if (held == NULL) {
        return PyErr_NoMemory();
    }
    Call *call = &held->call;
    held->count = 0;
    call->is_load = is_load;
    call->sending = is_sending ? EAGAIN : 0;
    call->drain = drain;
    call->verify = verify;
    call->quiet_ms = quiet_ms;
    call->until = until;
    call->lanes = call->idle_count = call->count = call->asked = call->done = 0;
    call->bad = (Result){.end = WAIT};
    PyObject *result = NULL;
    if (take_lanes(held, lanes) && take_tasks(held, tasks, in_flight)) {
        Py_BEGIN_ALLOW_THREADS
        move(call);
        Py_END_ALLOW_THREADS
        result = result_of(call, in_flight);
    }
    release_all(held);
    free(held);
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

static PyObject *use_vectors(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *vectors;
    if (!PyArg_ParseTuple(args, "s", &vectors)) {
        return NULL;
    }
    return PyBool_FromLong(xxh3_use(vectors));
}

static PyMethodDef methods[] = {
    {"load", load, METH_VARARGS, "Stripes by GET into slots; see _moves.pyi."},
    {"store", store, METH_VARARGS, "Stripes by SET from slots; see _moves.pyi."},
    {"xxh3_64", xxh3_64, METH_VARARGS, "The checksum of a payload, in steps; for tests."},
    {"use_vectors", use_vectors, METH_VARARGS, "Compute checksums otherwise; for tests."},
    {NULL, NULL, 0, NULL},
};

/* The widest first; every processor has the last. */
static const char *const VECTORS[] = {"avx512", "avx2", "neon", "plain"};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_moves", "Stripes between slots and sockets, without the GIL.",
    -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__moves(void)
{
    for (const char *const *widest = VECTORS; !xxh3_use(*widest); widest++) {
    }
    for (const char *const *widest = VECTORS; !tiles_use(*widest); widest++) {
    }
    PyObject *made = PyModule_Create(&module);
    if (made != NULL) {
        PyModule_AddIntConstant(made, "PROGRESS_BYTES", (long)PROGRESS_BYTES);
    }
    return made;
}
