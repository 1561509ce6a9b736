# SPDX-License-Identifier: Apache-2.0
"""What mapping an engine and pinning the host pool do to other threads, and to other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.gpu.contact.calls import DIRECT, calls_on, layout_of, memory_bytes, pinned_arena
from benchmarks.gpu.contact.exporter import Exporter, exporter
from benchmarks.gpu.contact.figures import Figure, at_least, at_most
from lmcache_redis.cache.arena import Arena
from lmcache_redis.device import driver
from lmcache_redis.device.pinning import PoolPinning
from lmcache_redis.errors import GpuLost

_SLOT_BYTES = (1 << 20) - 4096
_TICK_S = 0.001
_PIN_WITHIN_S = 300.0
QUICK: dict[str, Any] = {"map_bytes": 8 << 20, "pool_bytes": 32 << 20, "watch_s": 0.2}


def measure(
    map_bytes: int = 4 << 30, pool_bytes: int = 16 << 30, watch_s: float = 5.0
) -> Iterator[Figure]:
    """map_bytes: of an engine's KV cache. pool_bytes: of the host pool. watch_s: of its pinning."""
    layout = layout_of(2 << 20, map_bytes // 2)
    with exporter(memory_bytes(layout)) as other, pinned_arena(_SLOT_BYTES) as small:

        def map_and_close() -> None:
            with calls_on(other, layout, small, DIRECT):
                pass

        mapped_s, stalled_s = _watched(map_and_close)
        yield at_most("stall", "mapping and closing", mapped_s, 2.0, "s")
        yield at_most("stall", "another thread while it is mapped", stalled_s, 0.25, "s")
        idle_s = _slowest_fill(other, watch_s / 5)
        yield Figure("stall", "slowest work of another process, idle, s", idle_s)
        yield from _pinning(other, pool_bytes, watch_s)


def _pinning(other: Exporter, pool_bytes: int, watch_s: float) -> Iterator[Figure]:
    arena = Arena(pool_bytes, _SLOT_BYTES)
    lost: list[GpuLost] = []
    pinning = PoolPinning(
        arena.base_address, arena.capacity, arena.slot_stride_bytes, lambda: arena.size_bytes,
        lost.append,
    )  # fmt: skip
    context = driver.retain_context(0)
    slowest: list[float] = []
    watcher = threading.Thread(target=lambda: slowest.append(_slowest_fill(other, watch_s)))

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
    share = pinning.pinned_bytes / arena.size_bytes
    yield at_least("stall", "pinned", share, 1.0, "of the pool")
    yield Figure("stall", "pinning with its pauses, s a GiB", pinned_s / gib if gib else 0.0)
    yield at_most("stall", "another thread while it is pinned", stalled_s, 0.25, "s")
    yield at_most("stall", "work of another process while it is pinned", max(slowest), 0.25, "s")
    pinning.close()
    arena.close()


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
