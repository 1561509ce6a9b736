# SPDX-License-Identifier: Apache-2.0
"""What a real agent stored is seen whole, removed, missed without a fault, and stored again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_redis import __version__ as version
from lmcache_redis.admin.doctor import diagnose
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.inspect import Summary, summarise
from lmcache_redis.admin.purge import PurgeResult, Selection, choose, remove
from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.kvstore import KVStore
from lmcache_redis.resp import RedisOptions
from tests.cli.test_admin import one_sentence, run
from tests.harness import AgentServer, Engine, block_hashes
from tests.servers import RedisServer, stripe_keys

CHUNKS = 3
TOKENS = CHUNKS * 64
PREFIX = "mine:"


@pytest.fixture(autouse=True)
def _nothing_leaks() -> None:
    """Not looked at here: torch and ZeroMQ keep descriptors of their own."""


@pytest.fixture
def agent(own_server: RedisServer, tmp_path: Path) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", own_server.unix_url, key_prefix=PREFIX) as agent:
        yield agent


def held(server: PrimaryServers) -> Summary:
    return summarise(server, PREFIX.encode(), everything=True, verify=True)


@pytest.mark.parametrize(
    ("content", "compress", "sealed", "said"),
    [
        ("numbers", "off", False, True),
        ("numbers", "lossless", False, False),
        ("noise", "off", False, False),
        ("numbers", "off", True, False),
        ("nothing", "off", False, False),
    ],
)
def test_doctor_says_what_packing_would_save(
    own_server: RedisServer, tmp_path: Path, content: str, compress: str, sealed: bool, said: bool
) -> None:
    settings = {"compress": compress}
    if sealed:
        (keys := tmp_path / "keys").write_text("11" * 32 + "\n")
        keys.chmod(0o600)
        settings["seal_key_file"] = str(keys)
    with (
        AgentServer(tmp_path / "agent", own_server.unix_url, **settings) as agent,
        Engine(agent.endpoint, dtype=torch.bfloat16, width=256) as engine,
        open_server(RedisOptions(own_server.unix_url)) as server,
    ):
        for cache in engine.caches[0].values():
            noise = torch.randint(-(1 << 15), 1 << 15, cache.shape, dtype=torch.int16)
            cache.copy_(
                torch.randn(cache.shape) if content == "numbers" else noise.view(cache.dtype)
            )
        if content != "nothing":
            engine.store("r", block_hashes("prompt", 8), range(8))
            agent.wait_idle()
        status = agent.status()
        found = diagnose(server, b"", Need(), bandwidth=False, report=status).findings
        hints = [each.seen for each in found if each.topic == "compression"]
        assert len(hints) == said
        assert not said or re.fullmatch(
            r"off; a stripe of test/model would have (2[5-9]|3\d)% fewer bytes", hints[0]
        )
        del status["redis"]["compress"]  # an older agent's
        found = diagnose(server, b"", Need(), bandwidth=False, report=status).findings
        assert "compression" not in {each.topic for each in found}


def test_beside_an_agent(own_server: RedisServer, agent: AgentServer) -> None:
    options = RedisOptions(own_server.unix_url)
    hashes, blocks = block_hashes("prompt", CHUNKS * 4), range(CHUNKS * 4)
    with open_server(options) as server:
        with Engine(agent.endpoint) as engine:
            engine.randomize(blocks)
            engine.store("r1", hashes, blocks)
            agent.wait_idle()
            (group,) = held(server).groups
            assert (group.model, group.chunks) == ("test/model", CHUNKS)
            assert (group.incomplete, group.damaged) == (0, 0)
            layout = agent.status()["engines"][0]["layout"]
            assert layout.startswith(group.layout)
        result = PurgeResult()
        selection = Selection(models=frozenset({"test/model"}))
        remove(server, choose(server, PREFIX.encode(), selection), 1e6, result)
        assert (result.chunks, result.left) == (CHUNKS, {})
        assert stripe_keys(own_server) == []
        # A fresh agent has nothing in its host pool: it must ask Redis, and computes again.
        agent.restart()
        with Engine(agent.endpoint) as engine:
            assert engine.lookup("r2", hashes) == 0
            engine.randomize(blocks)
            engine.store("r3", hashes, blocks)
            agent.wait_idle()
            assert engine.lookup("r4", hashes) == TOKENS
            (group,) = held(server).groups
            assert (group.chunks, group.incomplete, group.damaged) == (CHUNKS, 0, 0)


def test_doctor_beside_an_agent(tmp_path: Path, own_server: RedisServer) -> None:
    words = ["doctor", "--no-bandwidth", "--json", "--redis-url", own_server.unix_url]
    with (
        AgentServer(tmp_path / "agent", own_server.unix_url) as agent,
        Engine(agent.endpoint) as engine,
    ):
        engine.store("s", block_hashes("prompt", 8), range(8))
        agent.wait_idle()
        # Cut as the library cuts.
        with KVStore(own_server.unix_url) as store:
            assert store.put_bytes("name", bytes(3 << 20))
        done = run(*words, "--endpoint", agent.endpoint)
        found = json.loads(done.stdout)
        assert found["node"]["agent"]["pid"] == agent.pid
        here = {f["topic"]: f for f in found["findings"] if f["where"] == "this node"}
        assert here["Redis"]["severity"] == here["engines"]["severity"] == "ok"
        assert here["versions"]["seen"] == f"the agent is {version}, the package here {version}"
        assert here["namespaces"]["severity"] == here["slot size"]["severity"] == "ok"
        # Another agent of other sizes on the same Redis.
        other = {"slot_bytes": 32 << 10, "chunk_size_tokens": 32}
        with (
            AgentServer(tmp_path / "other", own_server.unix_url, **other) as second,
            Engine(second.endpoint) as its_engine,
        ):
            its_engine.store("s", block_hashes("prompt", 8), range(8))
            second.wait_idle()
            done = run(*words, "--endpoint", agent.endpoint)
        assert done.returncode == 1
        topics = {f["topic"] for f in json.loads(done.stdout)["findings"] if f["severity"] != "ok"}
        assert {"slot size", "chunk sizes"} <= topics
    # Without an agent only the server is checked, unless it was named.
    as_text = [word for word in words if word != "--json"]
    assert "this node" not in run(*as_text).stdout
    at = ("--endpoint", agent.endpoint)
    assert "no agent answers at" in one_sentence(run(*as_text, *at), 3)
    error = json.loads(run(*words, *at).stderr)
    assert "no agent answers at" in error["error"]
    assert error["exit_status"] == 3
