# SPDX-License-Identifier: Apache-2.0
"""Lookups and stores where the server is far, behind a narrow link, busy, full or stopped."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks.link import LimitedLink, LinkFailed
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.resp.loopback import Forwarder, Link
from tests.servers import RedisServer

pytestmark = pytest.mark.servers

HASHES = block_hashes("prompt", 40)  # ten chunks of 64 tokens
CHUNKS, CHUNK_TOKENS = 10, 64


@pytest.fixture
def link(tmp_path: Path) -> Iterator[LimitedLink]:
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("a limited link needs root and iproute2")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(LimitedLink(tmp_path))
            made.limit(1000)
            made.limit(None)
        except LinkFailed as error:
            pytest.skip(f"no limited links here: {error}")
        yield made


def stored(agent: AgentServer, engine: Engine) -> None:
    engine.randomize(range(40))
    engine.store("store", HASHES, range(40))
    agent.wait_idle()
    assert agent.counter("stored_chunks") == CHUNKS
    agent.restart()  # the host pool is empty now
    engine.wait_ready()


@pytest.mark.parametrize(
    "mbit_per_s",
    [pytest.param(20, marks=pytest.mark.long), 100, pytest.param(300, marks=pytest.mark.long)],
)
def test_the_first_requests_of_an_agent_lose_nothing(
    start: Starts, link: LimitedLink, mbit_per_s: float
) -> None:
    """Prompts of 2,048 tokens, 16 MiB of KV, that the engine would compute in a quarter second.

    ``-s`` prints how much longer each takes than computing.
    """
    tokens, compute_s, names = 2048, 0.25, count()
    prompts = [block_hashes(f"prompt {n}", tokens // 16) for n in range(10)]
    agent = start.agent(
        url=link.url, pool_bytes=256 << 20, slot_bytes=1 << 20, chunk_size_tokens=256
    )
    engine = start.engine(agent, layers=4, width=256, num_blocks=tokens // 16)
    for hashes in prompts:
        engine.store(f"store {next(names)}", hashes, range(len(hashes)))
    agent.wait_idle()
    for _ in range(3):  # on a busy machine the chunk that shows the rate may be late
        agent.restart()
        engine.wait_ready()
        link.limit(mbit_per_s)
        for hashes in prompts[:5]:
            begun_s, name = time.monotonic(), f"first {next(names)}"
            assert engine.lookup(name, hashes, token_s=compute_s / tokens) == 0
            waited_s = time.monotonic() - begun_s
            print(f"{mbit_per_s} Mbit/s: {1 + waited_s / compute_s:.3f} of computing")
            engine.scheduler.end_session(name)
            time.sleep(compute_s)
        if not agent.counter("lookups_cut"):
            break
    # No load was begun for a request and given up; one chunk showed the rate.
    assert agent.counter("lookups_cut") == 0
    assert agent.counter("probes") == 1
    wait_until(lambda: agent.counter("loaded_chunks") == 1, "the chunk that shows the rate")
    # The rate is known now. Each ends sooner than it was expected to be computed.
    for hashes in prompts[5:]:
        name = f"back to back {next(names)}"
        assert engine.lookup(name, hashes, token_s=compute_s / tokens) == 0
        engine.scheduler.end_session(name)
    assert agent.counter("loaded_chunks") == 1


def test_the_first_request_over_a_fast_link_is_loaded(start: Starts, link: LimitedLink) -> None:
    agent, engine = start(url=link.url)
    stored(agent, engine)
    link.limit(10_000)
    # Its share of so slow an engine's time is enough on a busy machine too.
    assert engine.lookup("first", HASHES, token_s=0.1) == CHUNKS * CHUNK_TOKENS
    assert agent.counter("probes") == 1
    assert engine.retrieve("first", HASHES, range(40)) == set()


def test_a_link_that_becomes_slow_costs_one_request(start: Starts, link: LimitedLink) -> None:
    # On a busy machine too, loading is faster than so slow an engine.
    slow_engine_s, fast_engine_s = 1.0, 1e-4
    agent, engine = start(url=link.url)
    stored(agent, engine)
    whole = CHUNKS * CHUNK_TOKENS
    assert engine.lookup("fast link", HASHES, token_s=slow_engine_s) == whole
    assert engine.retrieve("fast link", HASHES, range(40)) == set()
    engine.scheduler.end_session("fast link")
    assert agent.counter("miss_slower") == 0
    assert agent.status()["loads"]["tiers"]["redis"]["bytes_per_s"] > 0

    agent.restart()
    engine.wait_ready()
    link.limit(0.3)
    assert engine.lookup("not known", HASHES, token_s=fast_engine_s) < whole
    engine.scheduler.end_session("not known")

    def missed() -> float:
        """On a busy machine the question is answered late, too."""
        return agent.counter("miss_slower") + agent.counter("miss_redis_silent")

    before = missed()
    assert before > 0
    assert engine.lookup("not taken", HASHES, token_s=fast_engine_s) < whole
    assert missed() > before
    engine.scheduler.end_session("not taken")

    # For an engine that computes more slowly still, the link is fast enough.
    link.limit(None)
    names = count()

    def is_worth_it() -> bool:
        """Requests that the slow link held up may have made Redis look down for a moment."""
        name = f"worth it {next(names)}"
        tokens = engine.lookup(name, HASHES, token_s=100.0)
        if tokens == whole:
            assert engine.retrieve(name, HASHES, range(40)) == set()
        engine.scheduler.end_session(name)
        return tokens == whole

    wait_until(is_worth_it, "a link that is fast enough")


def test_a_link_that_recovers_is_found_by_a_probe(start: Starts, link: LimitedLink) -> None:
    whole, names = CHUNKS * CHUNK_TOKENS, count()
    soon = {"lmcache_redis.cache.pacing._OLD_S": 3.0}
    agent, engine = start(url=link.url, constants=soon)
    stored(agent, engine)

    def found() -> int:
        """What a lookup finds for an engine that computes the prompt in a second."""
        time.sleep(1.1)  # it is idle: nothing is loaded beside other prompts
        name = f"r{next(names)}"
        tokens = engine.lookup(name, HASHES, token_s=0.0016)
        engine.scheduler.end_session(name)
        return tokens

    link.limit(2)
    assert found() < whole
    assert found() < whole
    link.limit(None)
    wait_until(lambda: found() == whole, "a faster link", 60)
    assert agent.counter("probes") >= 1


def test_what_a_slow_link_cannot_store_is_the_end_of_prompts(
    start: Starts, link: LimitedLink
) -> None:
    """Two prompts of ten chunks in a queue of fifteen."""
    options = {"pool_bytes": 30 * 98304 + 4096, "lookup_deadline_s": 60.0}
    agent, engine = start(url=link.url, **options)
    prompts = [block_hashes(f"prompt {n}", 40) for n in range(3)]
    link.limit(4)
    for number, hashes in enumerate(prompts):
        assert engine.lookup(f"r{number}", hashes) == 0
        engine.store(f"r{number}", hashes, range(40))
        if number == 0:
            agent.wait_idle()  # the agent knows the rate of its writes now
    agent.wait_idle()
    assert agent.counter("drop_queue_full") > 0
    link.limit(None)
    agent.restart()
    engine.wait_ready()
    found = [engine.lookup(f"again {n}", prompts[n]) // CHUNK_TOKENS for n in (1, 2)]
    assert min(found) >= 7


class LongLink(Forwarder):
    """Answers come later: a link that is long, not narrow."""

    def _upstream(self, link: Link) -> None:
        while data := link.client.recv(1 << 20):
            link.server.sendall(data)

    def _downstream(self, link: Link) -> None:
        while data := link.server.recv(1 << 20):
            time.sleep(0.15)
            link.client.sendall(data)


def test_a_far_server_is_asked_if_computing_takes_longer(
    start: Starts, redis_server: RedisServer
) -> None:
    link = start.enter(LongLink(redis_server.port))
    agent, engine = start(url=link.url, lookup_deadline_s=60)
    stored(agent, engine)
    assert engine.lookup("short", HASHES, token_s=1e-4) == 0
    # It has never answered until then.
    assert agent.counter("lookups_failed") == 1
    assert agent.counter("miss_redis_silent") == CHUNKS
    engine.scheduler.end_session("short")
    assert engine.lookup("long", HASHES, token_s=0.1) == CHUNKS * CHUNK_TOKENS
    assert engine.retrieve("long", HASHES, range(40)) == set()
    assert agent.counter("lookups_timed_out") == 0


def test_a_server_that_evicts_gives_what_it_still_has(tmp_path: Path) -> None:
    """Prompts of 1 MB each in a Redis of 10 MB: the oldest are gone, and none comes back wrong."""
    args = ("--maxmemory", "10mb", "--maxmemory-policy", "allkeys-lru")
    args += ("--maxmemory-samples", "64")
    with (
        RedisServer(tmp_path, args=args) as server,
        AgentServer(tmp_path / "agent", server.unix_url) as agent,
        Engine(agent.endpoint) as engine,
    ):
        prompts = [block_hashes(f"prompt {n}", 40) for n in range(14)]
        contents = []
        for number, hashes in enumerate(prompts):
            engine.randomize(range(40))
            contents.append(engine.snapshot())
            if hashes is prompts[-1]:
                time.sleep(1.1)  # Redis's clock of uses counts seconds: the others are older now
            engine.store(f"r{number}", hashes, range(40))
            agent.wait_idle()
        agent.restart()
        engine.wait_ready()
        found = []
        for number, hashes in enumerate(prompts):
            name = f"again {number}"
            blocks = engine.lookup(name, hashes, token_s=0.01) // engine.block_size_tokens
            assert engine.retrieve(name, hashes[:blocks], range(blocks)) == set()
            for loaded, content in zip(engine.snapshot(), contents[number], strict=True):
                for layer, tensor in loaded.items():
                    assert torch.equal(tensor[:blocks], content[layer][:blocks])
            engine.scheduler.end_session(name)
            found.append(blocks)
        assert found[0] < 40
        assert found[-1] == 40


def test_a_server_that_stops_costs_the_time_of_computing(
    start: Starts, redis_server: RedisServer
) -> None:
    """Not the deadline of lookups, which is a minute here. So does one that is busy with others."""
    agent, engine = start(lookup_deadline_s=60, op_timeout_s=50)
    stored(agent, engine)
    redis_server.stop()
    try:
        assert engine.lookup("r", HASHES, token_s=1e-4) == 0
    finally:
        redis_server.cont()
    assert agent.counter("lookups_failed") == 1
    assert agent.counter("miss_redis_silent") == CHUNKS
    # Until the chunk that shows the rate has arrived, nothing else is loaded.
    tier = lambda: agent.status()["loads"]["tiers"]["redis"]  # noqa: E731
    wait_until(lambda: not tier()["in_flight_bytes"], "a rate")
    # The rate has the pause in it. The first answers after it may be late.
    then = (engine.lookup(f"then {n}", HASHES, token_s=10.0) for n in count())
    wait_until(lambda: next(then) == CHUNKS * CHUNK_TOKENS, "hits")
    assert agent.counter("lookups_timed_out") == 0
