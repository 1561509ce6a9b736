# SPDX-License-Identifier: Apache-2.0
"""Agents that pack or seal what they store, and those that do not: who hits, and from how much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcache_redis.chunks.frame import HEADER_BYTES
from tests.agent.starts import Starts
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

HASHES = block_hashes("prompt", 16)
BLOCKS = range(16)
OTHERS = range(20, 36)


@pytest.mark.parametrize(
    ("dtype", "most", "is_sealed"),
    [(torch.bfloat16, 0.78, False), (torch.float32, 0.9, True)],
    ids=["plain", "sealed"],
)
def test_every_agent_hits_what_one_has_packed(
    start: Starts,
    redis_server: RedisServer,
    key_file: Path,
    dtype: torch.dtype,
    most: float,
    is_sealed: bool,
) -> None:
    sealed = {"seal_key_file": key_file} if is_sealed else {}
    agent = start.agent("one", compress="lossless", **sealed)
    engine = start.engine(agent, dtype=dtype, width=256)
    for cache in engine.caches[0].values():
        cache.copy_(torch.randn(cache.shape))
    kept = [cache[list(BLOCKS)].clone() for cache in engine.caches[0].values()]
    engine.store("r0", HASHES, BLOCKS)
    agent.wait_idle()
    plain, stored = agent.counter("plain_bytes"), agent.counter("stored_bytes")
    assert plain == sum(cache.nbytes for cache in kept)
    assert stored < most * plain
    with redis_server.client() as client:
        lying = {key: client.strlen(key) for key in stripe_keys(client)}
        assert sum(lying.values()) == stored + HEADER_BYTES * len(lying)
    for name, compress in (("two", "off"), ("three", "lossless")):
        agent = start.agent(name, compress=compress, **sealed)
        engine = start.engine(agent, dtype=dtype, width=256)
        assert engine.lookup("r1", HASHES) == 256
        assert engine.retrieve("r1", HASHES, OTHERS) == set()
        for cache, blocks in zip(engine.caches[0].values(), kept, strict=True):
            assert torch.equal(cache[list(OTHERS)], blocks)


def stored_by(agent: AgentServer) -> None:
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r0", HASHES[:8], range(8))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 2


def hits_of(agent: AgentServer) -> int:
    with Engine(agent.endpoint) as engine:
        hit: int = engine.lookup("r1", HASHES[:8])
        return hit


def test_only_agents_with_the_key_hit(
    start: Starts, redis_server: RedisServer, key_file: Path
) -> None:
    agent = start.agent("one", seal_key_file=key_file)
    stored_by(agent)
    assert "values are sealed with the key" in agent.log
    assert "11" * 8 not in agent.log
    assert hits_of(start.agent("two", seal_key_file=key_file)) == 128
    plain = start.agent("plain")
    assert hits_of(plain) == 0
    wait_until(lambda: plain.counter("miss_sealed") > 0)
    key_file.write_text("22" * 32 + "\n")
    wrong = start.agent("wrong", seal_key_file=key_file)
    assert hits_of(wrong) == 0
    wait_until(lambda: wrong.counter("miss_sealed") > 0)
    # What it cannot open stays until it stores the same chunks.
    assert stripe_keys(redis_server)
    stored_by(wrong)
    key_file.write_text("33" * 32 + "\n" + "22" * 32 + "\n")
    assert hits_of(start.agent("rotated", seal_key_file=key_file)) == 128
