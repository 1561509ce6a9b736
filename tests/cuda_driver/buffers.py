# SPDX-License-Identifier: Apache-2.0
"""Memory of the GPU and of the host that tests write and read, and what tests expect."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from lmcache_redis.device import driver
from lmcache_redis.errors import CudaError

PAGE = 4096
FRESH = 0xDB
Bytes = npt.NDArray[np.uint8]


def bytes_at(address: int, size_bytes: int) -> Bytes:
    """What is in memory of the GPU, or of the host, without a call to the driver."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def on_gpu(size_bytes: int) -> tuple[int, Bytes]:
    address = driver.allocate(size_bytes)
    return address, bytes_at(address, size_bytes)


def pinned(size_bytes: int) -> tuple[int, Bytes]:
    address = driver.allocate_pinned(size_bytes)
    return address, bytes_at(address, size_bytes)


def pageable(size_bytes: int) -> tuple[int, Bytes]:
    """Whole pages."""
    room = np.zeros(size_bytes + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    found = room[start : start + size_bytes]
    return found.ctypes.data, found


def refused(code: int) -> pytest.RaisesExc[CudaError]:
    return pytest.raises(CudaError, match=rf"error {code} ")


def in_thread(do: Callable[[], object]) -> threading.Thread:
    """Begins it in a thread that has the context of the first GPU."""
    context = driver.retain_context(0)

    def run() -> None:
        driver.set_context(context)
        do()

    thread = threading.Thread(target=run)
    thread.start()
    return thread
