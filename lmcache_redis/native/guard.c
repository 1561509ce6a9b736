/* SPDX-License-Identifier: Apache-2.0 */
/* Guards mappings of memory that other processes may truncate: an access does not end this process.

   An access to a shared mapping beyond the end of its file raises SIGBUS. For a guarded mapping the
   handler maps fresh pages over it, marks it as lost and returns, so the access succeeds. The copying
   thread checks the mark before and afterwards (libwayland does the same with its clients' pools).
   Others may install a handler later, as faulthandler does: so `add` and `is_lost` look whether ours
   is there, and install it again. Any other SIGBUS is passed on: to the handler that came last, then
   to the first, then to the kernel. Each is called once, for ours may be what it calls next.
   _guard.pyi documents the Python side.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h> /* setup.py limits it to the stable ABI */

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>

#define MOST_GUARDS 4096

/* Written under the GIL, read by the handler at any time. start is 0 in a free entry. */
typedef struct {
    _Atomic(uintptr_t) start;
    _Atomic(size_t) nbytes;
    _Atomic(bool) lost;
} Guard;

static Guard guards[MOST_GUARDS];
static _Atomic(int) used; /* no entry from this index on was ever used */
static struct sigaction others[2]; /* the handlers that ours has replaced: the first, the last */
static _Atomic(int) waiting;       /* how many of them have not been called since */

static Guard *guard_of(uintptr_t address, uintptr_t *start, size_t *nbytes)
{
    for (int i = 0; i < atomic_load(&used); i++) {
        *start = atomic_load(&guards[i].start);
        *nbytes = atomic_load(&guards[i].nbytes);
        const bool whole = *start != 0 && *start == atomic_load(&guards[i].start);
        if (whole && address >= *start && address - *start < *nbytes) {
            return &guards[i];
        }
    }
    return NULL;
}

static void on_sigbus(int signum, siginfo_t *info, void *Py_UNUSED(context))
{
    const int saved_errno = errno;
    uintptr_t start;
    size_t nbytes;
    Guard *guard = NULL;
    if (info->si_code > 0) { /* an access, not kill(2) */
        guard = guard_of((uintptr_t)info->si_addr, &start, &nbytes);
    }
    if (guard != NULL) {
        atomic_store(&guard->lost, true);
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
        if (mmap((void *)start, nbytes, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) {
            errno = saved_errno;
            return;
        }
    }
    /* The access is repeated, or the signal is raised again, and reaches the next handler. */
    const struct sigaction kernel = {.sa_handler = SIG_DFL};
    const int next = atomic_load(&waiting) - 1;
    struct sigaction handler = next >= 0 ? others[next] : kernel;
    if (info->si_code > 0) { /* one that returns would be called for ever */
        handler.sa_flags |= SA_RESETHAND;
    }
    atomic_store(&waiting, next > 0 ? next : 0);
    sigaction(SIGBUS, &handler, NULL);
    if (info->si_code <= 0) {
        raise(signum);
    }
    errno = saved_errno;
}

/* Unless it is there. A system call, 0.6 us. */
static bool install(void)
{
    static bool was_installed;
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    struct sigaction current;
    if (sigaction(SIGBUS, NULL, &current) != 0) {
        return false;
    }
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_sigbus) {
        return true;
    }
    others[was_installed ? 1 : 0] = current;
    atomic_store(&waiting, was_installed ? 2 : 1);
    sigemptyset(&action.sa_mask);
    was_installed = sigaction(SIGBUS, &action, NULL) == 0 || was_installed;
    return was_installed;
}

static PyObject *add(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long start;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "Kn", &start, &nbytes)) {
        return NULL;
    }
    if (start == 0 || nbytes <= 0) {
        PyErr_SetString(PyExc_ValueError, "an empty mapping");
        return NULL;
    }
    if (!install()) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    for (int i = 0; i < MOST_GUARDS; i++) {
        if (atomic_load(&guards[i].start) == 0) {
            atomic_store(&guards[i].nbytes, (size_t)nbytes);
            atomic_store(&guards[i].lost, false);
            atomic_store(&guards[i].start, (uintptr_t)start);
            if (i >= atomic_load(&used)) {
                atomic_store(&used, i + 1);
            }
            return PyLong_FromLong(i);
        }
    }
    return PyErr_Format(PyExc_OSError, "%d mappings are guarded already", MOST_GUARDS);
}

static Guard *numbered(PyObject *args)
{
    int number;
    if (!PyArg_ParseTuple(args, "i", &number)) {
        return NULL;
    }
    if (number < 0 || number >= MOST_GUARDS || atomic_load(&guards[number].start) == 0) {
        PyErr_Format(PyExc_ValueError, "%d is not a guarded mapping", number);
        return NULL;
    }
    return &guards[number];
}

static PyObject *is_lost(PyObject *Py_UNUSED(self), PyObject *args)
{
    Guard *guard = numbered(args);
    if (guard != NULL && !install()) {
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return guard == NULL ? NULL : PyBool_FromLong(atomic_load(&guard->lost));
}

static PyObject *drop(PyObject *Py_UNUSED(self), PyObject *args)
{
    Guard *guard = numbered(args);
    if (guard == NULL) {
        return NULL;
    }
    atomic_store(&guard->start, 0);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "Guard a mapping; see _guard.pyi."},
    {"is_lost", is_lost, METH_VARARGS, "Whether pages of it were missing when accessed."},
    {"drop", drop, METH_VARARGS, "Stop guarding it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_guard",
    .m_doc = "Mappings that other processes may truncate; see _guard.pyi.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__guard(void)
{
    return PyModule_Create(&definition);
}
