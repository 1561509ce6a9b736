"""The metrics that the connector adds to vLLM's own, and the counts that vLLM carries to them.

``ConnectorStats.data`` has a mapping for each family: from the value of its label ("" if it has
none) to a count, to the list of what was observed, or to a gauge's value. vLLM sends it between
processes as msgpack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_redis.integrations.vllm.tracing import Headers, RequestSpans
from lmcache_redis.metrics import SECONDS, Declared

# Label values of ``hit_tokens``.
TIERS: Final = ("host", "disk", "redis")

# By the names in ``ConnectorStats.data``.
DECLARED: Final = {
    name: Declared(kind, f"vllm_{name}", meaning, label, buckets=buckets)
    for name, kind, label, buckets, meaning in (
        ("hit_tokens", Counter, "tier", (), "prompt tokens to load, by the tier that had them"),
        (
            "lookup_seconds", Histogram, "", SECONDS,
            "from a lookup to its answer, as vLLM's steps see it; the request waits",
        ),
        ("loaded_chunks", Counter, "worker", (), "chunks loaded into the worker's blocks"),
        (
            "failed_chunks", Counter, "worker", (),
            "chunks whose load failed; vLLM computes their requests",
        ),
        ("stored_chunks", Counter, "worker", (), "chunks that the agent took"),
        ("dropped_chunks", Counter, "worker", (), "chunks that the agent did not take"),
        (
            "load_seconds", Histogram, "worker", SECONDS,
            "from a load to its end, as vLLM's steps see it; the request waits",
        ),
        (
            "store_seconds", Histogram, "worker", SECONDS,
            "for which a store held blocks, as vLLM's steps see it",
        ),
        (
            "registered", Gauge, "worker", (),
            "1: an agent has mapped the worker's KV cache; 0: nothing is cached. As of the last "
            "step",
        ),
    )
}  # fmt: skip


class ConnectorStats(KVConnectorStats):
    def reset(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Those of both: of other workers, of the scheduler, or of later."""
        data: dict[str, dict[str, Any]] = {name: dict(each) for name, each in self.data.items()}
        for name, values in other.data.items():
            merged = data.setdefault(name, {})
            for label, value in values.items():
                if label in merged and DECLARED[name].kind is not Gauge:
                    value = merged[label] + value
                merged[label] = value
        return ConnectorStats(data)

    def reduce(self) -> dict[str, int | float]:
        """The sums of the counters, under the names that vLLM prints."""
        return {
            f"lmcache_redis {name.replace('_', ' ')}": sum(values.values())
            for name, values in self.data.items()
            if DECLARED[name].kind is Counter
        }

    def is_empty(self) -> bool:
        return not self.data


class Recorder:
    """What one process has counted since the last `take`. spans: None where tracing is off."""

    def __init__(self, spans: RequestSpans | None = None) -> None:
        self._spans = spans
        self._data: dict[str, dict[str, Any]] = {}
        self._gauges: dict[tuple[str, str], float] = {}

    def count(self, name: str, n: int, label: str = "") -> None:
        if n:
            values = self._data.setdefault(name, {})
            values[label] = values.get(label, 0) + n

    def observe(self, name: str, value: float, label: str = "") -> None:
        self._data.setdefault(name, {}).setdefault(label, []).append(value)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Sets a gauge. It is reported when it has changed."""
        if self._gauges.get((name, label)) != value:
            self._gauges[name, label] = value
            self._data.setdefault(name, {})[label] = value

    def span(
        self,
        name: str,
        request_id: str,
        headers: Headers | None,
        began_s: float,
        attributes: Mapping[str, Any],
    ) -> None:
        """Makes a span that ends now, where tracing is on; see `RequestSpans.ended`."""
        if self._spans is not None:
            self._spans.ended(name, request_id, headers, began_s, attributes)

    def take(self) -> ConnectorStats | None:
        """What was counted since the last call; None if nothing was."""
        data, self._data = self._data, {}
        return ConnectorStats(data) if data else None
