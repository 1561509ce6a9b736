# SPDX-License-Identifier: Apache-2.0
"""Slots cover a value exactly, begin on pages, and show what did not arrive."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.plane.values import PAGE_BYTES, Arena
from lmcache_redis.config import DEFAULT_SLOT_BYTES
from lmcache_redis.errors import RedisUnavailable

MIB = 1 << 20


@pytest.mark.parametrize("value_bytes", [PAGE_BYTES, 256 << 10, 2 * MIB, 3 * MIB + PAGE_BYTES])
@pytest.mark.parametrize("slot_bytes", [64 << 10, DEFAULT_SLOT_BYTES, 32 * MIB])
def test_slots_cover_a_value_and_begin_on_pages(value_bytes: int, slot_bytes: int) -> None:
    values = Arena(3 * value_bytes).values(value_bytes, 3, slot_bytes)
    assert [sum(slot.nbytes for slot in slots) for slots in values.slots] == [value_bytes] * 3
    assert values.gigabytes == 3 * value_bytes / 1e9
    places = [
        (np.frombuffer(s, np.uint8).ctypes.data, s.nbytes) for slots in values.slots for s in slots
    ]
    assert all(at % PAGE_BYTES == 0 and nbytes <= slot_bytes for at, nbytes in places)
    ends = [at + nbytes for at, nbytes in places]
    assert all(end <= at for end, (at, _) in zip(ends, places[1:], strict=False))


def test_a_page_that_did_not_arrive_is_found() -> None:
    values = Arena(4 * MIB).values(2 * MIB, 2, DEFAULT_SLOT_BYTES)
    values.check()
    values.slots[1][2][-64:] = bytes(64)  # no stamp lies there
    values.check()
    values.slots[1][0][PAGE_BYTES : PAGE_BYTES + 8] = bytes(8)
    with pytest.raises(RedisUnavailable, match="slot 3"):
        values.check()


def test_nothing_is_right_once_it_was_wiped() -> None:
    values = Arena(MIB).values(MIB, 1, MIB)
    values.wipe()
    with pytest.raises(RedisUnavailable, match="slot 0"):
        values.check()
    values.stamp()
    values.check()


def test_memory_cut_otherwise_is_stamped_again() -> None:
    arena = Arena(4 * MIB)
    first = arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES)
    assert arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES) is first
    arena.values(4 * MIB, 1, 4 * MIB).check()
    arena.values(2 * MIB, 2, DEFAULT_SLOT_BYTES).check()
