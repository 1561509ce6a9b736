# SPDX-License-Identifier: Apache-2.0
"""Gathers and scatters as the agent makes them, on memory of an `Exporter`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import numpy as np

from benchmarks.gpu.contact.exporter import Exporter
from lmcache_redis.cache.arena import Arena
from lmcache_redis.device import driver
from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.device.layout import KVLayout, Segment

KERNEL, DIRECT, UNBATCHED = "kernel", "direct copies", "direct copies without batches"
WAYS = (KERNEL, DIRECT, UNBATCHED)

_NEVER = 1 << 60
_SLOT_BYTES = (1 << 20) - 4096
_ROUNDS = 7
_MOST_SEGMENTS = 64


def layout_of(page_bytes: int, moved_bytes: int) -> KVLayout:
    """A KV cache of twice the bytes that a call moves, in pages of one size."""
    pages = max(1, moved_bytes // page_bytes)
    segments = max(1, min(_MOST_SEGMENTS, pages // 16))
    blocks = 2 * (pages // segments)
    each = blocks * page_bytes
    places = tuple(Segment(0, n * each, page_bytes, page_bytes) for n in range(segments))
    return KVLayout((), "uint8", "cuda", 16, blocks, places)


def memory_bytes(layout: KVLayout) -> int:
    return layout.num_blocks * layout.block_bytes


class Calls:
    """Calls of one way on one layout, with half of its blocks in random order."""

    def __init__(self, device: CudaDevice, layout: KVLayout, arena: Arena, seed: int = 1) -> None:
        self._device = device
        ids = np.random.default_rng(seed).permutation(layout.num_blocks)
        self.block_ids: list[int] = ids[: max(1, layout.num_blocks // 2)].tolist()
        self.moved_bytes = len(self.block_ids) * layout.block_bytes
        starts = range(0, self.moved_bytes, arena.slot_bytes)
        sizes = [min(arena.slot_bytes, self.moved_bytes - start) for start in starts]
        self.slots = arena.views(tuple(range(len(sizes))), sizes)
        self._call = CopyCall([ChunkCopy(self.block_ids, self.slots)])

    def gather(self, after: int | None = None) -> None:
        self._device.gather(self._call._replace(after=after))

    def scatter(self, after: int | None = None) -> None:
        self._device.scatter(self._call._replace(after=after))


@contextmanager
def pinned_arena(size_bytes: int) -> Iterator[Arena]:
    """Slots that are pinned as one piece."""
    arena = Arena(size_bytes + _SLOT_BYTES, _SLOT_BYTES)
    driver.set_context(driver.retain_context(0))
    driver.pin(arena.base_address, arena.size_bytes)
    try:
        yield arena
    finally:
        driver.unpin(arena.base_address)
        arena.close()


@contextmanager
def calls_on(other: Exporter, layout: KVLayout, arena: Arena, way: str) -> Iterator[Calls]:
    """Maps the memory of another process for calls of one way."""
    least = _NEVER if way == KERNEL else 0
    gpus = Gpus(
        direct_copy_bytes=least,
        pieces_of=lambda slots: np.zeros(len(slots), np.int64),
        batch_copies=way != UNBATCHED,
    )
    memory, signals = other.share()
    device = CudaDevice([layout], [memory], gpus, signals)
    try:
        yield Calls(device, layout, arena)
    finally:
        device.close()


def seconds(call: Callable[[], None]) -> float:
    """The median of some calls, after one that is not counted."""
    call()
    taken = []
    for _ in range(_ROUNDS):
        started_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started_s)
    return median(taken)
