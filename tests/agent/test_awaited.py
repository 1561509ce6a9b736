# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart: a lookup waits for chunks that another engine is storing just now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.agent.peers import Peer
from lmcache_redis.tiers import ReadOutcome
from tests.agent.joining import CHUNK_SIZE_TOKENS, HASHES, LAYOUT, Joining
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

# A token's time of an engine that computes for minutes, or for a moment.
SLOW, QUICK = 60.0, 0.05 / CHUNK_SIZE_TOKENS
MISS = m.LookupResult(0, 0)


@pytest.fixture
def here(joining: Callable[..., Joining]) -> Joining:
    return joining(lookup_deadline_s=600.0)


def counted(here: Joining) -> dict[str, int]:
    names = ("lookups", "awaited_chunks", "miss_absent", "hit_chunks_host", "hit_chunks_redis")
    found = here.agent.cache.metrics.snapshot()
    return {name: found[name] for name in names if found[name]}


def waiting(here: Joining, chunks: int = 2, **question: Any) -> Peer:
    """The scheduler of an engine whose lookup has looked several times, and waits."""
    scheduler = here.engine()
    question = {"stored_chunks": chunks, "token_s": SLOW, **question}
    here.look_up(scheduler, HASHES[:chunks], **question)
    (session,) = here.agent.sessions
    first = session.cancel_lookup
    assert first is not None
    here.run(lambda: session.cancel_lookup not in (first, None))
    assert here.answers == []
    return scheduler


def store_in_redis(here: Joining, chunk_hash: bytes) -> None:
    here.index.update(here.key(chunk_hash, rank) for rank in range(2))


def run(here: Joining, until: Callable[[], object]) -> None:
    """Redis delivers what lookups load."""

    def is_over() -> object:
        while here.redis.read:
            here.redis.read_done(here.redis.read.pop(), ReadOutcome.LOADED)
        return until()

    here.run(is_over)


def test_what_comes_in_time_is_a_hit(here: Joining) -> None:
    """Over Redis, one after the other, and from an engine of the same agent."""
    waiting(here, 3)
    store_in_redis(here, HASHES[0])
    pool = here.agent.cache.pool
    run(here, lambda: pool.get(here.key(HASHES[0], 1)) and not pool.pinned)
    assert here.answers == [], "the first is loaded, the others are waited for without pins"
    here.hold_a_chunk(HASHES[1])
    store_in_redis(here, HASHES[2])
    run(here, lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 3, "rhr")]
    assert counted(here) == {
        "lookups": 1, "awaited_chunks": 3, "hit_chunks_host": 1, "hit_chunks_redis": 2
    }  # fmt: skip
    (session,) = here.agent.sessions
    assert session.cancel_lookup is None
    assert session.has_pins


def test_what_is_being_copied_is_waited_for_without_a_word(here: Joining) -> None:
    """Where one agent serves both engines, once it has begun to store."""
    entries = []
    for worker_id in range(2):
        entry = here.agent.cache.reserve(here._form(worker_id), HASHES[0])
        assert entry is not None
        entries.append(entry)
    here.look_up(here.engine(), HASHES[:1])
    here.loop.run_due()
    assert here.answers == []
    for entry in entries:
        assert here.agent.cache.publish(entry)
    here.run(lambda: here.answers)
    assert here.answers == [m.LookupResult(0, 1, "h")]
    assert counted(here) == {"lookups": 1, "hit_chunks_host": 1}


def test_what_never_comes_is_computed(here: Joining) -> None:
    """It is counted as one miss, and `why` says that it was waited for."""
    began_s = time.monotonic()
    waiting(here, token_s=QUICK)
    here.run(lambda: here.answers)
    assert time.monotonic() - began_s > 0.09, "two chunks of 0.05 s"
    assert here.answers == [MISS]
    assert counted(here) == {"lookups": 1, "miss_absent": 2}
    (past,) = here.agent.sessions.history
    assert past.lookup is not None
    assert past.lookup.first_miss is not None
    assert past.lookup.first_miss.reason == "absent"
    (because,) = past.lookup.first_miss.because
    assert because.startswith("another engine was to store it, and had not after 0.")


def test_what_comes_too_late_is_for_the_next(here: Joining) -> None:
    scheduler = waiting(here, token_s=QUICK)
    here.run(lambda: here.answers)
    for each in HASHES[:2]:
        here.hold_a_chunk(each)
    here.look_up(scheduler, HASHES[:2])
    assert here.answers == [MISS, m.LookupResult(0, 2, "hh")]
    assert counted(here)["miss_absent"] == 2


@pytest.mark.parametrize(
    "question", [{"token_s": SLOW}, {"stored_chunks": 2, "token_s": 1e-9}], ids=str
)
def test_no_wait_that_is_not_asked_for_or_longer_than_computing(
    here: Joining, question: dict[str, Any]
) -> None:
    here.look_up(here.engine(), HASHES[:2], **question)
    assert here.answers == [MISS]
    assert counted(here) == {"lookups": 1, "miss_absent": 2}


def test_only_what_is_said_to_be_stored_is_waited_for(here: Joining) -> None:
    here.hold_a_chunk(HASHES[0])
    here.look_up(here.engine(), HASHES[:3], stored_chunks=1, token_s=SLOW)
    assert here.answers == [m.LookupResult(0, 1, "h")]


def test_an_aborted_request_waits_no_longer(here: Joining) -> None:
    scheduler = waiting(here)
    here.end_session(scheduler)
    assert here.answers == [MISS]
    assert not len(here.agent.sessions)
    for each in HASHES[:2]:
        here.hold_a_chunk(each)
    here.look_up(scheduler, HASHES[:2])
    assert here.answers == [MISS, m.LookupResult(0, 2, "hh")]
    for _ in range(30):  # longer than any pause
        time.sleep(0.005)
        here.loop.run_due()
    assert len(here.answers) == 2, "each is answered once"


def test_an_engine_that_leaves_waits_no_longer(here: Joining) -> None:
    scheduler = waiting(here)
    here.handlers.forget(scheduler, "it has died")
    assert here.answers == [MISS]
    assert not len(here.agent.sessions)


def test_what_may_only_be_compared_is_not_waited_for(here: Joining) -> None:
    scheduler = here.engine()
    here.hold_a_chunk(HASHES[0])
    here.look_up(scheduler, HASHES[:1])
    here.agent.trust.differed(LAYOUT.fingerprint(CHUNK_SIZE_TOKENS), HASHES[0])
    here.look_up(scheduler, HASHES[:2], stored_chunks=2, token_s=SLOW)
    assert here.answers[1] == m.LookupResult(0, 1, "h", compare_only=True)


# With real agents, over a real Redis

CHUNK, BLOCKS = 64, 12
PROMPT = block_hashes("prompt", BLOCKS)
STORED, LOADED = range(BLOCKS), range(20, 20 + BLOCKS)
TOKENS = BLOCKS // 4 * CHUNK
PATIENT = {"lookup_deadline_s": 60.0, "op_timeout_s": 20.0}


@pytest.fixture
def agents(tmp_path: Path, redis_server: RedisServer) -> Iterator[list[AgentServer]]:
    """The prefill engine's and the decode engine's."""
    paths = [tmp_path / name for name in ("prefill", "decode")]
    url = redis_server.unix_url
    with AgentServer(paths[0], url, **PATIENT) as one, AgentServer(paths[1], url, **PATIENT) as two:
        yield [one, two]


def engine_at(agent: AgentServer) -> Engine:
    return Engine(agent.endpoint, agent_dead_after_s=20.0)


def ask(decoder: Engine, token_s: float = SLOW) -> None:
    """Its request says that all of its prompt is being stored."""
    decoder.scheduler.ranks.reported({0: decoder.workers[0].place})
    decoder.scheduler.begin_lookup(
        "r", decoder.chunks(PROMPT), token_s=token_s, stored_tokens=TOKENS + 20
    )
    assert decoder.scheduler.hit_tokens("r", wait_s=0.05) is None, "it waits"


def answer(decoder: Engine) -> int:
    found: list[int | None] = []

    def is_known() -> bool:
        found.append(decoder.scheduler.hit_tokens("r", wait_s=0.05))
        return found[-1] is not None

    wait_until(is_known, what="an answer")
    assert found[-1] is not None
    return found[-1]


@pytest.mark.servers
@pytest.mark.parametrize("places", [(0, 1), (0, 0)], ids=["two agents", "one agent"])
def test_a_decoder_loads_what_is_stored_while_it_waits(
    agents: Sequence[AgentServer], places: tuple[int, int]
) -> None:
    with engine_at(agents[places[0]]) as prefiller, engine_at(agents[places[1]]) as it:
        ask(it)
        prefiller.randomize(STORED)
        prefiller.store("p", PROMPT, STORED)
        assert answer(it) == TOKENS
        assert it.retrieve("r", PROMPT, LOADED) == set()
        for name, tensor in it.caches[0].items():
            assert torch.equal(tensor[list(LOADED)], prefiller.caches[0][name][list(STORED)])
        it.scheduler.end_session("r")
        assert 0 < agents[places[1]].counter("awaited_chunks") <= 3
        assert agents[places[1]].counter("miss_absent") == 0


@pytest.mark.servers
def test_a_prefiller_that_dies_costs_the_time_of_computing(agents: Sequence[AgentServer]) -> None:
    """What it has stored before is a hit."""
    prefill, decode = agents
    with engine_at(decode) as decoder:
        with engine_at(prefill) as prefiller:
            prefiller.randomize(STORED)
            prefiller.store("p", PROMPT[:4], STORED[:4])
            prefill.wait_idle()
            ask(decoder, token_s=1.0 / CHUNK)
            prefill.kill()
        assert answer(decoder) == CHUNK
        assert decode.counter("miss_absent") == 2


@pytest.mark.servers
@pytest.mark.parametrize("how", ["the agent restarts", "the request is aborted"])
def test_a_wait_ends_with_the_agent_and_with_the_request(
    agents: Sequence[AgentServer], how: str
) -> None:
    decode = agents[1]
    with engine_at(decode) as decoder:
        ask(decoder)
        if how == "the agent restarts":
            decode.restart()
            assert answer(decoder) == 0
            decoder.wait_ready()
        else:
            decoder.scheduler.end_session("r")
            wait_until(lambda: decode.status()["sessions"] == 0, "the end of the session")
        assert decoder.lookup("r2", PROMPT) == 0
        assert "Traceback" not in decode.log
