"""What Prometheus and a probe get from a real agent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_redis.agent.exported import FAMILIES
from lmcache_redis.compat.gateway import exported
from lmcache_redis.config import AgentConfig, parse_address
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics.exporter import Family
from tests.harness import AgentServer, Engine, wait_until
from tests.scraping import get, metrics_table, port_in, samples_in
from tests.servers import RedisServer

ROOT = Path(__file__).parent.parent.parent
HASHES = [bytes([n]) * 32 for n in range(8)]


@pytest.mark.servers
def test_a_scrape_says_what_status_says(tmp_path: Path, redis_server: RedisServer) -> None:
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, metrics="127.0.0.1:0") as agent,
        Engine(agent.endpoint) as engine,
    ):
        port = port_in(agent.log)
        assert get(port, "/healthz") == (200, "ok\n")
        assert get(port, "/")[0] == 404
        engine.store("r1", HASHES, range(8))
        assert engine.lookup("r2", HASHES) == 128
        engine.retrieve("r2", HASHES, range(8))
        wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")
        status, (code, text) = agent.status(), get(port, "/metrics")
        assert code == 200
        found = samples_in(text)
        counters, pool = status["counters"], status["pool"]
        layout = status["engines"][0]["layout"]
        model = status["engines"][0]["model"]
        assert status["engines"][0]["ready"]
        expected = {
            ("lmcache_redis_hit_chunks_total", ("host",)): 2,
            ("lmcache_redis_stored_bytes_total", ("redis",)): counters["stored_bytes"],
            ("lmcache_redis_lookups_total", ()): 1,
            ("lmcache_redis_lookup_seconds_count", ()): 1,
            ("lmcache_redis_lookup_hit_chunks_sum", ()): 2,
            ("lmcache_redis_store_seconds_count", ()): 1,
            ("lmcache_redis_retrieve_seconds_count", ()): 1,
            ("lmcache_redis_load_seconds_count", ("redis",)): 0,
            ("lmcache_redis_model_lookup_tokens_total", (model,)): 128,
            ("lmcache_redis_model_hit_tokens_total", (model,)): 128,
            ("lmcache_redis_model_gathered_bytes_total", (model,)): counters["gathered_bytes"],
            ("lmcache_redis_model_retrieved_bytes_total", (model,)): counters["retrieved_bytes"],
            ("lmcache_redis_redis_up", ()): 1,
            ("lmcache_redis_pool_used_bytes", ()): pool["used_slots"] * pool["slot_bytes"],
            ("lmcache_redis_engines", (layout, model, "yes")): 1,
        }
        assert {name: found[name] for name in expected} == expected
        # Every counter, once.
        exposed = sum(
            value
            for (name, _), value in found.items()
            if name.endswith("_total")
            and not name.startswith("lmcache_redis_model_")
            and name.startswith("lmcache_redis_")
        )
        assert exposed == sum(counters.values())
        assert 0 < found["lmcache_redis_lookup_seconds_sum", ()] < 60
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {family.exposed_name.removesuffix("_total") for family in FAMILIES} <= names


@pytest.mark.servers
def test_loads_from_redis_are_measured(tmp_path: Path, redis_server: RedisServer) -> None:
    with AgentServer(tmp_path / "agent", redis_server.unix_url, metrics="127.0.0.1:0") as agent:
        with Engine(agent.endpoint) as engine:
            engine.store("r1", HASHES, range(8))
            wait_until(lambda: agent.counter("stored_chunks") == 2, what="the chunks in Redis")
        agent.log_path.write_text("")
        agent.restart()
        with Engine(agent.endpoint) as engine:
            assert engine.lookup("r2", HASHES) == 128
            found = samples_in(get(port_in(agent.log), "/metrics")[1])
            assert found["lmcache_redis_load_seconds_count", ("redis",)] == 2
            assert found["lmcache_redis_load_rate_bytes_per_second_count", ("redis",)] == 2
            assert found["lmcache_redis_hit_chunks_total", ("redis",)] == 2
            assert found["lmcache_redis_load_bytes_per_second", ("redis",)] > 0
        # A Redis that is down is no reason to restart the agent.
        redis_server.kill()
        wait_until(lambda: not agent.status()["redis"]["up"], what="Redis down")
        assert get(port_in(agent.log), "/healthz") == (200, "ok\n")
        assert samples_in(get(port_in(agent.log), "/metrics")[1])["lmcache_redis_redis_up", ()] == 0


@pytest.mark.parametrize("families", [FAMILIES, exported.FAMILIES], ids=["agent", "gateway"])
def test_the_page_has_every_family_once(families: Sequence[Family]) -> None:
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    assert metrics_table(families) in (ROOT / "docs" / "metrics.md").read_text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected
    assert AgentConfig(metrics=text).metrics == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9464",
        ":9464",
        "localhost:9464",
        "127.0.0.1",
        "::1:80",
        "127.0.0.1:65536",
        "a:b",
        "[::1:80",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics is '.*': write ADDRESS:PORT"):
        AgentConfig(metrics=text)
