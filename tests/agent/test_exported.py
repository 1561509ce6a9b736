# SPDX-License-Identifier: Apache-2.0
"""What Prometheus and a probe get from a real agent."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from lmcache_redis.agent.reports.exported import metrics_of, tenants_of
from lmcache_redis.agent.reports.history import MINUTES
from lmcache_redis.agent.uses import TenantUse
from lmcache_redis.config import AgentConfig, parse_address
from lmcache_redis.errors import ConfigError
from lmcache_redis.metrics import Metrics
from lmcache_redis.tier_kinds import HOST, KINDS
from tests.agent.starts import Starts
from tests.agent.test_hour import bars
from tests.harness import AgentServer, Engine, wait_until
from tests.scraping import get, port_in, samples_in, undocumented
from tests.servers import RedisServer

HASHES = [bytes([n]) * 32 for n in range(8)]


def check_page(html: str) -> None:
    """It draws what the agent has just done: at the right."""
    figures = "".join(re.findall(r"<figure>.*?</figure>", html, re.S))
    assert "100 % of 2 chunks" in figures
    assert "128 tokens, " in figures
    for title in ("Hit rate", "Bytes", "Tokens not computed"):
        places = [x for those in bars(figures, title).values() for x, _ in those]
        assert places
        assert min(places) >= MINUTES / 2 * 10


@pytest.mark.servers
def test_a_scrape_says_what_status_says(start: Starts) -> None:
    agent, engine = start(metrics="127.0.0.1:0")
    port = port_in(agent.log)
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/nowhere")[0] == 404
    engine.store("r1", HASHES, range(8))
    assert engine.lookup("r2", HASHES) == 128
    engine.retrieve("r2", HASHES, range(8))
    check_page(get(port, "/")[1])
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
        ("lmcache_redis_saved_tokens_total", ()): 128,
        ("lmcache_redis_saved_untimed_tokens_total", ()): 128,
        ("lmcache_redis_saved_prefill_seconds_total", ()): 0,
        ("lmcache_redis_model_saved_tokens_total", (model,)): 128,
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
        and not name.startswith(("lmcache_redis_model_", "lmcache_redis_tenant_"))
        and name.startswith("lmcache_redis_")
    )
    assert exposed == sum(counters.values())
    assert 0 < found["lmcache_redis_lookup_seconds_sum", ()] < 60
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {metric.name for metric in all_metrics() if "disk_u" not in metric.name} <= names
    assert "_created" not in text


@pytest.mark.servers
def test_loads_from_redis_are_measured(start: Starts, redis_server: RedisServer) -> None:
    agent = start.agent(metrics="127.0.0.1:0")
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


@pytest.mark.servers
def test_idle_scrapers_do_not_take_the_agent_its_descriptors(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """ZeroMQ aborts a process that cannot accept an engine for lack of them."""
    with (
        AgentServer(tmp_path / "agent", redis_server.unix_url, metrics="127.0.0.1:0") as agent,
        contextlib.ExitStack() as idle,
    ):
        with Engine(agent.endpoint):  # opens what the first engine opens
            pass
        port, opened = port_in(agent.log), len(os.listdir(f"/proc/{agent.pid}/fd"))
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (opened + 40, opened + 40))
        for _ in range(75):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        with Engine(agent.endpoint) as engine:
            engine.store("r1", HASHES, range(8))
            assert engine.lookup("r2", HASHES) == 128
        assert agent.running
        assert "Traceback" not in agent.log


STATUS: dict[str, Any] = {
    "version": "1",
    "pool": {"slots": 4, "slot_bytes": 10, "used_slots": 3, "pinned_slots": 2, "locked_bytes": 30},
    "tiers": {
        "disk": {"up": True, "used_bytes": 7},
        "redis": {"up": False, "used_bytes": None},
    },
    "loads": {"waiting": 1, "tiers": {"redis": {"bytes_per_s": 5, "is_slow": True}}},
    "queues": {"write_bytes": 9},
    "write_queue_bytes": 512,
    "sessions": 6,
    "redis": {"refused": {"OOM": 3}},
    "canaries": {"distrusted": ["one"]},
    "engines": [{"model": "m", "layout": "l", "ready": ready} for ready in (True, True, False)],
    "models": {
        "m": {
            "lookups": 1, "lookup_tokens": 2, "hit_tokens": 3, "retrieved_bytes": 4,
            "gathered_bytes": 5, "saved_tokens": 6,
        }
    },
}  # fmt: skip


def all_metrics() -> list[Metric]:
    tiers = {
        kind.name: STATUS["tiers"].get(kind.name, {"up": True, "used_bytes": None})
        for kind in KINDS
        if kind is not HOST
    }
    tenants = tenants_of({"t": TenantUse()})
    return [*Metrics().registry.collect(), *metrics_of({**STATUS, "tiers": tiers}), *tenants]


def test_values_of_a_status() -> None:
    found = {
        (sample.name.removeprefix("lmcache_redis_"), *sample.labels.values()): sample.value
        for metric in metrics_of(STATUS)
        for sample in metric.samples
    }
    assert found == {
        ("info", "1"): 1,
        ("pool_size_bytes",): 40,
        ("pool_used_bytes",): 30,
        ("pool_pinned_bytes",): 20,
        ("pool_locked_bytes",): 30,
        ("queue_bytes",): 9,
        ("queue_limit_bytes",): 512,
        ("waiting_lookups",): 1,
        ("sessions",): 6,
        ("redis_up",): 0,
        ("redis_replies_refused_total", "OOM"): 3,
        ("disk_up",): 1,
        ("disk_used_bytes",): 7,
        ("load_bytes_per_second", "redis"): 5,
        ("tier_slow", "redis"): 1,
        ("distrusted_layouts",): 1,
        ("engines", "m", "l", "yes"): 2,
        ("engines", "m", "l", "no"): 1,
        ("model_lookups_total", "m"): 1,
        ("model_lookup_tokens_total", "m"): 2,
        ("model_hit_tokens_total", "m"): 3,
        ("model_retrieved_bytes_total", "m"): 4,
        ("model_gathered_bytes_total", "m"): 5,
        ("model_saved_tokens_total", "m"): 6,
    }


def test_an_agent_without_a_disk_tier_has_no_metrics_of_it() -> None:
    names = {metric.name for metric in metrics_of({**STATUS, "tiers": {}})}
    assert not {name for name in names if "disk" in name}


def test_the_page_has_every_metric_once() -> None:
    assert undocumented(all_metrics(), "Of an agent") == set()


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
