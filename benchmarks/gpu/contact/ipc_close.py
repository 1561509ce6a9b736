# SPDX-License-Identifier: Apache-2.0
"""Closing the memory of a process that was killed while a copy from it ran.

An agent does so after each engine that dies. Where it takes long or does not return, the GPU's
stores wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.contact.calls import pinned_arena
from benchmarks.gpu.contact.exporter import exporter
from benchmarks.gpu.contact.figures import Figure, at_most, zero
from lmcache_redis.device import driver
from lmcache_redis.errors import CudaError

QUICK: dict[str, Any] = {"size_bytes": 1 << 20, "copies": 4, "rounds": 2}
_MOST_MS = 100.0


def measure(size_bytes: int = 64 << 20, copies: int = 50, rounds: int = 10) -> Iterator[Figure]:
    """copies: of the whole memory, enqueued when the process is killed."""
    failed = 0
    with pinned_arena(size_bytes) as arena:
        stream = driver.create_stream()
        for number in range(1, rounds + 1):
            with exporter(size_bytes) as other:
                handle = other.share_allocation()[0]
                base = driver.open_memory(handle.memory_handle)
                for _ in range(copies):
                    driver.enqueue_copy_out(arena.base_address, base, size_bytes, stream)
                other.kill()
                try:
                    driver.synchronize_stream(stream)
                except CudaError as error:
                    print(error, flush=True)
                    failed += 1
                started_s = time.perf_counter()
                driver.close_memory(base)
                taken_ms = (time.perf_counter() - started_s) * 1e3
            yield at_most("ipc_close", f"close {number} after a kill", taken_ms, _MOST_MS, "ms")
        driver.destroy_stream(stream)
    yield zero("ipc_close", "copies that failed", failed)
