# SPDX-License-Identifier: Apache-2.0
"""A whole agent without a server binary: its process, and an engine's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from tests.fake.server import FakeRedisServer
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import stripe_keys

pytestmark = pytest.mark.fake

BLOCKS = range(16)  # four chunks
OTHERS = range(20, 36)


def test_a_new_agent_hits_what_the_last_one_stored(tmp_path: Path, fake: FakeRedisServer) -> None:
    hashes = block_hashes("a prompt", len(BLOCKS))
    agent = AgentServer(tmp_path / "agent", fake.url)
    with agent, Engine(agent.endpoint) as engine:
        engine.randomize(BLOCKS)
        (stored,) = engine.snapshot()
        engine.store("r1", hashes, BLOCKS)
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 4
        assert agent.terminate() == 0
    agent = AgentServer(tmp_path / "agent", fake.url)
    with agent, Engine(agent.endpoint) as engine:
        assert engine.lookup("r2", hashes) == 256
        assert engine.retrieve("r2", hashes, OTHERS) == set()
        assert agent.counter("hit_chunks_redis") == 4
        (found,) = engine.snapshot()
    for name, tensor in stored.items():
        assert torch.equal(found[name][list(OTHERS)], tensor[list(BLOCKS)])
        assert not found[name][:20].any()
        assert not found[name][36:].any()


def test_damaged_evicted_and_unknown_chunks_are_misses(
    tmp_path: Path, fake: FakeRedisServer
) -> None:
    prompts = {name: block_hashes(name, 8) for name in ("damaged", "evicted", "whole", "unknown")}
    agent = AgentServer(tmp_path / "agent", fake.url)
    keys: dict[str, list[bytes]] = {}
    with agent, Engine(agent.endpoint) as engine:
        for name, hashes in prompts.items():
            if name != "unknown":
                before = set(stripe_keys(fake))
                engine.randomize(range(8))
                engine.store(name, hashes, range(8))
                agent.wait_idle()
                keys[name] = sorted(set(stripe_keys(fake)) - before)
        assert agent.terminate() == 0
    value = fake.command("GET", keys["damaged"][0])
    fake.command("SET", keys["damaged"][0], value[:-1] + bytes([value[-1] ^ 1]))
    fake.command("DEL", keys["evicted"][-1])
    agent = AgentServer(tmp_path / "agent", fake.url)
    with agent, Engine(agent.endpoint) as engine:
        hits = {name: engine.lookup(name, hashes) for name, hashes in prompts.items()}
        assert hits["whole"] == 128
        assert hits["damaged"] < 128
        assert hits["evicted"] < 128
        assert hits["unknown"] == 0
        assert agent.counter("miss_corrupt") == 1
