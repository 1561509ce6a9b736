# SPDX-License-Identifier: Apache-2.0
"""An agent that is stopped in the middle of a copy and continues after the lease expired."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from lmcache_redis import messages as m
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer

PIECE_BYTES = 1 << 20
BLOCK_BYTES = 16 << 20
LEASE_S = 1.0
HASHES = block_hashes("prompt", 4)
TARGET = slice(4, 8)


def test_what_a_late_scatter_still_writes_is_one_piece(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """One chunk of 64 MiB: a copy that checked its lease once a chunk would check it once."""
    big = {"pool_bytes": 80 << 20, "slot_bytes": 1 << 20}
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, **big) as agent,
        Engine(
            agent.endpoint, layers=1, num_blocks=8, width=BLOCK_BYTES // 128, dtype=torch.float32
        ) as engine,
    ):
        cache = engine.caches[0]["layer.0"]
        cache[:4] = 1.0
        engine.store("r", HASHES, range(4))
        for _ in range(20):
            cache[TARGET] = 0.0
            failed = agent.counter("retrieves_failed")
            call = engine.workers[0].link.submit(
                m.Retrieve,
                request_id="r",
                hashes=(HASHES[3],),
                block_ids=(4, 5, 6, 7),
                skip_first_n_tokens=0,
                lease_ns=time.monotonic_ns() + int(LEASE_S * 1e9),
            )
            # After the last piece no lease is looked at.
            first, last = cache[4].view(-1)[0], cache[7].view(-1)[-2 * PIECE_BYTES // 4]
            wait_until(first.item, what="the copy's beginning")
            agent.stop()
            time.sleep(LEASE_S + 0.1)
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
