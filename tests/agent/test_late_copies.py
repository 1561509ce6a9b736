# SPDX-License-Identifier: Apache-2.0
"""An agent that is frozen during a copy and continues late writes to no freed block."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
import torch

from lmcache_redis import messages as m
from lmcache_redis.client import worker as client_worker
from lmcache_redis.client.worker import RETRIEVE_LEASE_S, RetrieveTransfer
from tests.agent.starts import Starts
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
        agent.wait_idle()
        load = stop_inside_a_retrieve(agent, engine, hashes)
        agent.kill()
        wait_until(lambda: load.over, "a failed retrieve", RETRIEVE_LEASE_S)
        assert load.failed_blocks == set(range(8, 16))
        assert engine.lookup("gone", hashes) == 0
        engine.store("gone", hashes, range(8))  # reported at once, not stored
        agent.start()
        engine.wait_ready()
        assert engine.lookup("back", hashes) == CHUNKS * 64


def test_what_a_load_was_told_to_skip_is_not_reported_as_failed(agent: AgentServer) -> None:
    hashes = block_hashes("prompt", 8)
    with agent, Engine(agent.endpoint, num_blocks=17) as engine:
        failed = engine.retrieve("r", hashes, range(8, 16), skip_first_n_tokens=5 * 16)
        assert failed == {13, 14, 15}


PIECE_BYTES = 1 << 20
BLOCK_BYTES = 16 << 20
TARGET = slice(4, 8)


def test_what_a_late_scatter_still_writes_is_one_piece(start: Starts) -> None:
    """One chunk of 64 MiB: a copy that checked its lease once a chunk would check it once."""
    big = {"pool_bytes": 80 << 20, "slot_bytes": 1 << 20}
    agent = start.agent(**big)
    engine = start.engine(
        agent, layers=1, num_blocks=8, width=BLOCK_BYTES // 128, dtype=torch.float32
    )
    hashes, lease_s = block_hashes("prompt", 4), 1.0
    cache = engine.caches[0]["layer.0"]
    cache[:4] = 1.0
    engine.store("r", hashes, range(4))
    for _ in range(20):
        cache[TARGET] = 0.0
        failed = agent.counter("retrieves_failed")
        call = engine.workers[0].link.submit(
            m.Retrieve,
            request_id="r",
            hashes=(hashes[3],),
            block_ids=(4, 5, 6, 7),
            skip_first_n_tokens=0,
            lease_ns=time.monotonic_ns() + int(lease_s * 1e9),
        )
        # After the last piece no lease is looked at.
        first, last = cache[4].view(-1)[0], cache[7].view(-1)[-2 * PIECE_BYTES // 4]
        wait_until(first.item, what="the copy's beginning")
        agent.stop()
        time.sleep(lease_s + 0.1)
        if not last.item():
            break
        agent.cont()  # the copy ended before the signal, or in its last pieces
        wait_until(lambda call=call: call.done, what="an answer, or a lost agent")
        agent.wait_idle()
    at_the_end_of_the_lease = cache[TARGET].clone()
    assert not last.item(), "never stopped in a copy"
    agent.cont()
    wait_until(lambda: call.done, what="an answer, or a lost agent")
    agent.wait_idle()
    written = int((cache[TARGET] != at_the_end_of_the_lease).sum()) * 4
    assert written <= PIECE_BYTES
    assert agent.counter("retrieves_failed") == failed + 1
