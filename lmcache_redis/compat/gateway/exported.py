"""What a gateway exposes to Prometheus: its own counts, and those of its tiers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache_redis import __version__
from lmcache_redis.compat.gateway.server import Gateway
from lmcache_redis.compat.gateway.shared import COUNTERS
from lmcache_redis.compat.objects import ObjectCache
from lmcache_redis.metrics import PREFIX, Metrics
from lmcache_redis.metrics.exporter import OwnerCollector, gauge, labelled

_OF_TIERS: Final = ("loaded_chunks", "loaded_bytes", "stored_chunks", "stored_bytes")


def counted(metrics: Metrics) -> Collector:
    """The counters of an agent that a gateway's cache raises too."""
    names = [f"{PREFIX}{name}_total" for name in _OF_TIERS]
    restricted: Collector = metrics.registry.restricted_registry(names)
    return restricted


def owner_of(gateway: Gateway, objects: ObjectCache) -> OwnerCollector:
    """The rest, read on the gateway's loop."""

    def read() -> Iterator[Metric]:
        stats = gateway.stats()
        for name, meaning, labels, values in COUNTERS:
            found = {(value,) if value else (): stats[of] for value, of in values.items()}
            yield labelled(CounterMetricFamily, f"gateway_{name}", meaning, labels, found)
        yield labelled(
            GaugeMetricFamily, "gateway_info", "1; the version of the gateway", ["version"],
            {(__version__,): 1},
        )  # fmt: skip
        yield gauge("gateway_open_connections", "clients now", stats["open_connections"])
        yield gauge("gateway_buffer_size_bytes", "`--buffer-bytes`", stats["buffer_bytes"])
        yield gauge("gateway_buffer_used_bytes", "payload in flight", stats["buffer_used_bytes"])
        up = "1 if the last tier answers, as the command HEALTH says"
        yield gauge("gateway_up", up, objects.is_up)

    return OwnerCollector(objects.cache.owner.post, read)
