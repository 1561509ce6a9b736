"""Every query of the dashboard, answered by a real Prometheus that scrapes two busy agents."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

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

# Counters since the first scrape.
RANGE = "60s"


@pytest.mark.servers
def test_every_panel_has_data(tmp_path: Path, redis_server: RedisServer) -> None:
    ports = [free_port() for _ in range(2)]
    targets = [f"127.0.0.1:{port}" for port in ports]
    prompts = [block_hashes(f"prompt {n}", 16) for n in range(3)]
    with (
        AgentServer(
            tmp_path / "with-disk", redis_server.unix_url,
            metrics=targets[0], disk_path=tmp_path / "disk", disk_size=64 << 20, pool_bytes=1 << 20,
        ) as with_disk,
        AgentServer(tmp_path / "other", redis_server.unix_url, metrics=targets[1]) as other,
        Engine(with_disk.endpoint) as writer,
        Engine(other.endpoint) as reader,
        Prometheus(tmp_path / "prometheus", targets, "200ms") as prometheus,
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
        assert found == {"node": {*targets}, "model": {"test/model"}}
        assert dashboard_table(prometheus, RANGE).row_count > len(queries)
        with pytest.raises(PrometheusFailed, match="parse error"):
            prometheus.query("sum(")


def test_the_dashboard_asks_only_for_what_exists() -> None:
    from tests.agent.test_exported import all_metrics

    known = {exposed_name(metric) for metric in all_metrics()}
    used = set(re.findall(r"\b(lmcache_redis_\w+)", DASHBOARD.read_text()))
    assert {re.sub(r"_bucket$", "", name) for name in used} <= known
