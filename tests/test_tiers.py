# SPDX-License-Identifier: Apache-2.0
"""What a transfer's slots must be, before a byte moves."""

from __future__ import annotations

import numpy as np
import pytest

from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages
from lmcache_redis.tiers import ChunkIO

# Two stripes of 64 bytes and one of 22.
FRAME = ChunkForm.of(ChunkNames(), "model", 0, opaque_pages(150), 64).frame(bytes(32))
SIZES = (64, 64, 22)


def slot(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def spread(nbytes: int) -> memoryview:
    """Every other byte."""
    return memoryview(np.zeros(2 * nbytes, np.uint8)[::2])


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ([], "3 stripes needs as many slots, not 2"),
        ([slot(22), slot(22)], "3 stripes needs as many slots, not 4"),
        ([slot(21)], "slot 2 is not 22 contiguous bytes"),
        ([slot(64)], "slot 2 is not 22 contiguous bytes"),
        ([spread(22)], "slot 2 is not 22 contiguous bytes"),
        ([slot(88).cast("I")], "slot 2 is not 22 contiguous bytes"),  # 22 of 4 bytes
        ([slot(22).cast("B", (11, 2))], "slot 2 is not 22 contiguous bytes"),
    ],
)
@pytest.mark.parametrize("writable", [True, False])
def test_slots_that_a_chunk_does_not_fit_are_refused(
    last: list[memoryview], why: str, writable: bool
) -> None:
    job = ChunkIO(b"key", FRAME, [slot(64), slot(64), *last], 0.0)
    with pytest.raises(ValueError, match=why):
        job.check(writable)


def test_a_load_writes_into_its_slots() -> None:
    slots = [slot(nbytes) for nbytes in SIZES]
    ChunkIO(b"key", FRAME, slots, 0.0).check(writable=True)
    slots[1] = slots[1].toreadonly()
    job = ChunkIO(b"key", FRAME, slots, 0.0)
    job.check(writable=False)
    with pytest.raises(ValueError, match="slot 1 is read-only"):
        job.check(writable=True)
