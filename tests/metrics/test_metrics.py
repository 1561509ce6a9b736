# SPDX-License-Identifier: Apache-2.0
"""Metrics: a closed set, exact under threads, always in one order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import lmcache_redis
from lmcache_redis.metrics import COUNTERS, Metrics
from lmcache_redis.tier_kinds import KINDS
from lmcache_redis.tiers import TierCounters


def test_everything_starts_at_zero_in_the_declared_order() -> None:
    snapshot = Metrics().snapshot()
    assert list(snapshot) == list(COUNTERS)
    assert set(snapshot.values()) == {0}


def test_counting() -> None:
    metrics = Metrics()
    metrics.count("lookups")
    metrics.count("loaded_bytes", 1 << 40)
    metrics.count("loaded_bytes", 0)
    assert metrics.snapshot()["lookups"] == 1
    assert metrics.snapshot()["loaded_bytes"] == 1 << 40


def test_names_in_code_are_labels_of_what_is_exposed() -> None:
    metrics = Metrics()
    metrics.count("hit_chunks_host", 3)
    metrics.count("disk_loaded_bytes", 4)
    metrics.count("miss_corrupt")
    metrics.observe("hit_chunks", 8)
    metrics.observe("redis_load_seconds", 0.25)

    def value(name: str, **labels: str) -> float | None:
        found: float | None = metrics.registry.get_sample_value(f"lmcache_redis_{name}", labels)
        return found

    assert value("hit_chunks_total", tier="host") == 3
    assert value("hit_chunks_total", tier="redis") == 0
    assert value("loaded_bytes_total", tier="disk") == 4
    assert value("missed_chunks_total", reason="corrupt") == 1
    assert value("lookup_hit_chunks_sum") == 8
    assert value("load_seconds_bucket", tier="redis", le="0.25") == 1
    assert value("load_seconds_bucket", tier="redis", le="0.1") == 0
    assert value("load_seconds_count", tier="disk") == 0


def test_what_something_else_counts_is_taken_over() -> None:
    metrics = Metrics()
    for total in (3, 3, 5):
        metrics.raise_to("redis_errors", total)
        assert metrics.snapshot()["redis_errors"] == total


def test_caches_of_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.count("lookups")
    assert (one.snapshot()["lookups"], other.snapshot()["lookups"]) == (1, 0)


def test_a_name_that_is_not_declared_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="lookupps"):
        Metrics().count("lookupps")


def test_counters_only_grow() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="non-negative"):
        metrics.count("lookups", -1)
    assert metrics.snapshot()["lookups"] == 0


def test_a_snapshot_is_a_copy() -> None:
    metrics = Metrics()
    metrics.snapshot()["lookups"] = 7
    assert metrics.snapshot()["lookups"] == 0


def test_threads_do_not_lose_counts() -> None:
    metrics = Metrics()

    def work() -> None:
        for _ in range(2_000):
            metrics.count("retrieves")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot()["retrieves"] == 8_000


def test_every_counter_is_counted_somewhere() -> None:
    package = Path(lmcache_redis.__file__).parent
    declared = package / "metrics" / "__init__.py"
    source = "".join(path.read_text() for path in package.rglob("*.py") if path != declared)
    of_kinds = {"hit_chunks_host"}
    for kind in KINDS[1:]:
        counters = TierCounters.of(kind)
        of_kinds |= {kind.hits, counters.loaded_chunks, counters.loaded_bytes, counters.silent}
        of_kinds |= {counters.stored_chunks, counters.stored_bytes, counters.plain_bytes}
        of_kinds |= {counters.queue_full}
        of_kinds |= {*counters.misses.values(), *counters.drops.values()}
    assert of_kinds <= {*COUNTERS}
    assert [name for name in COUNTERS if f'"{name}"' not in source and name not in of_kinds] == []


def test_every_counter_is_explained() -> None:
    for name, sentence in COUNTERS.items():
        assert name.isidentifier()
        assert name.islower()
        assert len(sentence) > 10, name
