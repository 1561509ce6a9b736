# SPDX-License-Identifier: Apache-2.0
"""Lookups: the first of a fresh agent waits for work in progress, until its deadline."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import peers
from lmcache_redis.agent.lookups import shared_rows, tier_letters
from lmcache_redis.agent.main import _prefault
from lmcache_redis.agent.sessions import SESSION_TIMEOUT_S
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.names import FULL_REACH, ChunkNames
from lmcache_redis.errors import WireError
from lmcache_redis.tiers import ReadOutcome
from tests.agent.joining import HASHES, LAYOUT, Joining, kv_rank_of
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer


def test_a_lookup_waits_until_redis_was_asked_for_the_first_time(
    start: Starts, redis_server: RedisServer
) -> None:
    """An agent serves after its timeout for the first probe, although Redis may only be slow."""
    patient = {"op_timeout_s": 60, "lookup_deadline_s": 30}
    agent, engine = start(**patient)
    engine.store("r0", HASHES, range(8))
    agent.wait_idle()
    redis_server.stop()
    agent.restart()
    engine.wait_ready()
    assert "not been asked yet" in agent.status()["redis"]["reason"]
    engine.scheduler.begin_lookup("r1", engine.chunks(HASHES))
    assert engine.scheduler.hit_tokens("r1", wait_s=0.3) is None
    redis_server.cont()
    assert engine.lookup("r1", HASHES) == 128


def test_the_host_pool_is_faulted_in_at_full_priority() -> None:
    """At a lower priority, on busy cores, it would keep the GIL from the loop for a second."""
    found: list[int] = []

    class Watched:
        def prefault(self, *_: object) -> None:
            found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with contextlib.ExitStack() as stack:
        _prefault(stack, Watched(), lambda: False)  # type: ignore[arg-type]
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_a_worker_is_ready_for_each_agent_anew(agent: AgentServer, engine: Engine) -> None:
    worker = engine.workers[0]
    register, seen = worker.link._on_welcome, []

    def welcomed(welcome: m.Welcome) -> None:
        seen.append((worker.link.online, worker.ready))
        assert register is not None
        register(welcome)

    worker.link._on_welcome = welcomed
    agent.restart()
    engine.wait_ready()
    assert seen == [(True, False)]


@pytest.mark.parametrize("unnamed", [False, True])
def test_a_lookup_waits_for_registrations_in_progress(
    joining: Callable[..., Joining], unnamed: bool
) -> None:
    here = joining()
    scheduler, *workers = (here.join(each, unnamed=unnamed) for each in (None, 0, 1))
    for worker in workers:
        here.register(worker)
    here.hold_a_chunk()
    here.look_up(scheduler)
    here.loop.run_due()
    assert here.answers == []
    here.map_memory.set()
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 1, "h")]


def test_a_lookup_waits_for_workers_that_come_later(joining: Callable[..., Joining]) -> None:
    here = joining()
    here.map_memory.set()
    scheduler = here.join(None, ago_s=-30)  # its HELLO counts as recent for another half minute
    here.hold_a_chunk()
    here.look_up(scheduler)
    for worker_id in range(2):
        here.loop.run_due()
        assert here.answers == []
        here.register(here.join(worker_id))
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 1, "h")]


@pytest.mark.parametrize("why", ["no worker comes", "one was refused"])
def test_a_lookup_does_not_wait_for_a_worker_that_will_not_come(
    joining: Callable[..., Joining], why: str
) -> None:
    here = joining()
    scheduler = here.join(None)
    if why == "one was refused":
        here.broken = True
        here.map_memory.set()
        worker = here.join(0)
        here.register(worker)
        here.run(lambda: not worker.mapping)
    here.look_up(scheduler)
    assert here.answers == [m.LookupResult(0, 0)]


def test_a_lookup_waits_until_its_deadline_and_no_longer(joining: Callable[..., Joining]) -> None:
    here = joining(lookup_deadline_s=0.05)
    scheduler = here.join(None)
    for worker_id in range(2):
        here.register(here.join(worker_id))
    here.look_up(scheduler)
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 0)]


def test_memory_that_is_mapped_slowly_costs_a_wait_once(
    joining: Callable[..., Joining], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lost agent does. While the mapping goes on, lookups miss at once."""
    monkeypatch.setattr(peers, "_JOIN_S", 0.2)
    here = joining()
    scheduler, *workers = (here.join(each) for each in (None, 0, 1))
    for worker in workers:
        here.register(worker)
    here.hold_a_chunk()
    here.look_up(scheduler)
    assert here.answers == []
    here.run(lambda: here.answers)
    for _ in range(3):
        here.look_up(scheduler)
    assert here.answers == [m.LookupResult(0, 0)] * 4
    assert here.agent.cache.metrics.snapshot()["miss_mapping"] == 4
    (past,) = here.agent.sessions.history
    assert past.lookup is not None
    assert past.lookup.first_miss is not None
    assert past.lookup.first_miss.reason == "mapping"
    here.map_memory.set()
    here.run(lambda: all(each.registration for each in workers))
    here.look_up(scheduler)
    assert here.answers[4:] == [m.LookupResult(0, 1, "h")]


def test_a_mapping_is_not_waited_for_longer_than_computing_takes(
    joining: Callable[..., Joining],
) -> None:
    here = joining()
    scheduler, *workers = (here.join(each) for each in (None, 0, 1))
    for worker in workers:
        here.register(worker)
    here.look_up(scheduler, token_s=1e-9)
    assert here.answers == [m.LookupResult(0, 0)]
    here.look_up(scheduler, token_s=60.0)
    assert len(here.answers) == 1
    assert here.agent.cache.metrics.snapshot()["miss_mapping"] == 1


def test_a_lookup_that_waits_is_cancelled_with_its_session(joining: Callable[..., Joining]) -> None:
    here = joining()
    scheduler = here.join(None)
    for worker_id in range(2):
        here.register(here.join(worker_id))
    here.hold_a_chunk()
    here.look_up(scheduler)
    here.end_session(scheduler)
    here.map_memory.set()
    here.run(lambda: here.peers.complete(scheduler) or not any(p.mapping for p in here.peers))
    here.loop.run_due()
    assert here.answers == [m.LookupResult(0, 0)]
    assert not len(here.agent.sessions)


def test_what_is_found_is_loaded_counted_and_pinned(
    joining: Callable[..., Joining], tmp_path: Path
) -> None:
    here = joining(disk_path=tmp_path / "disk")
    scheduler, metrics = here.engine(), here.agent.cache.metrics
    before = metrics.snapshot()
    here.hold_a_chunk(HASHES[0])
    here.store_on_disk(HASHES[1])
    here.index.update(here.key(each, rank) for each in HASHES[2:4] for rank in range(2))
    here.look_up(scheduler, HASHES[:5], first_chunk=7)
    assert len(here.redis.read) == 4
    for io in here.redis.read:
        here.redis.read_done(io, ReadOutcome.LOADED)
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 4, "hdrr")]
    counted = {name: n - before[name] for name, n in metrics.snapshot().items()}
    assert {name: n for name, n in counted.items() if "lookup" in name or "hit_" in name} == {
        **dict.fromkeys((n for n in counted if "lookup" in n or "hit_" in n), 0),
        "lookups": 1, "lookup_chunks": 5, "hit_chunks_host": 1,
        "hit_chunks_disk": 1, "hit_chunks_redis": 2,
    }  # fmt: skip
    use = here.peers.use_of("model")
    assert (use.lookups, use.lookup_tokens, use.hit_tokens) == (1, 5 * 64, 4 * 64)
    histograms = [
        metrics.registry.get_sample_value(f"lmcache_redis_lookup_{name}")
        for name in ("hit_chunks_count", "hit_chunks_sum", "seconds_count")
    ]
    assert histograms == [1, 4, 1]
    assert 0 < (metrics.registry.get_sample_value("lmcache_redis_lookup_seconds_sum") or 0) < 30
    (session,) = here.agent.sessions
    assert session.positions == {each: 7 + n for n, each in enumerate(HASHES[:5])}
    assert session.cancel_lookup is None
    held = {(each, rank) for each in HASHES[:4] for rank in range(2)}
    for chunk_hash, rank in held:
        entry = session.take(chunk_hash, (rank, 0))
        assert entry is not None
        assert entry.key == here.key(chunk_hash, rank)
        here.agent.cache.pool.unpin(entry)
    assert not session.has_pins
    # What the disk did not have is written there meanwhile.
    here.run(lambda: metrics.snapshot()["disk_stored_chunks"] == 6)
    here.run(lambda: here.agent.cache.pool.pinned == 0)


def test_a_miss_is_counted_as_one(joining: Callable[..., Joining]) -> None:
    here = joining()
    here.look_up(here.engine())
    assert here.answers == [m.LookupResult(0, 0)]
    use, registry = here.peers.use_of("model"), here.agent.cache.metrics.registry
    assert (use.lookups, use.lookup_tokens, use.hit_tokens) == (1, 64, 0)
    assert registry.get_sample_value("lmcache_redis_lookup_hit_chunks_count") == 0


def test_parts_with_equal_bytes_are_pinned_for_each_rank(joining: Callable[..., Joining]) -> None:
    here = joining()
    scheduler = here.engine([kv_rank_of(0), kv_rank_of(0)])
    entry, _ = here.hold_a_chunk()
    changes: list[tuple[bytes, int | None, bool]] = []
    here.agent.cache.pool.on_change = lambda *change: changes.append(change)
    here.look_up(scheduler)
    assert here.answers == [m.LookupResult(0, 1, "h")]
    assert changes == [(entry.key, None, True)], "for routers that watch"
    assert entry.pins == 2
    (session,) = here.agent.sessions
    for rank in range(2):
        assert session.take(HASHES[3], (rank, 0)) is entry
        here.agent.cache.pool.unpin(entry)


def test_what_a_session_has_pinned_is_free_when_it_ends(joining: Callable[..., Joining]) -> None:
    here = joining()
    scheduler = here.engine()
    here.hold_a_chunk()
    for _ in range(2):
        here.look_up(scheduler)
        assert here.agent.cache.pool.pinned == 2
    here.end_session(scheduler)
    assert here.agent.cache.pool.pinned == 0


def test_the_engine_says_what_keeps_it_busy(joining: Callable[..., Joining]) -> None:
    """Four chunks of 64 tokens are computed for each request that it has not begun."""
    here = joining()
    scheduler = here.engine()

    def free_after(name: str, busy_s: float, begun: tuple[str, ...] = ()) -> float:
        question = m.Lookup(2, name, tuple(HASHES[:4]), 0, (), 1.0, busy_s, begun)
        here.handlers.answer(scheduler, question, here.answers.append)
        return round(scheduler.computing.free_in_s(time.monotonic()))

    assert free_after("first", 1000.0) == 1000 + 256
    assert free_after("second", 1000.0) == 1000 + 2 * 256
    assert free_after("second", 1000.0) == 1000 + 2 * 256, "asked again"
    assert free_after("third", 300.0, ("first",)) == 300 + 2 * 256
    here.handlers.answer(scheduler, m.EndSession(3, "second"), lambda answer: None)
    assert free_after("fourth", 0.0) == 2 * 256, "one has ended without having begun"
    here.handlers.end_expired(time.monotonic() + SESSION_TIMEOUT_S)
    assert free_after("fifth", 0.0) == 256, "the others were never ended"


@pytest.mark.parametrize("distrusted", [False, True])
def test_what_is_only_compared_is_computed(
    joining: Callable[..., Joining], distrusted: bool
) -> None:
    here = joining()
    scheduler = here.engine()
    here.hold_a_chunk()
    if distrusted:
        here.agent.trust.differed(LAYOUT.fingerprint(64), HASHES[3])
    here.look_up(scheduler, token_s=1.0)
    assert round(scheduler.computing.free_in_s(time.monotonic())) == (64 if distrusted else 0)


@pytest.mark.parametrize("ended_by", ["another lookup", "the end"])
def test_a_lookup_that_loads_is_cancelled(joining: Callable[..., Joining], ended_by: str) -> None:
    here = joining()
    scheduler = here.engine()
    here.index.update(here.key(HASHES[0], rank) for rank in range(2))
    here.look_up(scheduler, HASHES[:1])
    first = [*here.redis.read]
    miss = m.LookupResult(0, 0)
    if ended_by == "another lookup":
        here.hold_a_chunk()
        here.look_up(scheduler)
        assert here.answers == [miss, m.LookupResult(0, 1, "h")]
    else:
        here.end_session(scheduler)
        assert here.answers == [miss], "or the engine would keep its question for good"
    assert here.redis.cancelled == first
    for io in first:
        here.redis.read_done(io, ReadOutcome.CANCELLED)
    here.loop.run_posted()
    assert len(here.answers) == 1 + (ended_by == "another lookup")


def test_distrusted_chunks_are_found_to_be_compared_only(joining: Callable[..., Joining]) -> None:
    here = joining()
    scheduler = here.engine()
    here.hold_a_chunk()
    here.agent.trust.differed(LAYOUT.fingerprint(64), HASHES[3])
    here.look_up(scheduler)
    here.look_up(scheduler, first_chunk=1)
    assert here.answers == [
        m.LookupResult(0, 1, "h", compare_only=True),
        m.LookupResult(0, 0, compare_only=True),
    ]


@pytest.mark.parametrize("distrusted", [False, True])
def test_parts_of_other_agents_must_be_in_redis(
    joining: Callable[..., Joining], distrusted: bool
) -> None:
    """Not those of a worker that is registered here, too."""
    here = joining()
    fingerprint, other = LAYOUT.fingerprint(64), b"o" * 32
    here.map_memory.set()
    scheduler, worker = here.join(None), here.join(0)
    here.register(worker)
    here.run(lambda: worker.registration)
    here.hold_a_chunk()
    elsewhere = ChunkNames(other).chunk_key(ObjectKey(HASHES[3], "model", kv_rank_of(1)))
    remote = tuple(
        m.RemoteParts(rank, kv_rank_of(rank), each, FULL_REACH)
        for rank, each in ((0, fingerprint), (1, other), (1, other))
    )
    if distrusted:
        here.agent.trust.differed(other, HASHES[3])
    here.look_up(scheduler, remote=remote)
    here.index.add(elsewhere)
    here.look_up(scheduler, remote=remote)
    assert here.answers == [
        m.LookupResult(0, 0, compare_only=distrusted),
        m.LookupResult(0, 1, "h", compare_only=distrusted),
    ]


def test_parts_that_cannot_be_are_refused(joining: Callable[..., Joining]) -> None:
    here = joining()
    with pytest.raises(WireError):
        here.look_up(here.engine(), remote=(m.RemoteParts(1, -1, b"f" * 32, FULL_REACH),))


def test_ranks_with_equal_bytes_share_their_rows() -> None:
    def form(name: bytes) -> Any:
        return SimpleNamespace(stem=lambda nbytes: name + bytes([nbytes]))

    ranks: list[Any] = [
        SimpleNamespace(worker_id=0, forms=[form(b"full"), form(b"window")]),
        SimpleNamespace(worker_id=1, forms=[form(b"full"), form(b"other window")]),
    ]
    forms, users = shared_rows(ranks, 32)
    assert forms == [*ranks[0].forms, ranks[1].forms[1]]
    assert users == [[(0, 0), (1, 0)], [(0, 1)], [(1, 1)]]


def test_tiers_of_an_answer() -> None:
    assert tier_letters(4, {1: 0, 3: 1, 7: 1}, ("d", "r")) == "hdhr"
    assert tier_letters(4, {}, ("d", "r")) == "hhhh"


@pytest.mark.parametrize("use", ["looked up", "retrieved", "stored"])
def test_a_full_pool_evicts_the_end_of_an_idle_prompt(tmp_path: Path, use: str) -> None:
    """Without its first chunk, none of it would be a hit."""
    hashes, other = block_hashes("prompt", 16), block_hashes("another", 4)
    # Two slots a chunk: room for one chunk less than both prompts have.
    with (
        AgentServer(tmp_path / "agent", None, pool_bytes=8 * (64 << 10) + 4096) as agent,
        Engine(agent.endpoint) as engine,
    ):
        assert engine.lookup("r0", hashes) == 0
        for first in range(0, 16, 8):  # the steps of its prefill
            engine.store("r0", hashes[first : first + 8], range(first, first + 8))
        engine.scheduler.end_session("r0")
        if use != "stored":
            assert engine.lookup("r1", hashes) == 256
        if use == "retrieved":
            engine.retrieve("r1", hashes, range(16, 32))
        engine.scheduler.end_session("r1")
        wait_until(lambda: agent.status()["sessions"] == 0, "ended sessions")
        engine.store("r2", other, range(32, 36))
        assert engine.lookup("r3", hashes) == 192
