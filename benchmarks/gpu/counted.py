# SPDX-License-Identifier: Apache-2.0
"""How often the agent calls the driver to move a chunk, counted; and what a lock in it would cost.

    python -m benchmarks.gpu.counted

Needs no GPU and no driver: calls are counted and not made. The cost is computed: a driver that
holds a lock of the machine during each call serves all GPUs one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from lmcache_redis.device import driver
from lmcache_redis.device.calls import ChunkCopy, CopyCall
from lmcache_redis.device.gpu import Gpu, Gpus
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.device.moving import moves_of
from lmcache_redis.device.table import Storage

STRIPE_BYTES = (1 << 20) - 4096
BLOCKS = 16  # of a chunk of 256 tokens
GPUS = 8
HELD_US = (1, 5, 20)
CHUNKS = 16  # 4,096 tokens, loaded to each GPU at once
_DIRECT, _KERNEL = 1, 1 << 40
_UUID = "00000000-0000-0000-0000-000000000000"


class Shape(NamedTuple):
    """Of a rank's KV cache: pages of ``page_bytes`` in each of ``segments``."""

    name: str
    page_bytes: int
    segments: int


# bfloat16, 16 tokens a block: K and V of a layer together, or of all layers (kv_cache_layout).
SHAPES = (
    Shape("llama 8B, a page a layer", 64 << 10, 32),
    Shape("llama 8B, a page a block", 2 << 20, 1),
    Shape("llama 70B TP 8, a page a layer", 8 << 10, 80),
    Shape("llama 70B TP 8, a page a block", 640 << 10, 1),
)


@contextmanager
def _counting(calls: Counter[str], *, batches: bool) -> Iterator[None]:
    def count(name: str, *arguments: Any) -> None:
        calls[name] += 1

    with (
        mock.patch.object(driver, "_call", count),
        mock.patch.object(driver, "has", return_value=batches),
        mock.patch.object(driver, "ordinal_of", return_value=0),
        mock.patch.object(driver, "device_attribute", return_value=int(batches)),
        mock.patch.object(driver, "allocate_pinned", return_value=_pinned.ctypes.data),
    ):
        yield


_pinned = np.zeros(1 << 20, np.uint8)


def count(shape: Shape, direct_copy_bytes: int, *, batches: bool, scatter: bool) -> Counter[str]:
    """The calls for a chunk whose blocks have no neighbours, once all is made and compiled."""
    calls: Counter[str] = Counter()
    each = 2 * BLOCKS * shape.page_bytes
    places = (
        Segment(0, n * each, shape.page_bytes, shape.page_bytes) for n in range(shape.segments)
    )
    layout = KVLayout((), "uint8", "cuda", 16, 2 * BLOCKS, tuple(places))
    chunk_bytes = BLOCKS * layout.block_bytes
    stripes = -(-chunk_bytes // STRIPE_BYTES)
    pool = memoryview(bytearray(stripes << 20))
    slots = [pool[n << 20 : (n << 20) + STRIPE_BYTES] for n in range(stripes)]
    slots[-1] = slots[-1][: chunk_bytes - (stripes - 1) * STRIPE_BYTES]
    call = CopyCall([ChunkCopy(list(range(0, 2 * BLOCKS, 2)), slots)])
    with _counting(calls, batches=batches):
        gpu: Gpu = Gpus(direct_copy_bytes, np.zeros_like).at(_UUID)
        moves = moves_of(layout, [Storage(1 << 40, shape.segments * each)], gpu)
        for _ in range(2):
            calls.clear()
            with gpu.stream() as stream:
                if scatter:
                    moves.scatter(call, stream, lambda: None)
                else:
                    moves.gather(call, stream, lambda: None, None)
        found = calls.copy()
        moves.close()
    return found


def main() -> None:
    print(f"calls a chunk of 256 tokens; ms of a lock, held so long a call, when {GPUS} GPUs load")
    print(f"{CHUNKS} chunks each at once: computed")
    heads = "".join(f"{f'{held} us':>8}" for held in HELD_US)
    print(f"{'':44}{'MiB':>6}{'gather':>8}{'scatter':>8}{heads}")
    for shape in SHAPES:
        chunk_bytes = BLOCKS * shape.page_bytes * shape.segments
        for way, least in (("direct", _DIRECT), ("kernel", _KERNEL)):
            for batches in (False, True):
                gather, scatter = (
                    sum(count(shape, least, batches=batches, scatter=each).values())
                    for each in (False, True)
                )
                all_calls = scatter * CHUNKS * GPUS
                costs = "".join(f"{all_calls * held / 1e3:8.1f}" for held in HELD_US)
                name = f"{shape.name}, {way}{', batches' if batches else ''}"
                print(f"{name:44}{chunk_bytes / 2**20:6.0f}{gather:8}{scatter:8}{costs}")


if __name__ == "__main__":
    main()
