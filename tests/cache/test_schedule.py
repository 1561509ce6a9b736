# SPDX-License-Identifier: Apache-2.0
"""Which writes begin, and when: the scheduler alone, on a clock of the test's own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from lmcache_redis.cache import schedule
from lmcache_redis.cache.pacing import TransferRate
from lmcache_redis.cache.pool import Entry
from lmcache_redis.cache.schedule import PendingWrite, WriteScheduler
from lmcache_redis.chunks.names import ChunkForm, ChunkNames, opaque_pages

FORM = ChunkForm.of(ChunkNames(bytes(32)), "test/model", 0, opaque_pages(100), 100)
NOW = 1000.0


def write_of(number: int, *, deadline: float = math.inf) -> PendingWrite:
    """The chunk at that position of its prompt."""
    chunk_hash = bytes([number]) * 32
    key = FORM.key(chunk_hash)
    entry = Entry(key, (number,), 1, position=number)
    return PendingWrite(key, FORM.frame(chunk_hash), (), deadline, entry=entry)


@pytest.fixture
def loads() -> TransferRate:
    return TransferRate()


@pytest.fixture
def writes(loads: TransferRate, monkeypatch: pytest.MonkeyPatch) -> WriteScheduler:
    """Two chunks are in flight at most. One tells a rate."""
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", 200)
    monkeypatch.setattr(schedule, "LEAST_MEASURED_BYTES", 100)
    return WriteScheduler(loads, 1000)


def add(writes: WriteScheduler, *pending: PendingWrite, due_s: float = NOW) -> None:
    for write in pending:
        write.due_s = due_s
        writes.add(write)


def positions(found: Sequence[PendingWrite]) -> list[int]:
    return [write.entry.position for write in found]


def test_the_beginnings_of_prompts_are_written_first(writes: WriteScheduler) -> None:
    writes.is_stopping = True
    add(writes, *map(write_of, (5, 2, 7, 3)))
    assert len(writes) == 4
    assert positions(writes.begin(NOW)) == [2, 3, 5, 7]
    assert len(writes) == 0


def test_what_is_added_again_keeps_its_rank_and_its_deadline(writes: WriteScheduler) -> None:
    add(writes, *(write_of(n, deadline=NOW + n) for n in (1, 2, 3, 4)))
    begun = writes.begin(NOW)
    assert positions(begun) == [1, 2]
    writes.add_again(begun)
    assert len(writes) == 4
    assert positions(writes.begin(NOW)) == [1, 2]
    writes.add_again(begun)
    assert positions(writes.expired(NOW + 2)) == [1, 2]
    assert not writes.remove(begun[0])
    assert positions(writes.begin(NOW)) == [3, 4]


def test_those_of_one_rank_keep_their_order(writes: WriteScheduler) -> None:
    same = [write_of(1) for _ in range(3)]
    add(writes, *same)
    assert writes.begin(NOW) == same[:2]
    assert [*writes.after(0)] == [same[2]]


def test_what_is_not_due_waits(writes: WriteScheduler) -> None:
    add(writes, write_of(1), due_s=NOW + 1)
    add(writes, write_of(2), due_s=NOW + 0.004)
    assert positions(writes.begin(NOW)) == [2], "what is nearly due joins the batch"
    assert writes.next_s(NOW) == NOW + 1
    assert positions(writes.begin(NOW + 1)) == [1]
    assert writes.next_s(NOW + 1) == math.inf


def test_a_batch_begins_when_half_has_ended(writes: WriteScheduler) -> None:
    add(writes, *map(write_of, range(5)))
    first = writes.begin(NOW)
    assert positions(first) == [0, 1]
    assert writes.begin(NOW) == []
    writes.ended(first[0])
    assert positions(writes.begin(NOW)) == [2]
    assert positions(writes.begin(NOW)) == []


def test_one_write_begins_whatever_its_size(
    writes: WriteScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule, "IN_FLIGHT_BYTES", 10)
    add(writes, write_of(0), write_of(1))
    assert positions(writes.begin(NOW)) == [0]


def test_a_stop_waits_for_nothing(writes: WriteScheduler, loads: TransferRate) -> None:
    loads.begun(1, NOW)
    add(writes, *map(write_of, range(5)), due_s=NOW + 60)
    writes.is_stopping = True
    assert len(writes.begin(NOW)) == 5


def test_the_late_are_taken_out_whatever_they_wait_for(writes: WriteScheduler) -> None:
    add(writes, write_of(0, deadline=NOW), write_of(1, deadline=NOW), due_s=NOW - 1)
    writes.begin(NOW - 1)  # these are in flight, and those below ready or waiting
    add(writes, write_of(2, deadline=NOW + 1))
    add(writes, write_of(3, deadline=NOW + 1), write_of(4, deadline=NOW + 2), due_s=NOW + 9)
    writes.begin(NOW)
    assert writes.next_s(NOW) == NOW + 1
    assert positions(writes.expired(NOW + 0.9)) == []
    assert positions(writes.expired(NOW + 1)) == [2, 3]
    assert len(writes) == 1


def test_a_write_that_is_taken_out_does_not_begin(writes: WriteScheduler) -> None:
    ready, waiting, begun = map(write_of, range(3))
    add(writes, begun)
    writes.begin(NOW)
    add(writes, ready)
    add(writes, waiting, due_s=NOW + 1)
    assert (writes.remove(ready), writes.remove(waiting), writes.remove(begun)) == (1, 1, 0)
    assert writes.begin(NOW + 1) == []


def test_what_is_dropped_first_would_be_written_last(writes: WriteScheduler) -> None:
    add(writes, *map(write_of, (0, 1, 4, 6)))
    writes.begin(NOW)
    add(writes, write_of(5), write_of(3), due_s=NOW + 1)
    assert positions([*writes.after(4)]) == [6, 5]
    assert positions([*writes.after(2)]) == [6, 5, 4, 3]


def test_the_queue_is_no_longer_than_the_tier_writes_in_time(writes: WriteScheduler) -> None:
    assert writes.most_bytes(30) == 1000, "nothing is known of the tier"
    writes.given(100, NOW)
    writes.answered(100, NOW + 4, is_stored=True)
    assert writes.most_bytes(30) == pytest.approx(750)
    assert writes.most_bytes(4) == 200, "what may be in flight"
    assert writes.most_bytes(100) == 1000


def test_a_claim_is_for_as_long_as_the_writes_in_flight_may_take(writes: WriteScheduler) -> None:
    assert (writes.next_s(NOW), writes.claim_s()) == (math.inf, 20.0), "nothing is known"
    writes.given(100, NOW)
    writes.answered(100, NOW + 1, is_stored=True)
    assert writes.claim_s() == 2.0, "the least"
    add(writes, *map(write_of, range(2)))
    writes.begin(NOW)
    assert writes.claim_s() == pytest.approx(4 * 100 / 100), "four times as long"
    writes.is_stopping = True
    assert writes.claim_s() == 20.0, "all begin at once"


def test_a_write_alone_that_is_tiny_tells_no_rate(writes: WriteScheduler) -> None:
    """It takes a round trip; several that are in flight together tell one."""
    writes.given(99, NOW)
    writes.answered(99, NOW + 4, is_stored=True)
    assert writes.most_bytes(30) == 1000
    writes.given(50, NOW + 4)
    writes.given(50, NOW + 4)
    writes.answered(50, NOW + 8, is_stored=True)
    assert writes.most_bytes(30) == pytest.approx(375)
