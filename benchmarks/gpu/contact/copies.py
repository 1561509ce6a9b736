# SPDX-License-Identifier: Apache-2.0
"""GB/s of whole calls by page size and by the way they move, beside one plain copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.contact.calls import (
    DIRECT,
    KERNEL,
    WAYS,
    calls_on,
    layout_of,
    memory_bytes,
    pinned_arena,
    seconds,
)
from benchmarks.gpu.contact.exporter import exporter
from benchmarks.gpu.contact.figures import Figure, at_least
from lmcache_redis.cache.arena import Arena
from lmcache_redis.device import driver

_KIB = 1 << 10
PAGE_BYTES = tuple(k * _KIB for k in (2, 4, 8, 16, 32, 64, 72, 512, 2048))
MOVED_BYTES = 32 << 20
DIRECTIONS = ("out", "in")
QUICK: dict[str, Any] = {"pages": (4 * _KIB,), "moved_bytes": 256 * _KIB}


def measure(pages: Sequence[int] = PAGE_BYTES, moved_bytes: int = MOVED_BYTES) -> Iterator[Figure]:
    """Raises DeviceError if no way works."""
    with pinned_arena(2 * moved_bytes) as arena:
        plain = {}
        for direction in DIRECTIONS:
            plain[direction] = moved_bytes / 1e9 / _plain_s(arena, moved_bytes, direction)
            yield Figure("copies", f"one plain copy {direction}, GB/s", plain[direction])
        faster: dict[str, list[int]] = {direction: [] for direction in DIRECTIONS}
        for page_bytes in pages:
            size = f"{page_bytes / _KIB:g} KiB"
            rates: dict[tuple[str, str], float] = {}
            for way in WAYS:
                for direction, rate in _rates(page_bytes, moved_bytes, arena, way).items():
                    rates[way, direction] = rate
                    yield Figure("copies", f"{size}, {way}, {direction}, GB/s", rate)
            for direction in DIRECTIONS:
                kernel, direct = rates[KERNEL, direction], rates[DIRECT, direction]
                share = max(kernel, direct) / plain[direction]
                name = f"{size}, best {direction}"
                yield at_least("copies", name, share, 0.9, "of a plain copy")
                if direct >= kernel:
                    faster[direction].append(page_bytes)
    for direction, sizes in faster.items():
        least = f"{min(sizes) / _KIB:g} KiB" if sizes else "none"
        name = f"direct copies {direction} are faster from pages of"
        yield Figure("copies", name, least, "what --direct-copy-bytes should be")


def _rates(page_bytes: int, moved_bytes: int, arena: Arena, way: str) -> dict[str, float]:
    """GB/s of each direction."""
    layout = layout_of(page_bytes, moved_bytes)
    with exporter(memory_bytes(layout)) as other, calls_on(other, layout, arena, way) as calls:
        gb = calls.moved_bytes / 1e9
        return {"out": gb / seconds(calls.gather), "in": gb / seconds(calls.scatter)}


def _plain_s(arena: Arena, moved_bytes: int, direction: str) -> float:
    there, stream = driver.allocate(moved_bytes), driver.create_stream()

    def copy() -> None:
        if direction == "out":
            driver.enqueue_copy_out(arena.base_address, there, moved_bytes, stream)
        else:
            driver.enqueue_copy_in(there, arena.base_address, moved_bytes, stream)
        driver.synchronize_stream(stream)

    try:
        return seconds(copy)
    finally:
        driver.destroy_stream(stream)
        driver.free(there)
