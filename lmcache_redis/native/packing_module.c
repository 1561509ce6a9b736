/* SPDX-License-Identifier: Apache-2.0 */
/* The Python side of packing.c: buffers in, a number out, without the GIL in between. _packing.pyi
 * documents the functions. */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* setup.py limits it to the stable ABI */

#include "packing.h"
#include "tiles.h"

static bool is_possible(Py_ssize_t element_bytes, const Py_buffer *in, const Py_buffer *out)
{
    if (element_bytes != 1 && element_bytes != 2 && element_bytes != 4) {
        PyErr_Format(PyExc_ValueError, "elements of %zd bytes: 1, 2 and 4 are possible",
                     element_bytes);
        return false;
    }
    const uintptr_t from = (uintptr_t)in->buf, to = (uintptr_t)out->buf;
    if (from < to + (size_t)out->len && to < from + (size_t)in->len) {
        PyErr_SetString(PyExc_ValueError, "the buffers overlap");
        return false;
    }
    return true;
}

static PyObject *pack_bytes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer plain, into;
    Py_ssize_t element_bytes;
    if (!PyArg_ParseTuple(args, "y*nw*", &plain, &element_bytes, &into)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (is_possible(element_bytes, &plain, &into)) {
        size_t used;
        Py_BEGIN_ALLOW_THREADS
        used = pack(plain.buf, (size_t)plain.len, (size_t)element_bytes, into.buf, (size_t)into.len);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(used);
    }
    PyBuffer_Release(&into);
    PyBuffer_Release(&plain);
    return result;
}

static PyObject *unpack_bytes(PyObject *Py_UNUSED(self), PyObject *args)
{
    Py_buffer stored, plain;
    Py_ssize_t element_bytes;
    if (!PyArg_ParseTuple(args, "y*nw*", &stored, &element_bytes, &plain)) {
        return NULL;
    }
    PyObject *result = NULL;
    if (is_possible(element_bytes, &stored, &plain)) {
        bool good;
        Py_BEGIN_ALLOW_THREADS
        good = unpack(stored.buf, (size_t)stored.len, (size_t)element_bytes, plain.buf,
                      (size_t)plain.len);
        Py_END_ALLOW_THREADS
        result = PyBool_FromLong(good);
    }
    PyBuffer_Release(&plain);
    PyBuffer_Release(&stored);
    return result;
}

static PyObject *use_vectors(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *vectors;
    if (!PyArg_ParseTuple(args, "s", &vectors)) {
        return NULL;
    }
    return PyBool_FromLong(tiles_use(vectors));
}

static PyMethodDef methods[] = {
    {"pack", pack_bytes, METH_VARARGS, "Pack a payload; see _packing.pyi."},
    {"unpack", unpack_bytes, METH_VARARGS, "Bring a payload back; see _packing.pyi."},
    {"use_vectors", use_vectors, METH_VARARGS, "Use others than the widest; for tests."},
    {NULL, NULL, 0, NULL},
};

/* The widest first; every processor has the last. */
static const char *const VECTORS[] = {"avx512", "avx2", "plain"};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_packing",
    .m_doc = "Payloads in fewer bytes, bit for bit; see _packing.pyi.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__packing(void)
{
    for (const char *const *widest = VECTORS; !tiles_use(*widest); widest++) {
    }
    return PyModule_Create(&definition);
}
