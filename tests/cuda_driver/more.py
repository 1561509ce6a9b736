# SPDX-License-Identifier: Apache-2.0
"""Functions of the driver that only tests call."""

from __future__ import annotations

from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p

from lmcache_redis.device import driver

NOT_READY = 600


def current_device() -> int:
    """The GPU of this thread's context."""
    ordinal = c_int()
    driver._call("cuCtxGetDevice", byref(ordinal))
    return ordinal.value


def free_memory() -> tuple[int, int]:
    """Free and total bytes of the GPU of this thread's context."""
    free, total = c_size_t(), c_size_t()
    driver._call("cuMemGetInfo_v2", byref(free), byref(total))
    return free.value, total.value


def copy_in_at_once(address: int, host: int, size_bytes: int) -> None:
    """From host memory to the GPU, by the driver alone."""
    driver._call("cuMemcpyHtoD_v2", c_uint64(address), c_void_p(host), c_size_t(size_bytes))


def copy_in(address: int, host: int, size_bytes: int) -> None:
    """From host memory of any kind to the GPU; complete on return, for every stream."""
    copy_in_at_once(address, host, size_bytes)
    # From pageable memory it returns when the source was read, and other streams do not wait for
    # the rest ("API synchronization behavior" of the manual).
    driver._call("cuStreamSynchronize", None)


def has_happened(event: int) -> bool:
    library = driver._library()
    code = library.cuEventQuery(c_void_p(event))
    if code == NOT_READY:
        return False
    driver._check(library, "cuEventQuery", code)
    return True
