# SPDX-License-Identifier: Apache-2.0
"""Memory that is mapped in pieces and shared by descriptors, then `model` on such memory.

One piece is what vLLM's cumem allocator makes of a KV cache; many are torch's expandable segments,
with which this process runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.contact import model
from benchmarks.gpu.contact.calls import (
    DIRECT,
    KERNEL,
    calls_on,
    layout_of,
    memory_bytes,
    pinned_arena,
)
from benchmarks.gpu.contact.exporter import LEAST_BYTES, exporter
from benchmarks.gpu.contact.figures import Figure, zero
from benchmarks.gpu.contact.order import compare

_PAGE_BYTES = 64 << 10
QUICK: dict[str, Any] = {"for_s": 0.2, "busy": 2, "with_model": False}


def measure(
    for_s: float = 4.0, busy: int = 100, seed: int = 7, *, with_model: bool = True
) -> Iterator[Figure]:
    """for_s: of each way in each kind of memory. with_model: runs `model` too."""
    moved_bytes = 2 * LEAST_BYTES
    layout = layout_of(_PAGE_BYTES, moved_bytes)
    size_bytes = memory_bytes(layout)
    with pinned_arena(2 * moved_bytes) as arena:
        for kind, piece_bytes in (("one piece", size_bytes), ("pieces of 2 MiB", LEAST_BYTES)):
            for way in (KERNEL, DIRECT):
                with (
                    exporter(size_bytes, piece_bytes) as other,
                    calls_on(other, layout, arena, way) as calls,
                ):
                    rounds, wrong = compare(other, calls, layout, for_s, busy, seed)
                yield Figure("pieces", f"rounds, {kind}, {way}, seed {seed}", rounds)
                yield zero("pieces", f"wrong, {kind}, {way}", wrong)
    if with_model:
        yield from model.measure("pieces")
