"""Memory and signals between two processes by the driver alone, also after the exporter's end."""

from __future__ import annotations

import ctypes
import time
from statistics import median

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


def measure(
    size_bytes: int = _SIZE_BYTES, rounds: int = _ROUNDS, busy: int = _BUSY
) -> list[Figure]:
    """Raises DeviceError where nothing of this works."""
    with exporter(size_bytes) as other:
        handle, page = other.share()
        started_s = time.perf_counter()
        driver.set_context(driver.retain_context(0))
        context_s = time.perf_counter() - started_s
        started_s = time.perf_counter()
        base = driver.open_memory(handle.memory_handle)
        opened_s = time.perf_counter() - started_s
        known = _known_bytes(base)
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
        other.kill()
        after = _code(lambda: _read(base, stream))
        closed = _code(lambda: driver.close_memory(base))
        signals.close()
    return [
        zero("raw", "wrong reads", wrong),
        judged("raw", "signals that were waited for", polls > 0, "True", bool),
        judged("raw", "size of an opened allocation is known", known == handle.allocation_bytes,
               "True, else the engine's claim is believed", bool),
        at_most("raw", "context", context_s * 1e3, 1000, "ms"),
        at_most("raw", "opening memory", opened_s * 1e3, 100, "ms"),
        Figure("raw", "wait for a signal, ms", median(waits) * 1e3),
        zero("raw", "error of a read after the exporter was killed", after),
        zero("raw", "error of closing after that", closed),
    ]  # fmt: skip


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
