# SPDX-License-Identifier: Apache-2.0
"""A share that is missing, wrong, late or not copied fails its chunk as a whole.

What is loaded before it is right, what the engine computes in its place can be stored, and nothing
stays pinned.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmcache_redis.chunks.names import parse_stripe_key
from tests import cuda_driver
from tests.agent.on_gpus import Node, in_agents
from tests.agent.starts import Starts
from tests.agent.test_shares import HASHES, LOADED, STORED, GpuShardedEngine, ShardedEngine, kv
from tests.harness import AgentServer, wait_until
from tests.resp.proxy import Proxy, Stall
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

HEADS, CHUNKS, BLOCKS, TOKENS = 8, 4, 4, 64  # blocks and tokens of a chunk


@pytest.fixture
def model(tmp_path: Path, redis_server: RedisServer) -> torch.Tensor:
    """The KV of a prompt, which an engine of two ranks has stored."""
    found = kv(HEADS)
    with (
        AgentServer(tmp_path / "stores", redis_server.unix_url, compress="off") as agent,
        ShardedEngine(agent.endpoint, 2, HEADS) as engine,
    ):
        engine.fill(found, STORED)
        engine.store("store", HASHES, STORED)
        agent.wait_idle()
    return found


def key_of(redis_server: RedisServer, chunk: int, share: int) -> bytes:
    """Of the only stripe of a share. Its kv_rank names the share in the second byte."""
    with redis_server.client() as client:
        names = {key: parse_stripe_key(key)[1] for key in stripe_keys(client)}
    wanted = HASHES[BLOCKS * chunk + BLOCKS - 1], share
    (found,) = (k for k, n in names.items() if (n.chunk_hash, n.kv_rank >> 16 & 0xFF) == wanted)
    return found


def holds(engine: ShardedEngine, model: torch.Tensor, chunks: Sequence[int]) -> bool:
    """Whether the blocks of these chunks have the model's KV."""
    for cache, layer in zip(engine.caches[0].values(), model, strict=True):
        for chunk in chunks:
            of_chunk = slice(BLOCKS * chunk, BLOCKS * (chunk + 1))
            if not torch.equal(cache[LOADED[of_chunk]], layer[of_chunk]):
                return False
    return True


def ends(agent: AgentServer, engine: ShardedEngine, request: str) -> None:
    """The request, and with it every pin."""
    engine.scheduler.end_session(request)
    wait_until(lambda: not agent.status()["pool"]["pinned_slots"], "no pinned slot")


@pytest.mark.parametrize(
    ("how", "share"), [("missing", 0), ("missing", 7), ("cut short", 7), ("corrupt", 5)]
)
def test_a_share_that_is_not_right_ends_the_prefix(
    start: Starts, redis_server: RedisServer, model: torch.Tensor, how: str, share: int
) -> None:
    key = key_of(redis_server, 2, share)
    with redis_server.client() as client:
        value = bytearray(client.get(key))
        if how == "missing":
            client.delete(key)
        elif how == "cut short":
            client.set(key, bytes(value[:-1]))
        else:
            value[-100] ^= 1
            client.set(key, bytes(value))
    agent = start.agent("loads", compress="off")
    engine = start.enter(ShardedEngine(agent.endpoint, 1, HEADS))
    assert engine.lookup("r", HASHES) == 2 * TOKENS
    assert engine.retrieve("r", HASHES[: 2 * BLOCKS], LOADED[: 2 * BLOCKS]) == set()
    assert engine.holds(model[:, : 2 * BLOCKS], LOADED[: 2 * BLOCKS])
    ends(agent, engine, "r")
    # What the engine computes for the rest replaces what was wrong.
    engine.fill(model, STORED)
    engine.store("r", HASHES, STORED)
    agent.wait_idle()
    agent.restart()
    engine.wait_ready()
    assert engine.lookup("again", HASHES) == CHUNKS * TOKENS


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    with Proxy(redis_server.port) as proxy:
        yield proxy


@pytest.mark.parametrize("late", [0, 20, 31])
def test_a_share_that_is_late_is_not_waited_for(
    start: Starts, proxy: Proxy, model: torch.Tensor, late: int
) -> None:
    """late: which of the 32 reads."""
    how: dict[str, Any] = {"compress": "off", "lookup_deadline_s": 1.0}
    agent = start.agent("loads", url=proxy.url, **how)
    engine = start.enter(ShardedEngine(agent.endpoint, 1, HEADS))
    proxy.for_gets.extend([*[None] * late, Stall(1000)])
    tokens = engine.lookup("r", HASHES)
    assert tokens < CHUNKS * TOKENS
    chunks, rest = divmod(tokens, TOKENS)
    assert rest == 0
    hit = slice(BLOCKS * chunks)
    assert engine.retrieve("r", HASHES[hit], LOADED[hit]) == set()
    assert engine.holds(model[:, hit], LOADED[hit])
    ends(agent, engine, "r")


@pytest.mark.parametrize("late", [11, 31])
def test_a_load_with_a_late_share_fails_with_its_lease(
    start: Starts, proxy: Proxy, model: torch.Tensor, late: int
) -> None:
    """Of chunks that the host pool has lost since the lookup."""
    agent = start.agent("loads", url=proxy.url, compress="off")
    engine = start.enter(ShardedEngine(agent.endpoint, 1, HEADS))
    proxy.for_gets.extend([*[None] * late, Stall(1000)])
    lease_ns = time.monotonic_ns() + int(1.0e9)
    ops = engine.ops(HASHES, LOADED)
    loads = engine.workers[0].begin_retrieves(["r"], ops, lease_ns=lease_ns)
    wait_until(lambda: all(each.over for each in loads), "the end of the load")
    failed = {number for each in loads for number in each.failed_chunks}
    assert failed
    good = set(range(CHUNKS)) - failed
    assert holds(engine, model, sorted(good))
    blocks = set().union(*(each.failed_blocks for each in loads))
    assert blocks == {LOADED[BLOCKS * n + at] for n in failed for at in range(BLOCKS)}
    ends(agent, engine, "r")


@pytest.mark.skipif(cuda_driver.missing() is not None, reason=f"{cuda_driver.missing()}")
@pytest.mark.parametrize("at", [1, 150])
def test_a_share_that_cannot_be_copied_fails_its_chunks(
    node: Node, model: torch.Tensor, at: int
) -> None:
    """at: which of the copies, one for each page."""
    agent = node.agent(direct=1024, compress="off", batch_copies="off")
    gpu: dict[str, Any] = {"host": node.host, "gpus": (0,)}
    engine = node.start.enter(GpuShardedEngine(agent.endpoint, 1, HEADS, **gpu))
    assert engine.lookup("r", HASHES) == CHUNKS * TOKENS
    cuda_driver.fail("cuMemcpyHtoDAsync_v2", 1, at=at, environment=in_agents())
    loads = engine.begin_retrieves("r", HASHES, LOADED)
    wait_until(lambda: all(each.over for each in loads), "the end of the load")
    failed = {number for each in loads for number in each.failed_chunks}
    assert failed
    node.host.synchronize()
    assert holds(engine, model, sorted(set(range(CHUNKS)) - failed))
    ends(agent, engine, "r")
    # The GPU is not lost, and the chunks are still there.
    assert engine.lookup("again", HASHES) == CHUNKS * TOKENS
    assert engine.retrieve("again", HASHES, LOADED) == set()
    assert engine.holds(model, LOADED)
    ends(agent, engine, "again")
