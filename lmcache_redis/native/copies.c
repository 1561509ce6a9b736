/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between an engine's blocks in CPU memory and slots, in one call without the GIL.
   _copies.pyi documents the Python side. */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* setup.py limits it to the stable ABI */

#include <stdint.h>
#include <string.h>
#include <time.h>

#define COLUMNS 3 /* addresses to copy to, addresses to copy from, bytes */

static long long monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Returns how many bytes were copied before `until_ns`; at most `most` after each look at it. */
static int64_t copy_all(const int64_t *to, const int64_t *from, const int64_t *nbytes, size_t count,
                        int64_t most, long long until_ns)
{
    int64_t copied = 0, unlooked = most;
    for (size_t i = 0; i < count; i++) {
        for (int64_t at = 0; at < nbytes[i];) {
            if (unlooked >= most) {
                if (monotonic_ns() > until_ns) {
                    return copied;
                }
                unlooked = 0;
            }
            const int64_t left = nbytes[i] - at, room = most - unlooked;
            const int64_t here = left < room ? left : room;
            memcpy((char *)to[i] + at, (const char *)from[i] + at, (size_t)here);
            at += here;
            copied += here;
            unlooked += here;
        }
    }
    return copied;
}

static PyObject *copy(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *given[COLUMNS], *result = NULL;
    Py_buffer columns[COLUMNS];
    long long most, until_ns;
    int held = 0;
    if (!PyArg_ParseTuple(args, "OOOLL", &given[0], &given[1], &given[2], &most, &until_ns)) {
        return NULL;
    }
    for (; held < COLUMNS; held++) {
        if (PyObject_GetBuffer(given[held], &columns[held], PyBUF_SIMPLE) != 0) {
            goto out;
        }
    }
    const Py_ssize_t size = columns[0].len;
    if (size % (Py_ssize_t)sizeof(int64_t) != 0 || columns[1].len != size || columns[2].len != size
        || most <= 0) {
        PyErr_SetString(PyExc_ValueError, "three columns of int64, equally long, were expected");
        goto out;
    }
    int64_t copied;
    Py_BEGIN_ALLOW_THREADS
    copied = copy_all(columns[0].buf, columns[1].buf, columns[2].buf,
                      (size_t)size / sizeof(int64_t), most, until_ns);
    Py_END_ALLOW_THREADS
    result = PyLong_FromLongLong(copied);
out:
    while (held > 0) {
        PyBuffer_Release(&columns[--held]);
    }
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "Copy between addresses; see _copies.pyi."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_copies", "Copies between blocks and slots, without the GIL.",
    -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copies(void)
{
    return PyModule_Create(&module);
}
