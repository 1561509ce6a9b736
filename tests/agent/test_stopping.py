# SPDX-License-Identifier: Apache-2.0
"""SIGTERM: nothing new begins, and what is under way ends. Requests are answered meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client.link import AgentCall
from tests.harness import WAIT_S, AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

HASHES, OTHERS = block_hashes("prompt", 8), block_hashes("another prompt", 8)
# As vLLM names chunks: by the hash of the last of their four blocks.
CHUNKS = (HASHES[3], HASHES[7])


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> Iterator[AgentServer]:
    """An agent that waits for a Redis that pauses: no time-out ends what is under way."""
    patient = dict.fromkeys(("op_timeout_s", "lookup_deadline_s", "shutdown_deadline_s"), WAIT_S)
    with AgentServer(tmp_path / "agent", redis_server.unix_url, **patient) as server:
        yield server


@pytest.fixture
def engine(agent: AgentServer) -> Iterator[Engine]:
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        yield engine


def begin_stop(agent: AgentServer) -> None:
    agent.process.terminate()
    wait_until(lambda: "stopping:" in agent.log, what="an agent that stops")


def answer(call: AgentCall) -> m.Answer | None:
    assert call.wait(WAIT_S)
    return call.answer


def test_meanwhile_lookups_miss_and_queued_chunks_are_written(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    redis_server.stop()
    engine.store("r1", HASHES, range(8))  # to the host pool; Redis does not take it yet
    assert engine.lookup("r2", HASHES) == 128
    begin_stop(agent)
    # A hit that the engine was told of is still loaded, a new lookup is none, at once.
    assert not engine.retrieve("r2", HASHES, range(16, 24))
    for tensor in engine.caches[0].values():
        assert torch.equal(tensor[16:24], tensor[:8])
    link = engine.scheduler.link
    lookup = link.submit(m.Lookup, request_id="r3", hashes=CHUNKS)
    assert answer(lookup) == m.LookupResult(lookup.call_id, 0)
    dropped = agent.counter("drop_shutdown")
    engine.store("r4", OTHERS, range(8))
    assert agent.counter("drop_shutdown") == dropped + 2
    with Engine(agent.endpoint, wait=False) as late:
        time.sleep(0.5)  # several HELLOs
        assert not late.scheduler.link.online
        assert late.scheduler.link.refusal is None
    assert agent.running
    redis_server.cont()
    assert agent.process.wait(WAIT_S) == 0
    assert len(redis_server.command("KEYS", "*")) > 0
    assert "were not written" not in agent.log
    # The next agent serves from Redis what this one had queued.
    agent.start()
    engine.wait_ready()
    assert engine.lookup("r5", HASHES) == 128
    assert engine.lookup("r6", OTHERS) == 0


def test_a_lookup_and_its_load_that_were_under_way_end(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    engine.store("r1", HASHES, range(8))
    agent.wait_idle()
    agent.restart()  # with an empty host pool
    engine.wait_ready()
    redis_server.stop()
    lookup = engine.scheduler.link.submit(m.Lookup, request_id="r2", hashes=CHUNKS)
    wait_until(lambda: agent.status()["sessions"] == 1, what="the lookup")
    agent.log_path.write_text("")
    begin_stop(agent)
    redis_server.cont()
    assert answer(lookup) == m.LookupResult(lookup.call_id, 2, "rr")
    assert not engine.retrieve("r2", HASHES, range(16, 24))
    for tensor in engine.caches[0].values():
        assert torch.equal(tensor[16:24], tensor[:8])
    assert agent.process.wait(WAIT_S) == 0


def test_a_hit_that_nobody_loads_is_not_waited_for(agent: AgentServer, engine: Engine) -> None:
    engine.store("r1", HASHES, range(8))
    agent.wait_idle()
    assert engine.lookup("r2", HASHES) == 128
    assert agent.terminate() == 0


def test_a_second_signal_ends_the_wait(
    agent: AgentServer, engine: Engine, redis_server: RedisServer
) -> None:
    redis_server.stop()
    engine.store("r1", HASHES, range(8))
    wait_until(lambda: agent.status()["queues"]["writes"] == 2, what="queued chunks")
    begin_stop(agent)
    began_s = time.monotonic()
    assert agent.terminate() == 0
    assert time.monotonic() - began_s < WAIT_S / 2
    assert "2 chunks were not written" in agent.log
