"""What mapping an engine and pinning the host pool do to other threads, and to other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from benchmarks.gpu.contact.calls import DIRECT, calls_on, layout_of, memory_bytes, pinned_arena
from benchmarks.gpu.contact.exporter import Exporter, exporter
from benchmarks.gpu.contact.figures import Figure, at_least, at_most
from lmcache_redis.cache.pool import Arena
from lmcache_redis.device import driver
from lmcache_redis.device.pinning import PoolPinning
from lmcache_redis.errors import GpuLost

_SLOT_BYTES = (1 << 20) - 4096
_TICK_S = 0.001
_PIN_WITHIN_S = 300.0


def measure(map_bytes: int = 4 << 30, pool_bytes: int = 16 << 30) -> list[Figure]:
    """map_bytes: of an engine's KV cache. pool_bytes: of the host pool."""
    layout = layout_of(2 << 20, map_bytes // 2)
    with exporter(memory_bytes(layout)) as other, pinned_arena(_SLOT_BYTES) as small:

        def map_and_close() -> None:
            with calls_on(other, layout, small, DIRECT):
                pass

        mapped_s, stalled_s = _watched(map_and_close)
        figures = [
            at_most("stall", "mapping and closing", mapped_s, 2.0, "s"),
            at_most("stall", "another thread, meanwhile", stalled_s, 0.25, "s"),
        ]
        idle_s = _slowest_fill(other, 1.0)
        figures.append(Figure("stall", "slowest work of another process, idle, s", idle_s))
        return figures + _pinning(other, pool_bytes)


def _pinning(other: Exporter, pool_bytes: int) -> list[Figure]:
    arena = Arena(pool_bytes, _SLOT_BYTES)
    lost: list[GpuLost] = []
    pinning = PoolPinning(
        arena.base_address, arena.capacity, arena.slot_stride_bytes, lambda: arena.size_bytes,
        lost.append,
    )  # fmt: skip
    context = driver.retain_context(0)
    slowest: list[float] = []
    watcher = threading.Thread(target=lambda: slowest.append(_slowest_fill(other, 5.0)))

    def pin() -> None:
        watcher.start()
        pinning.begin(lambda: driver.set_context(context))
        until_s = time.monotonic() + _PIN_WITHIN_S
        while pinning.pinned_bytes < arena.size_bytes and not (pinning.failure or lost):
            if time.monotonic() > until_s:
                break
            time.sleep(_TICK_S)

    pinned_s, stalled_s = _watched(pin)
    watcher.join()
    gib = pinning.pinned_bytes / (1 << 30)
    figures = [
        at_least("stall", "pinned", pinning.pinned_bytes / arena.size_bytes, 1.0, "of the pool"),
        Figure("stall", "pinning with its pauses, s a GiB", pinned_s / gib if gib else 0.0),
        at_most("stall", "another thread, meanwhile", stalled_s, 0.25, "s"),
        at_most("stall", "slowest work of another process, meanwhile", max(slowest), 0.25, "s"),
    ]  # fmt: skip
    pinning.close()
    arena.close()
    return figures


def _slowest_fill(other: Exporter, for_s: float) -> float:
    """The longest time that a small piece of work took in the other process."""
    slowest, until_s = 0.0, time.monotonic() + for_s
    while time.monotonic() < until_s:
        started_s = time.perf_counter()
        other.ask("read", 0, 4096)
        slowest = max(slowest, time.perf_counter() - started_s)
    return slowest


def _watched(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of some work, and the longest time for which a thread beside it did not run."""
    gaps = [0.0]
    ended = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(_TICK_S)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    started_s = time.perf_counter()
    try:
        work()
    finally:
        taken_s = time.perf_counter() - started_s
        ended.set()
        thread.join()
    return taken_s, max(gaps)
