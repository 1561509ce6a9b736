"""Gathers beside a process that computes: what they take then, and what they cost that process."""

from __future__ import annotations

import threading
import time
from statistics import median

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
from benchmarks.gpu.contact.figures import Figure, at_most
from benchmarks.gpu.contact.load import KINDS, Load, load
from benchmarks.report import percentile

_KIB = 1 << 10
_PAGE_BYTES = (4 * _KIB, 32 * _KIB, 2048 * _KIB)
_MOVED_BYTES = 32 << 20
_FOR_S = 3.0


def measure() -> list[Figure]:
    """Raises DeviceError if the load or the calls fail."""
    figures: list[Figure] = []
    with pinned_arena(2 * _MOVED_BYTES) as arena:
        for kind in KINDS:
            with load(kind) as running:
                alone_ms = running.step_ms(_FOR_S)
                figures.append(Figure("busy", f"{kind}, a step alone, ms", alone_ms))
                for page_bytes in _PAGE_BYTES:
                    layout = layout_of(page_bytes, _MOVED_BYTES)
                    for way in (KERNEL, DIRECT):
                        with (
                            exporter(memory_bytes(layout)) as other,
                            calls_on(other, layout, arena, way) as calls,
                        ):
                            name = f"{kind}, {page_bytes // _KIB} KiB, {way}"
                            figures += _beside(running, calls, name, alone_ms)
    return figures


def _beside(running: Load, calls: Calls, name: str, alone_ms: float) -> list[Figure]:
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
        step_ms = running.step_ms(_FOR_S)
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
