# SPDX-License-Identifier: Apache-2.0
"""Statistics: counted in workers and in the scheduler, added up by vLLM, shown on its /metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import prometheus_client
import pytest

pytest.importorskip("vllm", reason="needs vLLM (scripts/setup installs it)")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_redis.integrations.vllm.connector import LMCacheRedisConnector
from lmcache_redis.integrations.vllm.reports.stats import DECLARED, ConnectorStats, Recorder
from lmcache_redis.integrations.vllm.requests import RequestLookup
from lmcache_redis.integrations.vllm.worker import StepMetadata
from tests.integrations.test_guard import REQUEST, Broken, connector
from tests.integrations.test_guard import scheduler as scheduler
from tests.scraping import samples_in, undocumented


@pytest.mark.parametrize(
    ("tokens", "tiers", "expected"),
    [
        (range(0, 0), [], {}),
        (range(0, 8), ["host", "redis"], {"host": 4, "redis": 4}),
        (range(0, 7), ["host", "redis"], {"host": 4, "redis": 3}),
        # vLLM has a part of the first chunk.
        (range(2, 8), ["host", "redis"], {"host": 2, "redis": 4}),
        # And more chunks than when the lookup began.
        (range(4, 12), ["host", "disk", "redis"], {"disk": 4, "redis": 4}),
        (range(0, 16), ["host", "disk", "redis", "host"], {"host": 8, "disk": 4, "redis": 4}),
        # An agent that does not tell, or tells less.
        (range(0, 8), [], {}),
        (range(0, 8), ["host"], {"host": 4}),
    ],
)
def test_tokens_by_tier(tokens: range, tiers: list[str], expected: dict[str, int]) -> None:
    assert tokens_by_tier(tokens, tiers, first_chunk=0) == expected
    later = range(tokens.start + 12, tokens.stop + 12)
    assert tokens_by_tier(later, tiers, first_chunk=3) == expected


def test_tokens_before_the_lookup_do_not_count() -> None:
    assert tokens_by_tier(range(4), ["host"], first_chunk=2) == {}


def tokens_by_tier(tokens: range, tiers: list[str], *, first_chunk: int) -> dict[str, int]:
    """Of a load of these tokens, with chunks of four."""
    return RequestLookup(first_chunk, None, tokens.start).tokens_by_tier(tiers, len(tokens), 4)


def test_counts_are_added_up_and_gauges_replaced() -> None:
    scheduler, workers = Recorder(), [Recorder(), Recorder()]
    scheduler.count("hit_tokens", 256, "redis")
    scheduler.observe("lookup_seconds", 0.25)
    for rank, worker in enumerate(workers):
        worker.count("loaded_chunks", 2 + rank, str(rank))
        worker.count("failed_chunks", 0, str(rank))
        worker.observe("load_seconds", 0.5, str(rank))
        worker.set("registered", 0.0, str(rank))
    stats = [worker.take() for worker in workers]
    workers[1].count("loaded_chunks", 4, "1")
    workers[1].observe("load_seconds", 1.0, "1")
    workers[1].set("registered", 1.0, "1")
    total = ConnectorStats({})
    for each in (*stats, scheduler.take(), workers[1].take()):
        assert each is not None
        total = total.aggregate(each)
    # Also after vLLM has sent it to another process.
    total = ConnectorStats(msgspec.msgpack.decode(msgspec.msgpack.encode(total.data)))
    assert total.data == {
        "hit_tokens": {"redis": 256},
        "lookup_seconds": {"": [0.25]},
        "loaded_chunks": {"0": 2, "1": 7},
        "load_seconds": {"0": [0.5], "1": [0.5, 1.0]},
        "registered": {"0": 0.0, "1": 1.0},
    }
    assert total.reduce() == {"lmcache_redis hit tokens": 256, "lmcache_redis loaded chunks": 9}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()


def test_a_gauge_is_reported_when_it_changes() -> None:
    recorder = Recorder()
    seen = []
    for value in (0.0, 0.0, 1.0, 1.0, 0.0):
        recorder.set("registered", value, "0")
        stats = recorder.take()
        seen.append(None if stats is None else stats.data)
    zero, one = {"registered": {"0": 0.0}}, {"registered": {"0": 1.0}}
    assert seen == [zero, None, one, None, zero]


def test_vllm_learns_the_sources_of_a_hit(scheduler: LMCacheRedisConnector) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    found = {"host": 16, "disk": 8, "redis": 4}
    scheduler._scheduler = SimpleNamespace(  # type: ignore[assignment]
        hit_tokens=lambda request_id: found
    )
    assert scheduler.get_external_cache_hit_sources(REQUEST, 30) == {
        sources.HOST: 16,
        sources.DISK: 8,
        sources.EXTERNAL_UNSPECIFIED: 4,
    }


@pytest.mark.skipif(
    not hasattr(KVConnectorBase_V1, "get_external_cache_hit_sources"), reason="needs vLLM 0.32"
)
def test_an_error_in_a_report_leaves_the_cache_on(
    scheduler: LMCacheRedisConnector, caplog: pytest.LogCaptureFixture
) -> None:
    sources = pytest.importorskip("vllm.v1.metrics.cache_hit_source").CacheHitSource
    working, scheduler._scheduler = scheduler._scheduler, Broken()  # type: ignore
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        for _ in range(2):
            found = scheduler.get_external_cache_hit_sources(REQUEST, 30)
            assert found == {sources.EXTERNAL_UNSPECIFIED: 30}
        scheduler._recorder = Broken()  # type: ignore[assignment]
        assert scheduler.get_kv_connector_stats() is None
    assert [each.exc_info is not None for each in caplog.records] == [True, True]
    assert scheduler._adapter is not None
    scheduler._scheduler = working


def test_a_worker_tells_that_its_cache_is_off(tmp_path: Path) -> None:
    worker = connector(tmp_path, KVConnectorRole.WORKER)
    worker.bind_connector_metadata(StepMetadata())
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data == {"registered": {"0": 0.0}}
    assert worker.get_kv_connector_stats() is None
    worker.shutdown()


MODEL_LABELS = ["model_name", "engine"]
METRIC_TYPES: dict[Any, Any] = {
    kind: kind
    for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
}


def metrics_of(world_size: int, engines: int = 1) -> Any:
    config = SimpleNamespace(
        kv_transfer_config=None, parallel_config=SimpleNamespace(world_size=world_size)
    )
    labels = {number: ["some/model", str(number)] for number in range(engines)}
    return LMCacheRedisConnector.build_prom_metrics(config, METRIC_TYPES, MODEL_LABELS, labels)


@pytest.fixture
def own_registry() -> Iterator[None]:
    yield
    metrics_of(1)  # replaces those of the test
    from lmcache_redis.integrations.vllm.reports.stats import _forget_former

    _forget_former()


def scrape() -> dict[tuple[str, tuple[str, ...]], float]:
    text = prometheus_client.generate_latest().decode()
    return {key: value for key, value in samples_in(text).items() if "_vllm_" in key[0]}


@pytest.mark.usefixtures("own_registry")
def test_what_was_counted_is_on_the_page() -> None:
    metrics = metrics_of(world_size=2, engines=2)
    before = scrape()
    counted = {name: n for (name, _), n in before.items() if not name.endswith("_created")}
    assert set(counted.values()) == {0.0}
    exposed = {f"lmcache_redis_{each.name}" for each in DECLARED.values()}
    assert {re.sub("_(count|total)$", "", name) for name in counted} >= exposed
    data = {
        "hit_tokens": {"redis": 256},
        "lookup_seconds": {"": [0.25, 0.5]},
        "loaded_chunks": {"0": 2, "1": 7},
        "load_seconds": {"1": [0.5]},
        "registered": {"1": 1.0},
    }
    metrics.observe(data, 1)
    metrics.observe({"loaded_chunks": {"1": 1}}, 1)
    after = scrape()

    def grown(name: str, *labels: str) -> float:
        return after[name, ("1", "some/model", *labels)]

    assert grown("lmcache_redis_vllm_hit_tokens_total", "redis") == 256
    assert grown("lmcache_redis_vllm_hit_tokens_total", "host") == 0
    assert grown("lmcache_redis_vllm_loaded_chunks_total", "1") == 8
    assert grown("lmcache_redis_vllm_loaded_chunks_total", "0") == 2
    assert grown("lmcache_redis_vllm_lookup_seconds_count") == 2
    assert grown("lmcache_redis_vllm_lookup_seconds_sum") == 0.75
    assert grown("lmcache_redis_vllm_load_seconds_sum", "1") == 0.5
    assert grown("lmcache_redis_vllm_registered", "1") == 1
    # Nothing of the other engine.
    assert {key: value for key, value in after.items() if key[1][0] == "0"} == {
        key: value for key, value in before.items() if key[1][0] == "0"
    }


@pytest.mark.usefixtures("own_registry")
def test_a_second_engine_in_a_process_replaces_the_metrics() -> None:
    first = metrics_of(1)
    first.observe({"loaded_chunks": {"0": 5}})
    second = metrics_of(1)
    assert second is not None
    second.observe({"loaded_chunks": {"0": 1}})
    loaded = [value for (name, _), value in scrape().items() if "loaded_chunks_total" in name]
    assert loaded == [1.0]


@pytest.mark.usefixtures("own_registry")
def test_metrics_that_fail_do_not_reach_vllm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "vllm.lmcache_redis"):
        metrics = metrics_of(1)
        for _ in range(2):
            metrics.observe({"something else": {"0": 5}})
        assert LMCacheRedisConnector.build_prom_metrics(None, {}, [], {}) is None
    assert len(caplog.records) == 2


def test_the_page_has_every_family() -> None:
    registry = prometheus_client.CollectorRegistry()
    for each in DECLARED.values():
        made = each.make(registry=registry)
        if each.label:
            made.labels("one")
    assert undocumented(registry.collect(), "Of vLLM") == set()
