# SPDX-License-Identifier: Apache-2.0
"""Agents that pack what they store, and those that do not: hits as ever, from fewer bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmcache_redis.chunks.frame import HEADER_BYTES
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

HASHES = block_hashes("prompt", 16)
BLOCKS = range(16)
OTHERS = range(20, 36)


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.78), (torch.float32, 0.9)])
@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
def test_every_agent_hits_what_one_has_packed(
    tmp_path: Path, redis_server: RedisServer, dtype: torch.dtype, most: float, is_sealed: bool
) -> None:
    (keys := tmp_path / "seal.keys").write_text("11" * 32 + "\n")
    keys.chmod(0o600)
    sealed = {"seal_key_file": str(keys)} if is_sealed else {}
    url = redis_server.unix_url

    def engine_at(agent: AgentServer) -> Engine:
        return Engine(agent.endpoint, dtype=dtype, width=256)

    with (
        AgentServer(tmp_path / "one", url, compress="lossless", **sealed) as agent,
        engine_at(agent) as engine,
    ):
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
        with (
            AgentServer(tmp_path / name, url, compress=compress, **sealed) as agent,
            engine_at(agent) as engine,
        ):
            assert engine.lookup("r1", HASHES) == 256
            assert engine.retrieve("r1", HASHES, OTHERS) == set()
            for cache, blocks in zip(engine.caches[0].values(), kept, strict=True):
                assert torch.equal(cache[list(OTHERS)], blocks)
