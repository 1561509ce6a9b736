# SPDX-License-Identifier: Apache-2.0
"""Every query of the dashboard, answered by a real Prometheus that scrapes two busy agents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from demo.dashboard import (
    DASHBOARD,
    Prometheus,
    PrometheusFailed,
    dashboard_table,
    filled_in,
    free_port,
    panels,
    variables,
)
from tests.harness import AgentServer, Engine, block_hashes, wait_until
from tests.scraping import exposed_name
from tests.servers import RedisServer

# As the PodMonitors of the chart.
LABELS = {"namespace": "llm", "cache": "prod", "node": "gpu-0"}
# Counters since the first scrape.
RANGE = "60s"


@pytest.fixture
def vllm_and_exporter() -> Iterator[str]:
    """What serves the families of vLLM and of redis_exporter that the dashboard asks for."""
    registry = CollectorRegistry()
    waited = Histogram("vllm:time_to_first_token_seconds", "", ["model_name"], registry=registry)
    for name in ("redis_memory_used_bytes", "redis_memory_max_bytes"):
        Gauge(name, "", registry=registry).set(1)
    Counter("redis_evicted_keys_total", "", registry=registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    finished = Event()

    def answer_prompts() -> None:
        while not finished.wait(0.1):
            waited.labels("test/model").observe(0.2)

    prompts = Thread(target=answer_prompts)
    prompts.start()
    yield f"127.0.0.1:{server.server_port}"
    finished.set()
    prompts.join()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.servers
def test_every_panel_has_data(
    tmp_path: Path, own_server: RedisServer, vllm_and_exporter: str
) -> None:
    ports = [free_port() for _ in range(2)]
    targets = [f"127.0.0.1:{port}" for port in ports]
    prompts = [block_hashes(f"prompt {n}", 16) for n in range(3)]
    with (
        AgentServer(
            tmp_path / "with-disk", own_server.unix_url,
            metrics=targets[0], disk_path=tmp_path / "disk", disk_size=64 << 20, pool_bytes=1 << 20,
        ) as with_disk,
        AgentServer(tmp_path / "other", own_server.unix_url, metrics=targets[1]) as other,
        Engine(with_disk.endpoint) as writer,
        Engine(other.endpoint) as reader,
        Prometheus(
            tmp_path / "prometheus", [*targets, vllm_and_exporter], "200ms", labels=LABELS
        ) as prometheus,
    ):  # fmt: skip
        wait_until(lambda: len(prometheus.query("lmcache_redis_info")) == 2, what="a scrape")
        for number, hashes in enumerate(prompts):
            # The host pool has room for two of the three.
            writer.store(f"store {number}", hashes, range(16))
            with_disk.wait_idle()
        for number, hashes in enumerate(prompts):
            for engine in (writer, reader):
                assert engine.lookup(f"r{number}", hashes) == 256
                assert not engine.retrieve(f"r{number}", hashes, range(16))
                engine.scheduler.end_session(f"r{number}")
        assert with_disk.counter("disk_loaded_chunks") > 0
        assert other.counter("loaded_chunks") == 12
        # The last thing that is counted: a scrape may come before it.
        wait_until(
            lambda: sum(v for _, v in prometheus.query("lmcache_redis_saved_tokens_total")) == 1536,
            what="another scrape",
        )
        queries = [query for panel in panels() for query, _ in panel.queries]
        assert len(queries) > 30
        for query in queries:
            values = [value for _, value in prometheus.query(filled_in(query, RANGE))]
            assert values and any(not math.isnan(value) for value in values), query  # noqa: PT018
        found = {name: prometheus.label_values(query) for name, query in variables().items()}
        assert found == {name: {each} for name, each in LABELS.items()} | {"model": {"test/model"}}
        assert dashboard_table(prometheus, RANGE).row_count > len(queries)
        with pytest.raises(PrometheusFailed, match="parse error"):
            prometheus.query("sum(")


def test_panels_are_of_what_is_chosen() -> None:
    of_agents = 'namespace=~"$namespace", cache=~"$cache", node=~"$node"'
    for panel in panels():
        for query, _ in panel.queries:
            for name, selector in re.findall(r"([\w:]+)\{(.*?)\}", query):
                # Those of redis_exporter are of one server, wherever it runs.
                wanted = 'cache=~"$cache"' if name.startswith("redis_") else of_agents
                assert wanted in selector, query
            assert query.count("{") == len(re.findall(r"[\w:]+\{", query)) > 0, query


def test_the_dashboard_asks_only_for_what_exists() -> None:
    from tests.agent.test_exported import all_metrics

    known = {exposed_name(metric) for metric in all_metrics()}
    used = set(re.findall(r"\b(lmcache_redis_\w+)", DASHBOARD.read_text()))
    assert {re.sub(r"_bucket$", "", name) for name in used} <= known
    # prometheus_client replaces the colon for a Prometheus that names no escaping: 2, not 3.
    of_vllm = set(re.findall(r"\bvllm[:_]\w+", DASHBOARD.read_text()))
    assert of_vllm == {f"vllm{mark}time_to_first_token_seconds_bucket" for mark in ":_"}
    found = find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("needs vLLM")
    loggers = Path(found.origin).parent / "v1" / "metrics" / "loggers.py"
    assert '"vllm:time_to_first_token_seconds"' in loggers.read_text()
