# SPDX-License-Identifier: Apache-2.0
"""The tools without a URL, beside an agent that has one; and doctor with a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmcache_redis.admin.sizes.sizing import EXPECTED_RATIO
from tests.admin.cache import Cached
from tests.cli.test_admin import one_sentence, run
from tests.cli.test_size import LLAMA, write
from tests.harness import AgentServer, Engine, wait_until
from tests.servers import RedisServer

SECRET = "s3cr3t"


@pytest.mark.servers
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
            assert "no agent" in one_sentence(run("doctor", *at), 3)


@pytest.mark.servers
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
        assert "'unheard_of'" in one_sentence(
            run("doctor", *at, "--model", write(tmp_path / "new", {"model_type": "unheard_of"})), 2
        )


@pytest.mark.servers
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


@pytest.mark.servers
def test_doctor_sees_young_chunks_evicted(tmp_path: Path) -> None:
    """The limit is too small for chunks that are seconds old."""
    settings = ("--maxmemory", "20mb", "--maxmemory-policy", "allkeys-lru", "--save", "")
    with RedisServer(tmp_path, args=settings) as server, server.client() as client:
        with client.pipeline(transaction=False) as many:
            for number in range(1000):
                Cached(number, stripe_count=7).put(many)
            many.execute()
        assert client.info("stats")["evicted_keys"] > 0
        words = (
            "doctor",
            "--redis-url",
            server.unix_url,
            "--no-bandwidth",
            "--prompt-tokens",
            "256",
        )
        report = json.loads(run(*words, "--json").stdout)
        (limit,) = [each for each in report["findings"] if each["topic"] == "maxmemory"]
        assert "none unused for more than" in limit["seen"]
        assert "org/model, as stored in chunks of 256 tokens" in limit["seen"]
