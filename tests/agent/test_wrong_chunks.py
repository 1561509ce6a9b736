# SPDX-License-Identifier: Apache-2.0
"""A chunk that a canary has found wrong leaves Redis, whatever the agent may do or Redis does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.chunks.keys import hash_tag
from lmcache_redis.client.control import ControlClient
from tests.acl import documented_url
from tests.agent.test_canaries import BLOCKS, CHUNKS, HASHES, TOKENS, canary, counts, hit
from tests.agent.test_clears import hashes_in
from tests.harness import AgentServer, Engine, wait_until
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers
OTHER_BLOCKS = range(1, 9)  # another KV than that of `BLOCKS`


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as server:
        yield server


@pytest.fixture
def agent(tmp_path: Path, server: RedisServer) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", documented_url(server)) as agent:
        yield agent


@pytest.fixture
def engine(agent: AgentServer) -> Iterator[Engine]:
    """Its KV is in Redis, and in the agent's host pool as it was read from there."""
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(engine.num_blocks))
        engine.store("first", HASHES, BLOCKS)
        agent.wait_idle()
        yield engine


def chunk_keys(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        keys = stripe_keys(client)
    return [key for key in keys if any(hash_tag(each) in key for each in CHUNKS)]


def may_not(server: RedisServer, command: str) -> None:
    server.command("ACL", "SETUSER", "agent", f"-{command}")


def may(server: RedisServer, command: str) -> None:
    server.command("ACL", "SETUSER", "agent", f"+{command}")


def waiting(agent: AgentServer) -> int:
    found: int = agent.status()["queues"]["removals"]
    return found


def test_with_the_rights_of_the_page(
    engine: Engine, agent: AgentServer, server: RedisServer
) -> None:
    assert canary(engine, agent, blocks=OTHER_BLOCKS) == counts(2, differing=2)
    wait_until(lambda: not chunk_keys(server), what="all stripes removed")
    assert (agent.counter("failed_removals"), waiting(agent)) == (0, 0)
    agent.kill()
    agent.start()
    engine.wait_ready()
    assert hit(engine) == 0, "another agent loads what was found wrong"


def test_a_removal_needs_one_right(engine: Engine, agent: AgentServer, server: RedisServer) -> None:
    engine.lookup("canary", HASHES)
    for forbidden in ("getrange", "touch", "scan", "ping", "exists"):
        may_not(server, forbidden)
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: not chunk_keys(server), what="all stripes removed")
    assert agent.counter("failed_removals") == 0


@pytest.mark.parametrize("how", ["frozen", "refused"])
def test_it_is_tried_until_it_succeeds(
    engine: Engine, agent: AgentServer, server: RedisServer, how: str
) -> None:
    engine.lookup("canary", HASHES)
    if how == "frozen":
        os.kill(server.pid, signal.SIGSTOP)
    else:
        may_not(server, "unlink")
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: agent.counter("failed_removals") >= 2, what="failed removals")
    wait_until(lambda: waiting(agent) == 2, what="removals that wait")
    assert "could not be removed from Redis" in agent.log
    # Even if the operator trusts the layout again, nothing loads it, from any tier.
    engine.scheduler.end_session("canary")
    ControlClient(agent.endpoint).trust()
    assert hit(engine) == 0
    if how == "frozen":
        os.kill(server.pid, signal.SIGCONT)
    else:
        assert len(hashes_in(server)) == 2
        may(server, "unlink")
    wait_until(lambda: not chunk_keys(server), what="all stripes removed")
    wait_until(lambda: not waiting(agent), what="no removal that waits")
    engine.store("again", HASHES, BLOCKS)
    wait_until(lambda: hashes_in(server) == set(CHUNKS), what="chunks stored again")
    assert hit(engine) == TOKENS


def test_an_own_store_is_not_removed(
    engine: Engine, agent: AgentServer, server: RedisServer
) -> None:
    engine.lookup("canary", HASHES)
    may_not(server, "unlink")
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: waiting(agent) == 2, what="removals that wait")
    before = values(server)
    engine.store("again", HASHES, OTHER_BLOCKS)
    # It is not skipped because the wrong chunk is there, and takes the place of its removal.
    wait_until(lambda: not waiting(agent), what="stores instead of removals")
    stored = values(server)
    assert before.keys() == stored.keys()
    assert all(before[key] != stored[key] for key in before)
    may(server, "unlink")
    attempts = agent.counter("failed_removals")
    assert canary(engine, agent, blocks=OTHER_BLOCKS) == counts(2)
    assert (values(server), agent.counter("failed_removals")) == (stored, attempts)


def test_what_another_agent_has_stored_before_is_removed(
    tmp_path: Path, engine: Engine, agent: AgentServer, server: RedisServer
) -> None:
    """It may be the same: agents write what they hold and Redis has lost."""
    assert engine.lookup("canary", HASHES) == TOKENS
    with server.client() as client:
        client.unlink(*chunk_keys(server))
    with AgentServer(tmp_path / "other", server.unix_url) as other, Engine(other.endpoint) as same:
        for ours, theirs in zip(engine.caches[0].values(), same.caches[0].values(), strict=True):
            theirs.copy_(ours)
        same.store("same", HASHES, BLOCKS)
        other.wait_idle()
    assert hashes_in(server) == set(CHUNKS)
    may_not(server, "unlink")
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: waiting(agent) == 2, what="removals that wait")
    may(server, "unlink")
    wait_until(lambda: not waiting(agent), what="the end of the removals")
    assert not chunk_keys(server)


def test_an_agent_that_ends_before_says_which_chunks_it_left(
    engine: Engine, agent: AgentServer, server: RedisServer
) -> None:
    engine.lookup("canary", HASHES)
    os.kill(server.pid, signal.SIGSTOP)
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: waiting(agent) == 2, what="removals that wait")
    assert agent.terminate() == 0
    os.kill(server.pid, signal.SIGCONT)
    assert "2 chunks that were to be removed may still be in Redis" in agent.log
    (line,) = [each for each in agent.log.splitlines() if "not removed from Redis" in each]
    assert all(hash_tag(each).hex() in line for each in CHUNKS)


def test_one_that_ends_in_peace_says_nothing(
    engine: Engine, agent: AgentServer, server: RedisServer
) -> None:
    engine.lookup("canary", HASHES)
    may_not(server, "unlink")
    engine.compare("canary", HASHES, OTHER_BLOCKS)
    wait_until(lambda: waiting(agent) == 2, what="removals that wait")
    may(server, "unlink")
    assert agent.terminate() == 0
    assert not chunk_keys(server)
    assert "may still be" not in agent.log


def values(server: RedisServer) -> dict[bytes, bytes]:
    with server.client() as client:
        return {key: client.get(key) for key in sorted(chunk_keys(server))}
