# SPDX-License-Identifier: Apache-2.0
"""Stores with a double of a device: the answers, and what is pinned, cached and released."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.sessions import PartCounts
from lmcache_redis.cache.pool import EntryState
from lmcache_redis.errors import DeviceError
from lmcache_redis.metrics import Metrics
from tests.agent.played import HASHES, STRIPES_A_CHUNK, Device, Played


def test_small_chunks_go_several_a_call_and_are_kept_one_by_one() -> None:
    device = Device(chunks_a_call=2)
    played = Played(device)
    played.hold(b"b")
    played.store().start()
    played.run(lambda: played.answers and played.session.busy == 0)
    assert [call[:3] for call in device.calls] == [
        (2, [0, 1, 4, 5], ["slot of a", "slot of c"]),
        (2, [6, 7, 8, 9], ["slot of d", "slot of e"]),
    ]
    assert played.answers == [m.StoreResult(0, 4, 1, 0)]
    assert played.session.past == PartCounts(stored=4, present=1)
    assert played.cache.written_behind == [b"b", b"a", b"c", b"d", b"e"]
    assert all(played.pool.get(name) is not None for name in HASHES)
    played.close()


def test_only_what_finds_no_room_is_dropped() -> None:
    device = Device(chunks_a_call=8)
    played = Played(device, slots=3)
    played.store().start()
    played.run(lambda: played.answers and played.session.busy == 0)
    assert [(chunks, ids) for chunks, ids, _, _ in device.calls] == [(3, [0, 1, 2, 3, 4, 5])]
    assert played.answers == [m.StoreResult(0, 3, 0, 2)]
    assert played.metrics.snapshot()["drop_pool_full"] == 2
    because = ["the host pool was full"]
    assert played.session.past == PartCounts(stored=3, dropped=2, because=because)
    played.close()


@pytest.mark.parametrize("chunks_a_call", [1, 5])
def test_a_chunk_whose_copy_fails_after_the_answer_is_not_cached(chunks_a_call: int) -> None:
    """The blocks were read and are freed, but the bytes never reached the host."""
    answered = threading.Event()

    def fail() -> None:
        assert answered.wait(10)
        raise DeviceError("a copy on cuda:0 failed")

    device = Device(chunks_a_call=chunks_a_call, during=fail)
    played = Played(device)
    if chunks_a_call == 1:
        device.during = lambda: None
        played.hold(*HASHES[1:])
        device.during = fail
    told: list[EntryState] = []
    job = played.store()
    job.start()
    played.run(lambda: played.answers)
    wanted = 5 if chunks_a_call == 5 else 1
    assert played.answers == [m.StoreResult(0, wanted, 5 - wanted, 0)]
    entry = played.pool.get(b"a")
    assert entry is not None
    assert entry.state is EntryState.FILLING
    played.pool.pin(entry)  # a lookup that waits for it
    played.cache.pool.watch(entry, lambda: told.append(entry.state))
    answered.set()
    played.run(lambda: played.session.busy == 0)
    assert told == [EntryState.DISCARDED]
    assert entry.state is EntryState.DISCARDED
    played.pool.unpin(entry)
    assert b"a" not in played.pool
    assert b"a" not in played.cache.written_behind
    assert played.metrics.snapshot()["drop_device_error"] == wanted
    assert played.metrics.snapshot()["gathered_chunks"] == 0
    played.close()


def test_a_store_takes_the_time_until_its_blocks_are_read() -> None:
    played, began_s = Played(Device()), time.monotonic()
    played.store().start()
    played.run(lambda: played.session.busy == 0)
    seconds = played.metrics.registry.get_sample_value("lmcache_redis_store_seconds_sum")
    assert seconds is not None
    assert 0 <= seconds <= time.monotonic() - began_s
    assert played.metrics.snapshot()["gathered_chunks"] == 5
    played.close()


def test_a_hung_device_keeps_only_what_it_has_begun() -> None:
    released = threading.Event()
    played = Played(Device(during=lambda: released.wait(30)))  # type: ignore[arg-type]
    played.store(lease_s=0.3).start()
    # The only thread has begun one of five chunks; the others end with the lease.
    played.run(lambda: len(played.pool) == 1)
    assert played.pool.pinned == STRIPES_A_CHUNK
    assert played.answers == [m.StoreResult(0, 1, 0, 4)]
    assert played.metrics.snapshot()["drop_lease"] == 4
    released.set()
    played.run(lambda: played.session.busy == 0)
    played.close()


def test_slots_that_a_bug_leaves_unfilled_come_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(Device(chunks_a_call=2))

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(played.cache, "views", bug)
    played.store().start()
    assert "a call to a device failed" in caplog.text
    assert played.answers == [m.StoreResult(0, 0, 0, 5)]
    assert played.pool.free == played.pool.capacity


def test_a_store_that_breaks_as_it_begins_is_answered_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier answer would free blocks that are still being read."""
    go_on = threading.Event()
    device = Device(chunks_a_call=2)
    gather = device.gather

    def slow(*arguments: Any) -> None:
        assert go_on.wait(10)
        gather(*arguments)

    device.gather = slow  # type: ignore[method-assign]
    played = Played(device)
    views, calls = played.cache.views, []

    def bug_in_the_second_call(entry: Any) -> Any:
        calls.append(entry)
        if len(calls) == 3:
            raise RuntimeError("a bug")
        return views(entry)

    monkeypatch.setattr(played.cache, "views", bug_in_the_second_call)
    played.store().start()
    assert played.answers == []
    go_on.set()
    played.run(lambda: played.answers)
    assert played.answers == [m.StoreResult(0, 3, 0, 2)]
    played.run(lambda: played.session.busy == 0)
    played.close()


@pytest.mark.parametrize("breaks", ["before the chunk is kept", "after it"])
def test_a_store_of_which_a_step_breaks_is_answered(
    breaks: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pins of the broken step are released, and the session is no longer busy."""
    played = Played(Device())
    bugs = iter([RuntimeError("a bug")])

    def bug_once(*_: object) -> None:
        for bug in bugs:
            raise bug

    target = (played.cache, "write_behind") if breaks == "after it" else (Metrics, "count")
    played.store([b"broken", b"good"]).start()
    monkeypatch.setattr(*target, bug_once)
    played.run(lambda: played.answers)
    monkeypatch.undo()
    played.run(lambda: played.session.busy == 0)
    kept = 1 + (breaks == "after it")
    assert played.answers == [m.StoreResult(0, kept, 0, 2 - kept)]
    assert (b"broken" in played.pool) == (breaks == "after it")
    assert "a bug" in caplog.text
    played.close()


@pytest.mark.parametrize("lease_s", [10.0, 0.05])
def test_the_engine_has_its_blocks_back_when_they_were_read(lease_s: float) -> None:
    """Not only when the slots are filled; bytes read after the lease are discarded."""
    is_read, go_on = threading.Event(), threading.Event()
    device = Device(during=lambda: go_on.wait(10))  # type: ignore[arg-type]
    gather = device.gather

    def late(*arguments: Any) -> None:
        is_read.wait(10)
        gather(*arguments)

    device.gather = late  # type: ignore[method-assign]
    played = Played(device)
    played.store([b"chunk"], lease_s).start()
    played.run(lambda: played.pool.get(b"chunk") is not None)
    in_time = lease_s > 1
    if not in_time:
        time.sleep(lease_s)
    assert played.answers == []
    is_read.set()
    if in_time:
        played.run(lambda: played.answers)
        assert played.answers == [m.StoreResult(0, 1, 0, 0)]
        assert played.session.busy == 1
        entry = played.pool.get(b"chunk")
        assert entry is not None
        assert entry.state is EntryState.FILLING
    go_on.set()
    played.run(lambda: played.session.busy == 0)
    assert played.answers == [m.StoreResult(0, int(in_time), 0, int(not in_time))]
    assert (played.pool.get(b"chunk") is not None) == in_time
    played.close()
