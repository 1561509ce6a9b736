# SPDX-License-Identifier: Apache-2.0
"""Many batches of scattered copies of unequal sizes: crashes, hangs or wrong bytes?

Host memory is registered, as the host pool is. The smallest batches come first.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu.contact.calls import pinned_arena
from benchmarks.gpu.contact.figures import Figure, zero
from lmcache_redis.device import driver

_PLACE_BYTES = 64 << 10
QUICK: dict[str, Any] = {"for_s": 0.4, "counts": (2, 32), "place_bytes": 256}
Bytes = npt.NDArray[np.uint8]


def measure(
    for_s: float = 25.0,
    counts: Sequence[int] = (32, 128, 512, 1355, 4134),
    place_bytes: int = _PLACE_BYTES,
    seed: int = 3,
) -> Iterator[Figure]:
    """counts: of copies in a batch. place_bytes: the longest copy."""
    half = max(counts) * place_bytes
    random = np.random.default_rng(seed)
    with pinned_arena(2 * half) as arena:
        stream, there = driver.create_stream(), driver.allocate(2 * half)
        pinned = (ctypes.c_uint8 * (2 * half)).from_address(arena.base_address)
        host = np.ctypeslib.as_array(pinned)
        sent, back = host[:half], host[half:]
        sent[:] = random.integers(0, 256, half, dtype=np.uint8)
        for count in counts:
            batches = wrong = 0
            until_s = time.monotonic() + for_s / len(counts)
            while not batches or time.monotonic() < until_s:
                sent += 7
                sizes = random.integers(1, place_bytes // 16 + 1, count) * 16
                starts = np.arange(count, dtype=np.int64) * place_bytes
                places = there + random.permutation(2 * max(counts))[:count] * place_bytes
                _enqueue(places, arena.base_address + starts, sizes, stream)
                _enqueue(arena.base_address + half + starts, places, sizes, stream)
                driver.synchronize_stream(stream)
                wrong += _differences(sent, back, starts, sizes)
                batches += 2
            yield Figure("batch_soak", f"batches of {count} copies, seed {seed}", batches)
            yield zero("batch_soak", f"wrong, of {count}", wrong)
        driver.free(there)
        driver.destroy_stream(stream)


def _enqueue(
    to: npt.NDArray[np.int64],
    sources: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    stream: int,
) -> None:
    driver.enqueue_copies(to.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(to), stream)


def _differences(
    sent: Bytes, back: Bytes, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> int:
    pairs = zip(starts.tolist(), sizes.tolist(), strict=True)
    return sum(not np.array_equal(sent[at : at + size], back[at : at + size]) for at, size in pairs)
