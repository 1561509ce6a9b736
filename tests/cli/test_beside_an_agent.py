# SPDX-License-Identifier: Apache-2.0
"""Tools beside an agent: its server, what it has stored, and what its engines need."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from lmcache_redis import __version__ as version
from lmcache_redis.admin.doctor import diagnose
from lmcache_redis.admin.facts import Need
from lmcache_redis.admin.inspect import LayoutSummary, summarise
from lmcache_redis.admin.purge import Selection
from lmcache_redis.admin.server import PrimaryServers, open_server
from lmcache_redis.admin.sizes.sizing import EXPECTED_RATIO
from lmcache_redis.kvstore import KVStore
from lmcache_redis.resp import RedisOptions
from tests.admin.cache import Cached, purge
from tests.cli.test_admin import one_sentence, run
from tests.cli.test_size import LLAMA, write
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.servers import RedisServer, stripe_keys

pytestmark = pytest.mark.servers

CHUNKS = 3
TOKENS = CHUNKS * 64
PREFIX = b"mine:"
SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("settings", "said"), [({}, True), ({"compress": "lossless"}, False), ({"sealed": True}, False)]
)
def test_doctor_says_what_packing_would_save(
    own_server: RedisServer, tmp_path: Path, settings: dict[str, object], said: bool
) -> None:
    """Of numbers, and not of noise."""
    settings = {"compress": "off"} | settings
    if settings.pop("sealed", False):
        (keys := tmp_path / "keys").write_text("11" * 32 + "\n")
        keys.chmod(0o600)
        settings["seal_key_file"] = str(keys)

    def hints() -> list[str]:
        found = diagnose(server, b"", Need(), bandwidth=False, report=status).findings
        return [each.seen for each in found if each.topic == "compression"]

    with (
        AgentServer(tmp_path / "agent", own_server.unix_url, **settings) as agent,
        Engine(agent.endpoint, dtype=torch.bfloat16, width=256) as engine,
        open_server(RedisOptions(own_server.unix_url)) as server,
    ):
        status = agent.status()
        assert hints() == [], "nothing is stored"
        for cache in engine.caches[0].values():
            noise = torch.randint(-(1 << 15), 1 << 15, cache.shape, dtype=torch.int16)
            cache.copy_(noise.view(cache.dtype))
        engine.store("r", block_hashes("noise", 8), range(8))
        agent.wait_idle()
        assert hints() == []
        own_server.command("FLUSHALL")
        for cache in engine.caches[0].values():
            cache.copy_(torch.randn(cache.shape))
        engine.store("r", block_hashes("numbers", 8), range(8))
        agent.wait_idle()
        assert len(found := hints()) == said
        assert not said or re.fullmatch(
            r"off; a stripe of test/model would have (2[5-9]|3\d)% fewer bytes", found[0]
        )
        del status["redis"]["compress"]  # an older agent's
        assert hints() == []


def test_what_an_agent_stored_is_removed_and_stored_again(
    own_server: RedisServer, tmp_path: Path
) -> None:
    """It is seen whole, and missed without a fault."""

    def held(server: PrimaryServers) -> LayoutSummary:
        (group,) = summarise(server, PREFIX, everything=True, verify=True).groups
        assert (group.chunks, group.incomplete, group.damaged) == (CHUNKS, 0, 0)
        return group

    hashes, blocks = block_hashes("prompt", CHUNKS * 4), range(CHUNKS * 4)
    with (
        AgentServer(tmp_path / "agent", own_server.unix_url, key_prefix=PREFIX.decode()) as agent,
        open_server(RedisOptions(own_server.unix_url)) as server,
    ):
        with Engine(agent.endpoint) as engine:
            engine.randomize(blocks)
            engine.store("r1", hashes, blocks)
            agent.wait_idle()
            group = held(server)
            assert group.model == "test/model"
            assert agent.status()["engines"][0]["layout"].startswith(group.layout)
        result = purge(server, Selection(models=frozenset({"test/model"})), PREFIX)
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
            held(server)


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
    error = json.loads(run(*words, "--endpoint", agent.endpoint).stderr)
    assert "no agent answers at" in error["error"]
    assert error["exit_status"] == 3


def test_tools_ask_the_agent_for_its_server(tmp_path: Path) -> None:
    """Its address, its key prefix, but no password."""
    with (
        RedisServer(tmp_path, password=SECRET, args=("--maxmemory", "200mb")) as server,
        server.client() as client,
    ):
        Cached(1, prefix=b"ours:").put(client)
        url = server.unix_url.replace("unix://", f"unix://:{SECRET}@")
        with AgentServer(tmp_path / "agent", url, key_prefix="ours:") as agent:
            wait_until(lambda: agent.status()["redis"]["up"], "Redis")
            assert SECRET not in json.dumps(agent.status())
            at, key = ("--endpoint", agent.endpoint), {"LMCACHE_REDIS_PASSWORD": SECRET}
            refused = run("inspect", *at)
            assert refused.returncode == 1
            assert "wants a password" in refused.stderr
            done = run("inspect", *at, "--json", **key)
            assert f"the server of the agent at {agent.endpoint}: unix://" in done.stderr
            (group,) = json.loads(done.stdout)["groups"]
            assert group["model"] == "org/model"
            assert SECRET not in done.stdout + done.stderr
            checked = run("doctor", *at, "--no-bandwidth", "--json", **key)
            (facts,) = json.loads(checked.stdout)["facts"]
            assert facts["pool_bytes"] == 64 << 20
            assert facts["need"]["of"] == "org/model, as stored in chunks of 64 tokens"
            gone = run("purge", *at, "--model", "org/model", "--yes", **key)
            assert "removed 1 chunk" in gone.stdout
            assert agent.terminate() == 0
            assert not (tmp_path / "agent" / "agent.sock").exists()
            assert "no agent answers at" in one_sentence(run("doctor", *at), 3)


def test_doctor_with_a_model(tmp_path: Path) -> None:
    model = write(tmp_path / "Llama-3.1-8B", LLAMA)
    settings = ("--maxmemory", "12gb", "--maxmemory-policy", "allkeys-lru", "--save", "")
    with RedisServer(tmp_path, args=settings) as server:
        at = ("--redis-url", server.unix_url, "--no-bandwidth")
        done = run("doctor", *at, "--model", model, "--quiet", "--fail-on", "critical")
        assert done.returncode == 0, done.stdout
        assert "ok " not in done.stdout
        report = json.loads(run("doctor", *at, "--model", model, "--json").stdout)
        (limit,) = [each for each in report["findings"] if each["topic"] == "maxmemory"]
        assert "or 15 prompts of 8,192 (Llama-3.1-8B)" in limit["seen"], "packed, as by default"
        longer = run("doctor", *at, "--model", model, "--prompt-tokens", "32768")
        assert longer.returncode == 1
        assert "fewer than 10 prompts" in longer.stdout
        both = run("doctor", *at, "--model", model, "--kv-bytes-per-token", "1")
        assert "give one of them" in one_sentence(both, 2)


def test_doctor_takes_the_model_of_the_engine(tmp_path: Path) -> None:
    """Its true bytes, of both ranks, whatever else lies in Redis."""
    with RedisServer(tmp_path, args=("--maxmemory", "200mb")) as server:
        with server.client() as client:
            Cached(1).put(client)
        with (
            AgentServer(tmp_path / "agent", server.unix_url) as agent,
            Engine(agent.endpoint, world_size=2) as engine,
        ):
            at = ("doctor", "--endpoint", agent.endpoint, "--no-bandwidth", "--json")
            (facts,) = json.loads(run(*at).stdout)["facts"]
            token_bytes = sum(
                tensor.nbytes // tensor.shape[0] // engine.block_size_tokens
                for caches in engine.caches
                for tensor in caches.values()
            )
            need = facts["need"]
            assert need["of"] == "test/model, as registered with the agent"
            packed_bytes = token_bytes / EXPECTED_RATIO["float32"]
            assert need["kv_bytes_per_token"] == token_bytes
            assert need["loaded_per_token"] == pytest.approx(packed_bytes, rel=1e-3)
            assert packed_bytes < need["memory_per_token"] < 1.3 * packed_bytes
            (facts,) = json.loads(run(*at, "--kv-bytes-per-token", "7").stdout)["facts"]
            assert facts["need"]["kv_bytes_per_token"] == 7


def test_doctor_sees_young_chunks_evicted(tmp_path: Path) -> None:
    """The limit is too small for chunks that are seconds old."""
    settings = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru", "--save", "")
    with RedisServer(tmp_path, args=settings) as server, server.client() as client:
        with client.pipeline(transaction=False) as many:
            for number in range(400):
                Cached(number, stripe_count=7).put(many)
            many.execute()
        assert client.info("stats")["evicted_keys"] > 0
        at = ("--redis-url", server.unix_url, "--no-bandwidth", "--json")
        report = json.loads(run("doctor", *at, "--prompt-tokens", "256").stdout)
        (limit,) = [each for each in report["findings"] if each["topic"] == "maxmemory"]
        assert "none unused for more than" in limit["seen"]
        assert "org/model, as stored in chunks of 256 tokens" in limit["seen"]
