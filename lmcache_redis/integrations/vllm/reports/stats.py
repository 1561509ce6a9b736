"""Counts since the last report, from the connector to vLLM's log and /metrics.

``data`` has a mapping for each family: from the value of its label ("" if it has none) to a count,
to the list of what was observed, or to a gauge's value. vLLM sends it between processes as msgpack.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_redis.integrations.vllm.reports.families import KINDS


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
