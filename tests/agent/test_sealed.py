# SPDX-License-Identifier: Apache-2.0
"""An agent with seal keys: hits as ever, and nothing of a prompt in Redis."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

HASHES = block_hashes("prompt", 8)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "seal.keys"
    path.write_text("11" * 32 + "\n")
    path.chmod(0o600)
    return path


def stored_by(agent: AgentServer) -> None:
    with Engine(agent.endpoint) as engine:
        engine.randomize(range(8))
        engine.store("r0", HASHES, range(8))
        agent.wait_idle()
        assert agent.counter("stored_chunks") == 2


def hits_of(agent: AgentServer) -> int:
    with Engine(agent.endpoint) as engine:
        hit: int = engine.lookup("r1", HASHES)
        return hit


def test_only_agents_with_the_key_hit(
    tmp_path: Path, redis_server: RedisServer, key_file: Path
) -> None:
    url = redis_server.unix_url
    with AgentServer(tmp_path / "one", url, seal_key_file=str(key_file)) as agent:
        stored_by(agent)
        assert "values are sealed with the key" in agent.log
        assert "11" * 8 not in agent.log
    with AgentServer(tmp_path / "two", url, seal_key_file=str(key_file)) as agent:
        assert hits_of(agent) == 128
    with AgentServer(tmp_path / "plain", url) as agent:
        assert hits_of(agent) == 0
        wait_until(lambda: agent.counter("miss_sealed") > 0)
    key_file.write_text("22" * 32 + "\n")
    with AgentServer(tmp_path / "wrong", url, seal_key_file=str(key_file)) as agent:
        assert hits_of(agent) == 0
        wait_until(lambda: agent.counter("miss_sealed") > 0)
        # What it cannot open stays until it stores the same chunks.
        assert _keys(redis_server)
        stored_by(agent)
    key_file.write_text("33" * 32 + "\n" + "22" * 32 + "\n")
    with AgentServer(tmp_path / "rotated", url, seal_key_file=str(key_file)) as agent:
        assert hits_of(agent) == 128


def _keys(server: RedisServer) -> list[bytes]:
    with server.client() as client:
        return stripe_keys(client)
