"""The metrics that the connector adds to vLLM's own, and the counts that vLLM carries to them.

``ConnectorStats.data`` has a mapping for each family: from the value of its label ("" if it has
none) to a count, to the list of what was observed, or to a gauge's value. vLLM sends it between
processes as msgpack.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_redis.metrics.exporter import Family

PREFIX: Final = "vllm_"
# Label values of ``hit_tokens``.
TIERS: Final = ("host", "disk", "redis")

_WORKER = ("worker",)

FAMILIES: Final = (
    Family(
        "vllm_hit_tokens",
        "counter",
        "prompt tokens to load, by the tier that had them",
        ("tier",),
    ),
    Family(
        "vllm_lookup_seconds",
        "histogram",
        "from a lookup to its answer, as vLLM's steps see it; the request waits",
        high="as `lookup_seconds` of the agent",
    ),
    Family("vllm_loaded_chunks", "counter", "chunks loaded into the worker's blocks", _WORKER),
    Family(
        "vllm_failed_chunks",
        "counter",
        "chunks whose load failed; vLLM computes their requests",
        _WORKER,
        "the agent was lost, or chunks were gone between lookup and load: see the agent's log",
    ),
    Family("vllm_stored_chunks", "counter", "chunks that the agent took", _WORKER),
    Family(
        "vllm_dropped_chunks",
        "counter",
        "chunks that the agent did not take",
        _WORKER,
        "`dropped_chunks` of the agent says why",
    ),
    Family(
        "vllm_load_seconds",
        "histogram",
        "from a load to its end, as vLLM's steps see it; the request waits",
        _WORKER,
        "as `retrieve_seconds` of the agent",
    ),
    Family(
        "vllm_store_seconds",
        "histogram",
        "for which a store held blocks, as vLLM's steps see it",
        _WORKER,
        "as `store_seconds` of the agent",
    ),
    Family(
        "vllm_registered",
        "gauge",
        "1: an agent has mapped the worker's KV cache; 0: nothing is cached. As of the last step",
        _WORKER,
    ),
)

# By the names in ``ConnectorStats.data``.
KINDS: Final = MappingProxyType({each.name.removeprefix(PREFIX): each.kind for each in FAMILIES})


class ConnectorStats(KVConnectorStats):
    """See the module."""

    def reset(self) -> None:
        self.data: dict[str, dict[str, Any]] = {}

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """Those of both: of other workers, of the scheduler, or of later."""
        data: dict[str, dict[str, Any]] = {name: dict(each) for name, each in self.data.items()}
        for name, values in other.data.items():
            merged = data.setdefault(name, {})
            for label, value in values.items():
                if label in merged and KINDS[name] != "gauge":
                    value = merged[label] + value
                merged[label] = value
        return ConnectorStats(data)

    def reduce(self) -> dict[str, int | float]:
        """The sums of the counters, under the names that vLLM prints."""
        return {
            f"lmcache_redis {name.replace('_', ' ')}": sum(values.values())
            for name, values in self.data.items()
            if KINDS[name] == "counter"
        }

    def is_empty(self) -> bool:
        return not self.data


class Recorder:
    """What one process has counted since the last `take`."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, Any]] = {}
        self._gauges: dict[tuple[str, str], float] = {}

    def count(self, name: str, n: int, label: str = "") -> None:
        """Adds ``n`` to a counter."""
        if n:
            values = self._data.setdefault(name, {})
            values[label] = values.get(label, 0) + n

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Adds a value to a histogram."""
        self._data.setdefault(name, {}).setdefault(label, []).append(value)

    def set(self, name: str, value: float, label: str = "") -> None:
        """Sets a gauge. It is reported when it has changed."""
        if self._gauges.get((name, label)) != value:
            self._gauges[name, label] = value
            self._data.setdefault(name, {})[label] = value

    def take(self) -> ConnectorStats | None:
        """What was counted since the last call; None if nothing was."""
        data, self._data = self._data, {}
        return ConnectorStats(data) if data else None
