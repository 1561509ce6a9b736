# SPDX-License-Identifier: Apache-2.0
"""An agent that is frozen during a copy and continues late writes to no freed block."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
import torch

from lmcache_redis.client import worker as client_worker
from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import RETRIEVE_LEASE_S, RetrieveTransfer, WorkerClient
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

# Chunks of 48 MiB, so that a copy can be stopped in the middle.
OPTIONS = {"pool_bytes": 320 << 20, "slot_bytes": (1 << 20) - 4096}
WIDTH = 32 << 10
CHUNKS = 2
# Shorter than the usual one: tests wait for its end.
LEASE_S = 1.5
# On a busy machine the copy may end before the signal is sent, again and again.
CAUGHT_WITHIN_S = 120.0


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> AgentServer:
    return AgentServer(tmp_path / "agent", redis_server.unix_url, **OPTIONS)


def stop_inside_a_retrieve(
    agent: AgentServer, engine: Engine, hashes: list[bytes]
) -> RetrieveTransfer:
    """Stop the agent when it has written some of the target blocks but not all."""
    layers = list(engine.caches[0].values())
    ends = [layers[0][8].flatten()[:1], layers[-1][15].flatten()[-1:]]
    until_s = time.monotonic() + CAUGHT_WITHIN_S
    for attempt in count():
        if time.monotonic() > until_s:
            break
        request_id = f"r{attempt}"
        for layer in layers:
            layer[8:16] = 0
        if not engine.lookup(request_id, hashes):
            # On a busy machine the agent may be silent for long enough to count as lost.
            engine.scheduler.end_session(request_id)
            engine.wait_ready()
            continue
        (load,) = engine.begin_retrieves(request_id, hashes, range(8, 16))
        while not any(map(bool, ends)):
            pass
        agent.stop()
        if not ends[1]:
            return load
        agent.cont()
        wait_until(lambda load=load: load.over)
        engine.scheduler.end_session(request_id)
    raise AssertionError("no copy was caught in the middle")


def test_blocks_of_a_frozen_agent_are_kept_until_it_is_done(
    agent: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, layers=3, num_blocks=17, width=WIDTH) as engine:
        engine.randomize(range(8))
        engine.store("r", hashes, range(8))
        with monkeypatch.context() as patch:
            patch.setattr(client_worker, "RETRIEVE_LEASE_S", LEASE_S)
            load = stop_inside_a_retrieve(agent, engine, hashes)
        time.sleep(LEASE_S + 1.0)
        assert not load.over  # it is stopped: it may still write

        # The last element of each page, which shows a late write.
        pages = [layer[8:16, -1, -1, -1] for layer in engine.caches[0].values()]
        agent.cont()
        while not load.over:
            pass
        at_the_end = [page.clone() for page in pages]
        time.sleep(1.0)
        assert all(map(torch.equal, pages, at_the_end))
        assert load.failed_blocks == set(range(8, 16))

        # The engine still works: the agent has mapped its memory again.
        engine.wait_ready()
        assert engine.lookup("again", hashes) == CHUNKS * 64
        assert engine.retrieve("again", hashes, range(8, 16)) == set()
        for layer in engine.caches[0].values():
            assert torch.equal(layer[:8], layer[8:16])


def test_blocks_of_an_agent_that_dies_in_a_copy_are_free(agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, layers=3, num_blocks=17, width=WIDTH) as engine:
        engine.randomize(range(8))
        engine.store("r", hashes, range(8))
        load = stop_inside_a_retrieve(agent, engine, hashes)
        agent.kill()
        wait_until(lambda: load.over, "a failed retrieve", RETRIEVE_LEASE_S)
        assert load.failed_blocks == set(range(8, 16))


def test_what_a_load_was_told_to_skip_is_not_reported_as_failed(agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, num_blocks=17) as engine:
        failed = engine.retrieve("r", hashes, range(8, 16), skip_first_n_tokens=5 * 16)
        assert failed == {13, 14, 15}


def test_an_engine_without_an_id_is_not_mapped(agent: AgentServer) -> None:
    """The agent finds by its id which former mapping to close before it answers."""
    with agent:
        worker = WorkerClient(agent.endpoint, "m", 1, 0, 16, engine_id="")
        try:
            group = CacheGroup({"layer": torch.zeros(17, 2, 16, 64)}, "float32", 16)
            worker.register_groups([group], num_blocks=17, identity={})
            wait_until(lambda: agent.counter("wire_errors") > 0, what="a refusal")
            assert not worker.ready
        finally:
            worker.shutdown()
