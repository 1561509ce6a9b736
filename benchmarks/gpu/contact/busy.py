# SPDX-License-Identifier: Apache-2.0
"""Gathers beside a process that computes: what they take then, and what they cost that process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.contact.calls import (
    DIRECT,
    KERNEL,
    Calls,
    calls_on,
    layout_of,
    memory_bytes,
    pinned_arena,
)
from benchmarks.gpu.contact.exporter import exporter
from benchmarks.gpu.contact.figures import Figure, at_most, judged
from benchmarks.gpu.contact.load import DECODE, KINDS, Load, load
from benchmarks.report import percentile

_KIB = 1 << 10
_PAGE_BYTES = (4 * _KIB, 32 * _KIB, 2048 * _KIB)
_MOVED_BYTES = 32 << 20
QUICK: dict[str, Any] = {
    "kinds": (DECODE,), "pages": (32 * _KIB,), "moved_bytes": 256 * _KIB, "for_s": 0.3,
    "small": True,
}  # fmt: skip


def measure(
    kinds: Sequence[str] = KINDS,
    pages: Sequence[int] = _PAGE_BYTES,
    moved_bytes: int = _MOVED_BYTES,
    for_s: float = 3.0,
    small: bool = False,
) -> Iterator[Figure]:
    """for_s: of each figure. small: the load. Raises DeviceError if the load or the calls fail."""
    with pinned_arena(2 * moved_bytes) as arena:
        for kind in kinds:
            with load(kind, small=small) as running:
                yield judged("busy", f"{kind} computes on", running.device, "cuda", "cuda".__eq__)
                alone_ms = running.step_ms(for_s)
                yield Figure("busy", f"{kind}, a step alone, ms", alone_ms)
                for page_bytes in pages:
                    layout = layout_of(page_bytes, moved_bytes)
                    for way in (KERNEL, DIRECT):
                        with (
                            exporter(memory_bytes(layout)) as other,
                            calls_on(other, layout, arena, way) as calls,
                        ):
                            name = f"{kind}, {page_bytes // _KIB} KiB, {way}"
                            yield from _beside(running, calls, name, alone_ms, for_s)


def _beside(running: Load, calls: Calls, name: str, alone_ms: float, for_s: float) -> list[Figure]:
    taken: list[float] = []
    ended = threading.Event()

    def gather() -> None:
        while not ended.is_set():
            started_s = time.perf_counter()
            calls.gather()
            taken.append(time.perf_counter() - started_s)

    calls.gather()
    thread = threading.Thread(target=gather)
    thread.start()
    try:
        step_ms = running.step_ms(for_s)
    finally:
        ended.set()
        thread.join()
    rate = calls.moved_bytes / 1e9 / median(taken)
    return [
        Figure("busy", f"{name}, GB/s", rate),
        Figure("busy", f"{name}, p50, ms", median(taken) * 1e3),
        Figure("busy", f"{name}, p99, ms", percentile(taken, 99) * 1e3),
        at_most("busy", f"{name}, a step", step_ms / alone_ms, 1.02, "of alone"),
    ]
