"""GB/s of whole calls by page size and by the way they move, beside one plain copy."""

from __future__ import annotations

from collections.abc import Sequence

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
from lmcache_redis.cache.pool import Arena
from lmcache_redis.device import driver

_KIB = 1 << 10
PAGE_BYTES = tuple(k * _KIB for k in (2, 4, 8, 16, 32, 64, 72, 512, 2048))
MOVED_BYTES = 32 << 20


def measure(pages: Sequence[int] = PAGE_BYTES, moved_bytes: int = MOVED_BYTES) -> list[Figure]:
    """Raises DeviceError if no way works."""
    with pinned_arena(2 * moved_bytes) as arena:
        plain = {"out": moved_bytes / 1e9 / _plain_s(arena, moved_bytes)}
        figures = [Figure("copies", "one plain copy out, GB/s", plain["out"])]
        faster: list[int] = []
        for page_bytes in pages:
            rates = _rates(page_bytes, moved_bytes, arena)
            for (way, direction), rate in rates.items():
                name = f"{page_bytes / _KIB:g} KiB, {way}, {direction}, GB/s"
                figures.append(Figure("copies", name, rate))
            best = max(rates[KERNEL, "out"], rates[DIRECT, "out"])
            figures.append(
                at_least("copies", f"{page_bytes / _KIB:g} KiB, best", best / plain["out"], 0.9,
                         "of a plain copy")
            )  # fmt: skip
            if rates[DIRECT, "out"] >= rates[KERNEL, "out"]:
                faster.append(page_bytes)
        least = f"{min(faster) / _KIB:g} KiB" if faster else "none"
        figures.append(
            Figure("copies", "direct copies are faster from pages of", least,
                   "what --direct-copy-bytes should be")
        )  # fmt: skip
    return figures


def _rates(page_bytes: int, moved_bytes: int, arena: Arena) -> dict[tuple[str, str], float]:
    layout = layout_of(page_bytes, moved_bytes)
    found: dict[tuple[str, str], float] = {}
    for way in WAYS:
        with exporter(memory_bytes(layout)) as other, calls_on(other, layout, arena, way) as calls:
            gb = calls.moved_bytes / 1e9
            found[way, "out"] = gb / seconds(calls.gather)
            found[way, "in"] = gb / seconds(calls.scatter)
    return found


def _plain_s(arena: Arena, moved_bytes: int) -> float:
    there, stream = driver.allocate(moved_bytes), driver.create_stream()

    def copy() -> None:
        driver.enqueue_copy_out(arena.base_address, there, moved_bytes, stream)
        driver.synchronize_stream(stream)

    try:
        return seconds(copy)
    finally:
        driver.destroy_stream(stream)
        driver.free(there)
