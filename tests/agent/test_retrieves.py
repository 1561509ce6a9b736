# SPDX-License-Identifier: Apache-2.0
"""Retrieves with a double of a device: the answers, and the release of pins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.cache import Cache
from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pool import Entry
from lmcache_redis.config import AgentConfig
from lmcache_redis.errors import DeviceError, GpuLost
from lmcache_redis.metrics import Metrics
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import Backing, ReadOutcome
from tests.agent.played import HASHES, STRIPES_A_CHUNK, Device, Played
from tests.cache.played import FORM, PlayedTier


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

    def bug(entry: Entry) -> Any:
        if next(calls) == breaks_at:
            raise RuntimeError("a bug")
        return views(entry)

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


class Loading(Played):
    """Chunks of three slots over a tier, and a pool of which a piece may take one chunk."""

    def __init__(self, device: Any, found: Sequence[bytes], slots: int = 12) -> None:
        self.tier = PlayedTier("Redis", {FORM.key(name) for name in found})
        backing = Backing(self.tier, REDIS, 1 << 20)
        super().__init__(
            device, cache=lambda loop: Cache(loop, Arena(slots * 4096, 64), [backing], Metrics())
        )

    def answer_read(self, outcome: ReadOutcome) -> None:
        for io in self.tier.read:
            self.tier.read_done(io, outcome)
        self.tier.read.clear()


def test_what_is_missing_is_loaded_in_pieces() -> None:
    device = Device()
    played = Loading(device, HASHES[:4])
    played.retrieve().start()
    for piece in range(4):
        played.run(lambda: len(played.tier.read) == 1)
        assert [io.key for io in played.tier.read] == [FORM.key(HASHES[piece])]
        assert played.answers == []
        played.answer_read(ReadOutcome.LOADED)
    played.run(lambda: played.answers)
    assert [(chunks, ids) for chunks, ids, _, _ in device.calls] == [
        (1, [2 * chunk, 2 * chunk + 1]) for chunk in range(4)
    ]
    assert played.answers == [m.RetrieveResult(0, (4,))]
    counted = played.metrics.snapshot()
    assert {name: n for name, n in counted.items() if n and "retrieve" in name} == {
        "retrieves": 1,
        "retrieves_failed": 1,
        "retrieved_chunks": 4,
        "retrieved_bytes": 4 * FORM.chunk_bytes,
    }
    use = played.agent.peers.use_of(FORM.model_name)
    assert use.retrieved_bytes == 4 * FORM.chunk_bytes
    name = "lmcache_redis_retrieve_seconds"
    assert played.metrics.registry.get_sample_value(f"{name}_count") == 1
    assert 0 < (played.metrics.registry.get_sample_value(f"{name}_sum") or 0) < 30
    played.close()


def test_the_first_chunk_that_does_not_arrive_ends_the_loads() -> None:
    played = Loading(Device(), HASHES)
    played.retrieve().start()
    played.answer_read(ReadOutcome.LOADED)
    played.run(lambda: len(played.tier.read) == 1)
    played.answer_read(ReadOutcome.UNAVAILABLE)
    played.run(lambda: played.answers)
    assert played.tier.read == []
    assert played.answers == [m.RetrieveResult(0, (1, 2, 3, 4))]
    past = played.session.past
    assert (past.loaded, past.failed, past.because) == (1, 4, ["a chunk could not be loaded"])
    played.close()


def test_a_larger_pool_loads_larger_pieces() -> None:
    played = Loading(Device(), HASHES, slots=24)
    played.retrieve().start()
    assert len(played.tier.read) == 2
    played.answer_read(ReadOutcome.UNAVAILABLE)
    played.run(lambda: played.answers)
    played.close()


@pytest.mark.parametrize("ended_by", ["the lease", "the deadline of lookups"])
def test_a_load_ends_in_time(ended_by: str) -> None:
    played = Loading(Device(), HASHES)
    if ended_by == "the lease":
        played.retrieve(lease_s=0.05).start()
    else:
        played.agent.config = AgentConfig(lookup_deadline_s=0.05)
        played.retrieve().start()
    played.run(lambda: played.answers)
    assert played.answers == [m.RetrieveResult(0, (0, 1, 2, 3, 4))]
    played.answer_read(ReadOutcome.CANCELLED)
    played.loop.run_posted()
    played.close()


def test_a_load_that_breaks_as_it_begins_fails_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Loading(Device(), HASHES)

    def bug(lookup: PrefixLookup) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(PrefixLookup, "start", bug)
    played.retrieve().start()
    assert played.answers == [m.RetrieveResult(0, (0, 1, 2, 3, 4))]
    assert "a bug" in caplog.text
    played.close()


def test_a_retrieve_whose_gpu_is_lost_is_not_answered() -> None:
    """The GPU may still write to the blocks; the end of the process frees them."""
    device = Device()

    def lose() -> None:
        if len(device.calls) == 2:
            raise GpuLost(700, "CUDA error 700")

    device.during = lose
    played = Played(device)
    played.hold(*HASHES)
    played.retrieve().start()
    played.run(lambda: played.session.busy == 0)
    assert played.answers == []
    played.close()
