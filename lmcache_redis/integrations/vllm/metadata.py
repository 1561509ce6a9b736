"""What the connector's scheduler and workers exchange through vLLM, once per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_redis.client.operations import LoadStoreOp

STATS = ("loaded_chunks", "failed_chunks", "stored_chunks", "dropped_chunks")


class Planned(NamedTuple):
    """A load or a store that every worker starts. A ``transfer_id`` is never reused."""

    transfer_id: int
    request_id: str
    op: LoadStoreOp


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    loads, stores: to start in this step.
    lost_loads: block ids, by request, of loads that vLLM waits for and that were never planned
        because the scheduler failed. Workers report them as failed.
    idle: the step runs no model, so that a short wait delays no computation.
    """

    loads: list[Planned] = field(default_factory=list)
    stores: list[Planned] = field(default_factory=list)
    lost_loads: dict[str, list[int]] = field(default_factory=dict)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    ended: by rank, the transfers whose blocks it no longer touches.
    dropped: the agent did not accept all chunks of a store.
    broken: ranks whose worker failed; True if none of their transfers touches a block any more.
    """

    ended: Mapping[int, list[int]]
    dropped: bool = False
    broken: Mapping[int, bool] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """The reports of two ranks in one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            {**self.ended, **other.ended},
            self.dropped or other.dropped,
            {**self.broken, **other.broken},
        )


class ConnectorStats(KVConnectorStats):
    """Counts of ``STATS`` since the last report, for vLLM's own log."""

    def reset(self) -> None:
        """Sets all counts to zero."""
        self.data = dict.fromkeys(STATS, 0)

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        """The sum of both."""
        return ConnectorStats({n: self._count(n) + other.data.get(n, 0) for n in STATS})

    def reduce(self) -> dict[str, int | float]:
        """The counts under the names that vLLM prints."""
        return {f"lmcache_redis {n.replace('_', ' ')}": self._count(n) for n in STATS}

    def is_empty(self) -> bool:
        """Whether all counts are zero."""
        return not any(self.data.values())

    def _count(self, name: str) -> int:
        data: dict[str, Any] = self.data
        return int(data.get(name, 0))
