"""An agent that is frozen during a copy and continues late writes to no freed block."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from lmcache_redis.client import worker as client_worker
from lmcache_redis.client.transfers import RETRIEVE_LEASE_S, LoadStoreOp
from lmcache_redis.client.worker import WorkerClient
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

# Chunks of 48 MiB, so that a copy can be stopped in the middle.
OPTIONS = {"pool_bytes": 320 << 20, "slot_bytes": (1 << 20) - 4096}
WIDTH = 32 << 10
CHUNKS = 2
# Shorter than the usual one: tests wait for its end.
LEASE_S = 1.5


@pytest.fixture
def agent(tmp_path: Path, redis_server: RedisServer) -> AgentServer:
    return AgentServer(tmp_path / "agent", redis_server.unix_url, **OPTIONS)


def stop_inside_a_retrieve(agent: AgentServer, engine: Engine, hashes: list[bytes]) -> None:
    """Stop the agent when it has written some of the target blocks but not all."""
    layers = list(engine.caches[0].values())
    target = range(8, 16)
    for attempt in range(50):
        request_id = f"r{attempt}"
        for layer in layers:
            layer[8:16] = 0
        assert engine.lookup(request_id, hashes) == CHUNKS * 64
        op = LoadStoreOp(block_ids=list(target), block_hashes=hashes)
        engine.workers[0].submit_retrieve_request(request_id, op)
        while not layers[0][8].any() and not layers[-1][15].any():
            pass
        agent.stop()
        if not layers[-1][15].flatten()[-1].any():
            return
        agent.cont()
        wait_until(lambda r=request_id: r in engine.workers[0].get_finished(set())[1])
        engine.scheduler.end_session(request_id)
    raise AssertionError("no copy was caught in the middle")


def test_blocks_of_a_frozen_agent_are_kept_until_its_copies_have_ended(
    agent: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, layers=3, num_blocks=17, width=WIDTH) as engine:
        engine.randomize(range(8))
        engine.store("r", hashes, range(8))
        with monkeypatch.context() as patch:
            patch.setattr(client_worker, "RETRIEVE_LEASE_S", LEASE_S)
            stop_inside_a_retrieve(agent, engine, hashes)
        worker = engine.workers[0]
        time.sleep(LEASE_S + 1.0)
        assert worker.get_finished(set())[1] == set()  # it is stopped: it may still write

        # The last element of each page, which shows a late write.
        pages = [layer[8:16, -1, -1, -1] for layer in engine.caches[0].values()]
        agent.cont()
        while not worker.get_finished(set())[1]:
            pass
        at_the_end = [page.clone() for page in pages]
        time.sleep(1.0)
        assert all(map(torch.equal, pages, at_the_end))
        assert worker.get_block_ids_with_load_errors() == set(range(8, 16))

        # The engine still works: the agent has mapped its memory again.
        engine.wait_ready()
        assert engine.lookup("again", hashes) == CHUNKS * 64
        assert engine.retrieve("again", hashes, range(8, 16)) == set()
        for layer in engine.caches[0].values():
            assert torch.equal(layer[:8], layer[8:16])


def test_blocks_of_an_agent_that_dies_inside_a_copy_are_free_at_once(agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, layers=3, num_blocks=17, width=WIDTH) as engine:
        engine.randomize(range(8))
        engine.store("r", hashes, range(8))
        stop_inside_a_retrieve(agent, engine, hashes)
        agent.kill()
        wait_until(
            lambda: engine.workers[0].get_finished(set())[1], "a failed retrieve", RETRIEVE_LEASE_S
        )
        assert engine.workers[0].get_block_ids_with_load_errors() == set(range(8, 16))


def test_what_a_load_was_told_to_skip_is_not_reported_as_failed(agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, num_blocks=17) as engine:
        failed = engine.retrieve("r", hashes, range(8, 16), skip_first_n_tokens=5 * 16)
        assert failed == {13, 14, 15}


def test_a_request_id_that_is_used_again_is_reported_again(agent: AgentServer) -> None:
    with agent, Engine(agent.endpoint) as engine:
        worker = engine.workers[0]
        assert worker.get_finished({"r", "s"})[0] == {"r", "s"}
        # Asynchronous scheduling repeats an id in the following steps.
        assert worker.get_finished({"r"})[0] == set()
        assert worker.get_finished(set())[0] == set()
        assert worker.get_finished({"r"})[0] == {"r"}  # another request of that name
        engine.store("r", block_hashes("prompt", 4), range(4))
        engine.store("r", block_hashes("other", 4), range(4))


def test_an_engine_without_an_id_is_not_mapped(agent: AgentServer) -> None:
    """The agent finds by its id which former mapping to close before it answers."""
    with agent:
        worker = WorkerClient(agent.endpoint, "m", 1, 0, 16, engine_id="")
        try:
            worker.register_kv_caches(
                {"layer": torch.zeros(17, 2, 16, 64)}, num_blocks=17, dtype="float32", identity={}
            )
            wait_until(lambda: agent.counter("wire_errors") > 0, what="a refusal")
            assert not worker.ready
        finally:
            worker.shutdown()
