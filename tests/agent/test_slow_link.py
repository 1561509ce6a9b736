"""Lookups through a link whose rate is limited, and with a server that stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.link import LimitedLink, LinkFailed
from tests.harness import AgentServer, Engine, block_hashes
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


def test_a_link_that_becomes_slow_costs_one_bet(link: LimitedLink, tmp_path: Path) -> None:
    # On a busy machine too, loading is faster than so slow an engine.
    slow_engine_s, fast_engine_s = 1.0, 1e-4
    with AgentServer(tmp_path / "agent", link.url) as agent, Engine(agent.endpoint) as engine:
        stored(agent, engine)
        whole = CHUNKS * CHUNK_TOKENS
        assert engine.lookup("fast link", HASHES, token_s=slow_engine_s) == whole
        assert engine.retrieve("fast link", HASHES, range(40)) == set()
        engine.scheduler.end_session("fast link")
        assert agent.counter("miss_slower") == 0
        assert agent.status()["loads"]["tiers"]["Redis"]["bytes_per_s"] > 0

        agent.restart()
        engine.wait_ready()
        link.limit(0.3)
        assert engine.lookup("lost", HASHES, token_s=fast_engine_s) < whole
        assert agent.counter("lookups_cut") == 1
        engine.scheduler.end_session("lost")
        missed = agent.counter("miss_slower")
        assert missed > 0
        assert engine.lookup("not taken", HASHES, token_s=fast_engine_s) < whole
        assert agent.counter("miss_slower") > missed
        engine.scheduler.end_session("not taken")

        # For an engine that computes more slowly still, the link is fast enough.
        link.limit(None)
        assert engine.lookup("worth it", HASHES, token_s=100.0) == whole
        assert engine.retrieve("worth it", HASHES, range(40)) == set()
        engine.scheduler.end_session("worth it")


def test_a_server_that_stops_costs_the_time_of_computing(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    """Not the deadline of lookups, which is a minute here."""
    with (
        AgentServer(
            tmp_path / "agent", redis_server.unix_url, lookup_deadline_s=60, op_timeout_s=50
        ) as agent,
        Engine(agent.endpoint) as engine,
    ):
        stored(agent, engine)
        redis_server.stop()
        try:
            assert engine.lookup("r", HASHES, token_s=1e-4) == 0
        finally:
            redis_server.cont()
        assert agent.counter("lookups_cut") == 1
        assert agent.counter("lookups_timed_out") == 0


def test_a_pool_smaller_than_what_is_asked_at_once_serves_all(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        AgentServer(
            tmp_path / "small",
            redis_server.unix_url,
            lookup_deadline_s=60,
            pool_bytes=2 << 20,
        ) as agent,
        Engine(agent.endpoint) as engine,
    ):
        prompts = {f"r{n}": block_hashes(f"prompt {n}", 40) for n in range(4)}
        for name, hashes in prompts.items():
            engine.store(name, hashes, range(40))
            agent.wait_idle()
        agent.restart()
        engine.wait_ready()
        for name, hashes in prompts.items():
            engine.scheduler.maybe_submit_lookup_request(name, block_hashes=hashes)
        for name, hashes in prompts.items():
            assert engine.lookup(name, hashes) == CHUNKS * CHUNK_TOKENS
            assert engine.retrieve(name, hashes, range(40)) == set()
            engine.scheduler.end_session(name)
        assert agent.counter("miss_pool_full") == 0
