# SPDX-License-Identifier: Apache-2.0
"""`--store-after N`: chunks are written to the tiers once N requests have named them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lmcache_redis.agent import peers
from lmcache_redis.agent import sights as module
from lmcache_redis.agent.sights import ChunkSights
from tests.agent.here import AgentHere
from tests.agent.starts import Starts
from tests.agent.test_history import explained
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

CHUNK_TOKENS = 64


def test_a_request_counts_once() -> None:
    sights = ChunkSights(2)
    prompt = [b"a", b"b", b"c"]
    assert sights.see("first", "model", prompt) == []
    assert sights.see("first", "model", prompt) == []
    assert sights.see("second", "model", [b"a", b"b", b"x"]) == [b"a", b"b"]
    assert sights.see("second", "model", [b"x"]) == []
    assert [sights.count("model", each) for each in (b"a", b"c", b"x", b"never")] == [2, 1, 1, 0]
    assert sights.count("another model", b"a") == 0
    assert sights.see("third", "model", prompt) == [b"c"]


def test_what_comes_before_a_chunk_has_been_seen_as_often() -> None:
    """Also if it was forgotten, or served by the engine's own cache: it is needed to load it."""
    sights = ChunkSights(3)
    for request in ("first", "second", "third"):
        sights.see(request, "model", [b"c"])
    assert sights.see("fourth", "model", [b"a", b"b", b"c", b"d"]) == [b"a", b"b"]
    assert sights.count("model", b"a") == 4


def test_it_forgets_the_oldest_and_takes_no_chunk_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BUCKETS", 1 << 10)
    sights, some = ChunkSights(2), [n.to_bytes(32) for n in range(400)]
    sights.see("first", "model", some)
    known = sum(sights.count("model", each) for each in some)
    assert 0.9 * len(some) < known <= len(some)
    others = [n.to_bytes(32) for n in range(1 << 30, (1 << 30) + 20_000)]
    assert not any(sights.count("model", each) for each in others)
    sights.see("later", "model", others)  # far more than it holds
    assert sum(sights.count("model", each) for each in some) < 0.1 * len(some)
    assert sights.count("model", others[0]) == 1  # the chunks of a prompt are seen from the end


def test_requests_that_take_turns_count_once() -> None:
    sights, requests = ChunkSights(3), ("first", "second")
    for _ in ("lookup", "store of one rank", "store of another", "lookup after a preemption"):
        for request in requests:
            assert sights.see(request, "model", [b"a", b"b"]) == []
    assert sights.count("model", b"a") == 2
    assert sights.see("third", "model", [b"a", b"b"]) == [b"a", b"b"]


def test_of_requests_the_latest_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_NAMED", 10)
    sights = ChunkSights(2)
    for request in range(20):
        sights.see(request, "model", [b"%d %d" % (request, n) for n in range(4)])
    assert [*sights._named] == [18, 19]
    sights.see(18, "model", [b"%d" % n for n in range(30)])
    assert [*sights._named] == [18], "the request itself"
    assert sights._all_named == 34


def test_many_requests_do_not_overflow() -> None:
    sights = ChunkSights(2)
    for request in range(1000):
        sights.see(request, "model", [b"a"])
    assert sights.count("model", b"a") == 255


def ask(engine: Engine, request_id: str, hashes: list[bytes], local_chunks: int = 0) -> int:
    """A request from its lookup to its end: loads nothing, stores what was not found."""
    names = engine.chunks(hashes)
    engine.scheduler.ranks.reported({0: engine.workers[0].place})
    engine.scheduler.begin_lookup(
        request_id, names[local_chunks:], first_chunk=local_chunks, before=names[:local_chunks]
    )
    wait_until(lambda: engine.scheduler.hit_tokens(request_id) is not None, "an answer")
    found = max(local_chunks * CHUNK_TOKENS, engine.scheduler.hit_tokens(request_id) or 0)
    first = found // engine.block_size_tokens
    if first < len(hashes):
        engine.store(request_id, hashes[first:], range(first, len(hashes)))
    engine.scheduler.end_session(request_id)
    return found // CHUNK_TOKENS


def settled(agent: AgentServer) -> dict[str, int]:
    """The counters once nothing is copied or written."""
    wait_until(lambda: not any(agent.status()["queues"].values()), "the writes")
    return agent.counters()


def test_a_chunk_is_written_when_a_second_request_names_it(start: Starts) -> None:
    hashes = block_hashes("prompt", 16)
    agent, engine = start(store_after=2)
    assert ask(engine, "first", hashes) == 0
    counters = settled(agent)
    assert (counters["gathered_chunks"], counters["stored_chunks"]) == (4, 0)
    assert counters["drop_admission"] == 4
    request = explained(agent, "first")
    assert request["parts"]["because"] == ["only in the host pool for now (--store-after)"]
    # The host pool has them: nothing is computed again, and nothing gathered.
    assert ask(engine, "second", hashes) == 4
    wait_until(lambda: settled(agent)["stored_chunks"] == 4, "the writes")
    counters = settled(agent)
    assert (counters["gathered_chunks"], counters["drop_admission"]) == (4, 4)
    ask(engine, "third", hashes)
    assert settled(agent)["stored_chunks"] == 4
    # Nothing was held back of what a second request is the first to store.
    others = block_hashes("another prompt", 16)
    engine.lookup("aborted", others)
    engine.scheduler.end_session("aborted")
    assert ask(engine, "computes", others) == 0
    wait_until(lambda: settled(agent)["stored_chunks"] == 8, "the writes")
    assert settled(agent)["drop_admission"] == 4


def test_what_is_released_waits_for_the_first_token_too(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the engine computes on the agent's cores."""
    hashes = block_hashes("prompt", 16)
    monkeypatch.setattr(peers, "_FIRST_TOKEN_FIRST_S", 600.0)
    with (
        AgentHere(tmp_path / "agent", redis_server.unix_url, store_after=2) as here,
        Engine(here.endpoint) as engine,
    ):
        cache = here.agent.cache
        assert ask(engine, "first", hashes) == 0
        wait_until(lambda: here.counter("drop_admission") == 4, "the chunks")
        assert ask(engine, "second", hashes) == 4
        wait_until(lambda: cache.backlog == 4 or here.counter("stored_chunks"), "the writes")
        due_s = [write.due_s for write in cache.queues[-1]._writes.values()]
        assert len(due_s) == 4
        assert min(due_s) > time.monotonic() + 300


def test_the_beginning_that_an_engine_has_itself_is_written_too(start: Starts) -> None:
    """A system prompt is looked up once, and then only named: nothing behind it loads without."""
    system = block_hashes("system", 8)
    prompts = [system + block_hashes(f"question {n}", 8) for n in range(2)]
    agent, engine = start(store_after=2)
    assert ask(engine, "first", prompts[0]) == 0
    assert ask(engine, "second", prompts[1], local_chunks=2) == 2
    wait_until(lambda: settled(agent)["stored_chunks"] == 2, "the writes")
    assert settled(agent)["drop_admission"] == 6
    # Only what two requests have named is in Redis.
    _, other = start("other", store_after=2)
    assert ask(other, "elsewhere", prompts[0]) == 2


def test_what_the_pool_has_lost_is_written_at_the_next_store(start: Starts) -> None:
    hashes = block_hashes("prompt", 8)
    agent = start.agent(store_after=2, pool_bytes=6 * (64 << 10))
    engine = start.engine(agent, layers=1)
    assert ask(engine, "first", hashes) == 0
    for number in range(4):
        ask(engine, f"other {number}", block_hashes(f"other {number}", 8))
    assert settled(agent)["stored_chunks"] == 0
    assert ask(engine, "again", hashes) == 0
    miss = explained(agent, "again")["lookup"]["first_miss"]
    assert miss["reason"] == "absent"
    assert miss["because"] == ["it was seen before, but too seldom to be written (--store-after)"]
    wait_until(lambda: settled(agent)["stored_chunks"] == 2, "the writes")
    assert ask(engine, "new", block_hashes("new", 8)) == 0
    assert explained(agent, "new")["lookup"]["first_miss"]["because"] == []


def test_ranks_of_other_nodes_count_a_request_once(start: Starts) -> None:
    """Their agents see stores alone, one of each worker."""
    hashes = block_hashes("prompt", 8)
    here, there = (start.agent(name, store_after=2) for name in ("here", "there"))
    places = [here.endpoint, there.endpoint, there.endpoint]
    engine = start.enter(Engine(places, world_size=3))
    for request_id, written in (("first", 0), ("second", 2)):
        assert engine.lookup(request_id, hashes) == 0
        engine.store(request_id, hashes, range(8))
        engine.scheduler.end_session(request_id)
        wait_until(lambda n=written: settled(here)["stored_chunks"] == n, "the writes")
        wait_until(lambda n=written: settled(there)["stored_chunks"] == 2 * n, "the writes")
    assert engine.lookup("third", hashes) == 2 * CHUNK_TOKENS
