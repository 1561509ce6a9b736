# SPDX-License-Identifier: Apache-2.0
"""What the agent keeps of requests, and what it says of their misses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lmcache_redis import messages as m
from lmcache_redis.admin.names import parse_name
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.peers import Peer
from lmcache_redis.agent.registering import form_of
from lmcache_redis.agent.reports.explaining import Explanations
from lmcache_redis.agent.sessions import PastLookup, RequestHistory
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.pacing import Bet
from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.chunks.names import parse_stripe_key
from lmcache_redis.client.control import ControlClient
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.layout import KVLayout, Segment
from lmcache_redis.resp.options import RedisOptions
from lmcache_redis.resp.plane import RedisPlane
from tests.agent.joining import HASHES, Joining
from tests.agent.starts import Starts
from tests.cache.played import run_until
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer, stripe_keys

CHUNKS = 2
TOKENS = 64 * CHUNKS
BLOCKS, OTHERS = range(8), range(8, 16)


def lookup(**changes: Any) -> PastLookup:
    return PastLookup(model="m", first_chunk=0, asked_chunks=4, chunk_tokens=64, **changes)


def looked_up(history: RequestHistory, key: tuple[str, str], found: PastLookup) -> None:
    history.request(key).lookup = found


def test_the_oldest_request_is_forgotten() -> None:
    history, before_s = RequestHistory(most=3), time.time()
    for number in range(5):
        looked_up(history, ("engine", f"r{number}"), lookup(at_s=float(number)))
    history.request(("engine", "r2")).parts.loaded += 7  # not moved to the end by this
    looked_up(history, ("engine", "r5"), lookup())
    assert [each.request_id for each in history] == ["r5", "r4", "r3"]
    assert len(history) == 3
    assert history.since_s == [*history][-1].began_s >= before_s


def test_a_request_is_found_by_its_id_or_a_part_of_it() -> None:
    history = RequestHistory()
    for name in ("cmpl-1-ab", "cmpl-1", "cmpl-12-cd", "chat-3-ef"):
        looked_up(history, ("engine", name), lookup())
    looked_up(history, ("another", "chat-3-ef"), lookup())

    def found(text: str, most: int = 9) -> list[tuple[str, str]]:
        return [(each.engine_id, each.request_id) for each in history.find(text, most)]

    assert found("cmpl-1") == [("engine", "cmpl-1")]  # this one alone, although others contain it
    assert found("cmpl-12") == [("engine", "cmpl-12-cd")]
    assert found("chat-3") == [("another", "chat-3-ef"), ("engine", "chat-3-ef")]
    assert found("chat-3-ef", 1) == [("another", "chat-3-ef")]
    assert found("", 2) == [("another", "chat-3-ef"), ("engine", "chat-3-ef")]
    assert found("nowhere") == []


def test_times_that_are_not_known_are_null() -> None:
    history = RequestHistory()
    looked_up(history, ("engine", "r"), lookup(bet=Bet(4, float("inf"), 2.0, 2.0)._asdict()))
    (shown,) = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins([*history])))
    assert shown["lookup"]["bet"] == {
        "chunks": 4, "load_s": None, "compute_s": 2.0, "chosen_s": 2.0,
    }  # fmt: skip


@pytest.fixture
def here(joining: Callable[..., Joining]) -> Joining:
    return joining(lookup_deadline_s=0.05)


def reasons_in(here: Joining) -> list[tuple[str, str]]:
    history = here.agent.sessions.history
    return [
        (past.request_id, past.lookup.first_miss.reason)
        for past in history
        if past.lookup is not None and past.lookup.first_miss is not None
    ]


def test_misses_before_anything_is_looked_for_are_kept(here: Joining) -> None:
    scheduler = here.join(None)
    here.look_up(scheduler)
    assert reasons_in(here) == [("r", "not_registered")]
    here.map_memory.set()
    for worker_id in range(2):
        here.register(here.join(worker_id))
    here.run(lambda: here.peers.ranks(scheduler))
    ranks = here.peers.ranks(scheduler)
    assert ranks is not None
    here.agent.trust.differed(ranks[0].forms[0].fingerprint, HASHES[3])
    ask(here, scheduler, m.Lookup(3, "behind", (HASHES[3],), first_chunk=2))
    ask(here, scheduler, m.Lookup(3, "of nothing", ()))  # is no miss
    assert reasons_in(here)[0] == ("behind", "distrusted")


def ask(here: Joining, peer: Peer, question: m.Question) -> None:
    here.handlers.answer(peer, question, here.answers.append)


# With a server


def explained(agent: AgentServer, request: str) -> dict[str, Any]:
    report = ControlClient(agent.endpoint, 10).why(request)
    (found,) = report["requests"]
    return dict(found)


def first_miss(agent: AgentServer, request: str) -> dict[str, Any]:
    return dict(explained(agent, request)["lookup"]["first_miss"])


@pytest.mark.servers
def test_a_request_from_its_miss_to_its_hits(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    started_s = time.time()
    hashes = block_hashes("prompt", 12)
    assert engine.lookup("cold", hashes[:8]) == 0
    engine.store("cold", hashes[:8], BLOCKS)
    engine.scheduler.end_session("cold")
    agent.wait_idle()
    cold = explained(agent, "cold")
    (layout,) = cold["lookup"]["layouts"]
    assert started_s <= cold["began_s"] <= time.time()
    assert (cold["lookup"]["asked_chunks"], cold["lookup"]["hits"]) == (CHUNKS, {})
    miss = cold["lookup"]["first_miss"]
    assert (miss["chunk"], miss["token"], miss["reason"]) == (0, 0, "absent")
    assert (miss["now"], miss["other_layouts"]) == (["host"], [])
    assert cold["parts"]["stored"] == CHUNKS

    # One more chunk than was stored, and two of them are in the pool.
    assert engine.lookup("warm", hashes) == TOKENS
    assert engine.retrieve("warm", hashes[:8], OTHERS) == set()
    warm = explained(agent, "warm")
    assert warm["lookup"]["hits"] == {"host": CHUNKS}
    assert (warm["parts"]["loaded"], warm["parts"]["failed"]) == (CHUNKS, 0)
    miss = warm["lookup"]["first_miss"]
    assert (miss["chunk"], miss["token"], miss["now"]) == (CHUNKS, TOKENS, [None])

    assert len(engine.retrieve("lost", block_hashes("nobody's", 4), range(16, 20))) == 4
    lost = explained(agent, "lost")
    assert (lost["lookup"], lost["parts"]["failed"]) == (None, 1)

    with Engine(agent.endpoint, identity={"revision": "two"}) as other:
        assert other.lookup("other", hashes) == 0
        miss = first_miss(agent, "other")
        assert (miss["reason"], miss["other_layouts"]) == ("absent", [layout])

    agent.restart()
    engine.wait_ready()
    assert engine.lookup("again", hashes[:8]) == TOKENS
    again = explained(agent, "again")
    assert again["lookup"]["hits"] == {"redis": CHUNKS}
    assert again["lookup"]["first_miss"] is None


@pytest.mark.servers
def test_why_a_prefix_ends(start: Starts, agent: AgentServer, redis_server: RedisServer) -> None:
    hashes = [block_hashes(f"prompt {n}", 8) for n in range(4)]
    engine = start.engine(agent, world_size=2)
    for prompt in hashes:
        engine.store("store", prompt, BLOCKS)
    agent.wait_idle()
    agent.restart()
    engine.wait_ready()
    with redis_server.client() as client:
        keys = {key: parse_stripe_key(key) for key in stripe_keys(client)}

        def lose(chunk: bytes, rank: int, stripes: Callable[[int], bool]) -> None:
            for key, (_, name, index) in keys.items():
                is_of_it = name.chunk_hash == chunk and name.kv_rank >> 16 & 0xFF == rank
                if is_of_it and stripes(index):
                    client.delete(key)

        lose(engine.chunks(hashes[0])[1], 1, lambda index: True)
        lose(engine.chunks(hashes[1])[1], 0, lambda index: index > 0)
    assert engine.lookup("a rank", hashes[0]) == 64
    miss = first_miss(agent, "a rank")
    assert (miss["chunk"], miss["reason"]) == (1, "in_part")
    assert sorted(map(str, miss["now"])) == ["None", "redis"]
    assert engine.lookup("a stripe", hashes[1]) == 64
    miss = first_miss(agent, "a stripe")
    assert (miss["chunk"], miss["reason"]) == (1, "incomplete")
    assert miss["because"] == ["a chunk could not be loaded"]

    # To compute a token takes this engine a nanosecond: that is known before its first load,
    # and once the rate is known nothing is loaded.
    for number in (2, 3):
        assert engine.lookup(f"slower {number}", hashes[number], token_s=1e-9) == 0
        assert first_miss(agent, f"slower {number}")["reason"] == "slower"
    bet = explained(agent, "slower 3")["lookup"]["bet"]
    assert bet["chunks"] == CHUNKS
    assert bet["load_s"] > bet["chosen_s"] == bet["compute_s"] == pytest.approx(TOKENS * 1e-9)

    redis_server.kill()
    for request in ("down", "down again"):
        assert engine.lookup(request, hashes[3]) == 0
        miss = first_miss(agent, request)
        assert miss["reason"] == "redis_error"
        assert miss["because"][0] == "Redis is not available"
        assert "refuses connections" in miss["because"][1]


# Descriptions in Redis


def layout(**identity: str) -> KVLayout:
    segments = tuple(Segment(0, 1000 * n, 1000, 3000) for n in range(3))
    return KVLayout(tuple(sorted(identity.items())), "uint8", "cpu", 16, 64, segments)


@contextmanager
def agent_at(url: str, **options: Any) -> Iterator[Agent]:
    """An agent's state in this process, with a real plane."""
    config = AgentConfig(redis_url=url, chunk_size_tokens=64, slot_bytes=4096, **options)
    arena = Arena(16 * 4096, 4096)
    plane = RedisPlane(RedisOptions.of_agent(config, url))
    plane.start()
    agent = Agent.of(config, arena, plane)
    try:
        assert plane.wait_probed(30).up
        yield agent
    finally:
        assert agent.copies.close(10)
        plane.close(10)
        agent.loop.run_posted()
        agent.wakeup.close()
        arena.close()


def registered(agent: Agent, *layouts: KVLayout) -> Any:
    """What is used of the registration of a worker with a group for each layout."""
    forms = [form_of(each, "org/model", 7, 64, agent.config) for each in layouts]
    return SimpleNamespace(forms=forms, device=SimpleNamespace(layouts=layouts), chunk_tokens=64)


def read_all(agent: Agent) -> dict[bytes, bytes]:
    found: list[Any] = []
    descriptions, deadline_s = Explanations(agent), time.monotonic() + 30
    descriptions.names(
        lambda names, _: descriptions.read(names, found.append, deadline_s), deadline_s
    )
    run_until(agent.loop, lambda: found)
    return dict(found[0])


@pytest.mark.servers
def test_layouts_are_described_in_redis(redis_server: RedisServer) -> None:
    one, two = layout(revision="one"), layout(revision="two", engine="vllm " * 2000)  # in stripes
    with agent_at(redis_server.unix_url, key_prefix=b"p:") as agent:
        assert read_all(agent) == {}
        Explanations(agent).write([registered(agent, one, two), registered(agent, one)])
        run_until(agent.loop, lambda: len(read_all(agent)) == 2)
        assert read_all(agent) == {each.fingerprint(64): each.canonical(64) for each in (one, two)}
    with redis_server.client() as client:
        (key,) = (k for k in stripe_keys(client) if hash_tag(one.fingerprint(64)) in k)
        _, name, index = parse_stripe_key(key, b"p:")
        assert (name.model_name, name.kv_rank, index) == ("org/model", 7, 0)
        assert parse_name(key, b"p:")[0].layout == "(descriptions)"  # in `inspect`
        # The value of another layout under its key.
        (other, *_) = (k for k in stripe_keys(client) if hash_tag(two.fingerprint(64)) in k)
        client.set(key, client.get(other))
    with agent_at(redis_server.unix_url, key_prefix=b"p:") as agent:
        assert [*read_all(agent)] == [two.fingerprint(64)]
