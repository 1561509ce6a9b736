"""Retrieves with a double of a device: the answers, and the release of pins."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.cache.pool import Entry
from lmcache_redis.chunks.names import ChunkForm
from lmcache_redis.errors import DeviceError
from tests.agent.played import HASHES, STRIPES_A_CHUNK, Device, Played


def test_small_chunks_go_several_a_call() -> None:
    device = Device(chunks_a_call=2)
    played = Played(device)
    played.hold(*HASHES)
    played.retrieve(skip_tokens=5 * 16).start()
    played.run(lambda: played.answers)
    assert device.calls == [
        (2, [0, 1, 2, 3], ["slot of a", "slot of b"], 4),
        (2, [4, 5, 6, 7], ["slot of c", "slot of d"], 1),
        (1, [8, 9], ["slot of e"], 0),
    ]
    assert played.answers == [m.RetrieveResult(0, ())]
    played.close()


def test_what_is_missing_fails_alone() -> None:
    device = Device(chunks_a_call=8)
    played = Played(device)
    played.hold(b"a", b"c", b"d")
    played.retrieve(skip_tokens=3 * 16).start()
    played.run(lambda: played.answers)
    # One block of the missing chunk was to be skipped; that does not shift to another chunk.
    assert device.calls == [(3, [0, 1, 4, 5, 6, 7], ["slot of a", "slot of c", "slot of d"], 2)]
    assert played.answers == [m.RetrieveResult(0, (1, 4))]
    played.close()


def test_a_call_that_fails_fails_its_chunks_and_no_others() -> None:
    device = Device(chunks_a_call=2)
    played = Played(device)

    def fail_first() -> None:
        if len(device.calls) == 1:
            raise DeviceError("a copy on cuda:0 failed")

    device.during = fail_first
    played.hold(*HASHES)
    played.retrieve().start()
    played.run(lambda: played.answers)
    assert played.answers == [m.RetrieveResult(0, (0, 1))]
    played.close()


@pytest.mark.parametrize("chunks_a_call", [1, 2])
@pytest.mark.parametrize("breaks_at", [1, 3])
def test_a_retrieve_that_breaks_as_it_begins_fails_alone(
    chunks_a_call: int,
    breaks_at: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session is no longer busy, no pin is lost, and no block is freed too early."""
    go_on = threading.Event()
    device = Device(chunks_a_call=chunks_a_call, during=lambda: go_on.wait(10))  # type: ignore[arg-type]
    played = Played(device)
    played.hold(*HASHES)
    views, calls = played.cache.views, iter(range(10))

    def bug(form: ChunkForm, entry: Entry) -> Any:
        if next(calls) == breaks_at:
            raise RuntimeError("a bug")
        return views(form, entry)

    monkeypatch.setattr(played.cache, "views", bug)
    played.retrieve().start()
    assert played.answers == []
    assert played.session.busy == 1
    go_on.set()
    played.run(lambda: played.answers)
    first = breaks_at // chunks_a_call * chunks_a_call
    assert played.answers == [m.RetrieveResult(0, tuple(range(first, first + chunks_a_call)))]
    assert "a bug" in caplog.text
    played.close()


def test_no_chunks_are_answered_at_once() -> None:
    played = Played(Device())
    played.retrieve([]).start()
    assert played.answers == [m.RetrieveResult(0, ())]
    played.close()


def test_a_device_that_hangs_keeps_the_chunk_it_has_begun() -> None:
    released = threading.Event()
    played = Played(Device(during=lambda: released.wait(30)))  # type: ignore[arg-type]
    played.hold(*HASHES)
    played.retrieve(lease_s=0.3).start()
    played.run(lambda: played.pool.pinned == STRIPES_A_CHUNK)
    # No answer yet: the device may still write to the blocks of the first chunk.
    assert played.answers == []
    released.set()
    played.run(lambda: played.answers)
    assert played.answers == [m.RetrieveResult(0, (1, 2, 3, 4))]
    played.close()
