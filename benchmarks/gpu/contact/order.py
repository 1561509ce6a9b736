# SPDX-License-Identifier: Apache-2.0
"""Random fills with late signals: what a gather reads and a scatter leaves, compared each time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.contact.calls import (
    DIRECT,
    KERNEL,
    Calls,
    calls_on,
    layout_of,
    memory_bytes,
    pinned_arena,
)
from benchmarks.gpu.contact.exporter import Exporter, exporter
from benchmarks.gpu.contact.figures import Figure, zero
from lmcache_redis.device.layout import KVLayout

_PAGE_BYTES = 2048
_MOVED_BYTES = 128 << 10
_BUSY = 400
QUICK: dict[str, Any] = {"for_s": 0.6, "busy": 4}


def measure(for_s: float = 60.0, busy: int = _BUSY, seed: int = 5) -> Iterator[Figure]:
    """Half of the time with the kernel, and half with direct copies."""
    layout = layout_of(_PAGE_BYTES, _MOVED_BYTES)
    with pinned_arena(2 * _MOVED_BYTES) as arena:
        for way in (KERNEL, DIRECT):
            with (
                exporter(memory_bytes(layout)) as other,
                calls_on(other, layout, arena, way) as calls,
            ):
                rounds, wrong = compare(other, calls, layout, for_s / 2, busy, seed)
            yield Figure("order", f"rounds, {way}, seed {seed}", rounds)
            yield zero("order", f"wrong, {way}", wrong)


def compare(
    other: Exporter, calls: Calls, layout: KVLayout, for_s: float, busy: int, seed: int
) -> tuple[int, int]:
    """Rounds, at least one, and how many gathers and scatters were wrong."""
    random = np.random.default_rng(seed)
    until_s = time.monotonic() + for_s
    rounds = wrong = 0
    while not rounds or time.monotonic() < until_s:
        value = int(random.integers(2, 254))
        calls.gather(after=other.ask("fill", value, busy))
        wrong += any(bytes(slot) != bytes([value]) * len(slot) for slot in calls.slots)
        for slot in calls.slots:
            slot[:] = random.bytes(len(slot))
        calls.scatter(after=other.ask("fill", 0, busy))
        wrong += _held(other, calls, layout) != b"".join(calls.slots)
        rounds += 1
    return rounds, wrong


def _held(other: Exporter, calls: Calls, layout: KVLayout) -> bytes:
    """The chunk as its pages have it, in the order of a chunk."""
    return b"".join(
        bytes.fromhex(other.ask("read", s.offset + block * s.block_stride, s.page_bytes))
        for s in layout.segments
        for block in calls.block_ids
    )
