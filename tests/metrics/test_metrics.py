"""Counters: a closed set, exact under threads, always in one order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import lmcache_redis
from lmcache_redis.metrics import COUNTERS, Metrics


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


def test_a_name_that_is_not_declared_is_a_mistake() -> None:
    with pytest.raises(KeyError, match="lookupps"):
        Metrics().count("lookupps")


def test_counters_only_grow() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError, match="lookups only grows"):
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
    names = {package / "metrics" / "__init__.py", package / "agent" / "exported.py"}
    source = "".join(path.read_text() for path in package.rglob("*.py") if path not in names)
    assert [name for name in COUNTERS if f'"{name}"' not in source] == []


def test_every_counter_is_explained() -> None:
    for name, sentence in COUNTERS.items():
        assert name.isidentifier()
        assert name.islower()
        assert len(sentence) > 10, name
