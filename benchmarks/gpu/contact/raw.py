# SPDX-License-Identifier: Apache-2.0
"""Memory and signals between two processes by the driver alone, also after the exporter's end."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.gpu.contact.exporter import exporter
from benchmarks.gpu.contact.figures import Figure, at_most, judged, zero
from lmcache_redis.device import driver
from lmcache_redis.device.signals import SignalPage
from lmcache_redis.errors import CudaError, DriverError

_SIZE_BYTES = 64 << 20
_READ_BYTES = 4096
_ROUNDS = 40
_BUSY = 20
_WITHIN_S = 30.0
QUICK: dict[str, Any] = {"size_bytes": 1 << 20, "rounds": 5, "busy": 2}


def measure(
    size_bytes: int = _SIZE_BYTES, rounds: int = _ROUNDS, busy: int = _BUSY
) -> Iterator[Figure]:
    """Raises DeviceError where nothing of this works."""
    with exporter(size_bytes) as other:
        handle, page = other.share_allocation()
        started_s = time.perf_counter()
        driver.set_context(driver.retain_context(0))
        context_s = time.perf_counter() - started_s
        yield at_most("raw", "context", context_s * 1e3, 1000, "ms")
        started_s = time.perf_counter()
        base = driver.open_memory(handle.memory_handle)
        opened_s = time.perf_counter() - started_s
        yield at_most("raw", "opening memory", opened_s * 1e3, 100, "ms")
        known = _known_bytes(base)
        yield judged(
            "raw", "size of an opened allocation is known", known == handle.allocation_bytes,
            "True, else the engine's claim is believed", bool,
        )  # fmt: skip
        signals = SignalPage(page)
        stream = driver.create_stream()
        wrong = polls = 0
        waits: list[float] = []
        for number in range(rounds):
            value = 2 * (number % 100) + 2
            ticket = other.ask("fill", value, busy)
            started_s = time.perf_counter()
            while not signals.has_happened(ticket):
                polls += 1
                if time.perf_counter() - started_s > _WITHIN_S:
                    raise DriverError(0, "a signal did not arrive within 30 s")
            waits.append(time.perf_counter() - started_s)
            last = base + handle.offset_bytes + size_bytes - _READ_BYTES
            wrong += _read(last, stream) != bytes([value]) * _READ_BYTES
        yield zero("raw", "wrong reads", wrong)
        yield judged("raw", "signals that were waited for", polls > 0, "True", bool)
        yield Figure("raw", "wait for a signal, ms", median(waits) * 1e3)
        other.kill()
        after = _code(lambda: _read(base, stream))
        yield zero("raw", "error of a read after the exporter was killed", after)
        closed = _code(lambda: driver.close_memory(base))
        yield zero("raw", "error of closing after that", closed)
        signals.close()


def _known_bytes(base: int) -> int | None:
    try:
        return driver.allocation_of(base).size_bytes
    except DriverError:
        return None


def _read(address: int, stream: int) -> bytes:
    held = ctypes.create_string_buffer(_READ_BYTES)
    driver.enqueue_copy_out(ctypes.addressof(held), address, _READ_BYTES, stream)
    driver.synchronize_stream(stream)
    return held.raw


def _code(call: object) -> int:
    assert callable(call)
    try:
        call()
    except CudaError as error:
        return error.code
    return 0
