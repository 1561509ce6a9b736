"""The connector's figures for vLLM's own logging."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

NAMES = ("loaded_chunks", "failed_chunks", "stored_chunks", "dropped_chunks")


class ConnectorStats(KVConnectorStats):
    """Chunks loaded, failed to load, stored and dropped since the last report."""

    def reset(self) -> None:
        """All figures back to zero."""
        self.data = dict.fromkeys(NAMES, 0)

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """The sum of both."""
        return ConnectorStats({n: self._figure(n) + other.data.get(n, 0) for n in NAMES})

    def reduce(self) -> dict[str, int | float]:
        """The figures as vLLM prints them."""
        return {f"lmcache_redis {n.replace('_', ' ')}": self._figure(n) for n in NAMES}

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data.values())

    def _figure(self, name: str) -> int:
        figures: dict[str, Any] = self.data
        return int(figures.get(name, 0))
