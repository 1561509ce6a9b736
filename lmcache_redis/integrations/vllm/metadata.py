"""What the two halves of the connector tell each other through vLLM, once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_redis.client.operations import LoadStoreOp


class Planned(NamedTuple):
    """A load or a store that every worker is to begin. ``transfer_id`` is never used again."""

    transfer_id: int
    request_id: str
    op: LoadStoreOp


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    loads, stores: what to begin in this step.
    lost_loads: loads that vLLM waits for and that were never planned, because the scheduler half
        broke; by request, the ids of their blocks. Workers report them as failed.
    idle: the step runs no model, so waiting a moment costs nobody anything.
    """

    loads: list[Planned] = field(default_factory=list)
    stores: list[Planned] = field(default_factory=list)
    lost_loads: dict[str, list[int]] = field(default_factory=dict)
    idle: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    ended: by rank, transfers whose blocks it will not touch any more.
    dropped: chunks of a store were not taken by the agent.
    broken: ranks whose worker half failed; True: none of their transfers touches a block any more.
    """

    ended: Mapping[int, list[int]]
    dropped: bool = False
    broken: Mapping[int, bool] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both ranks' reports in one."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            {**self.ended, **other.ended},
            self.dropped or other.dropped,
            {**self.broken, **other.broken},
        )
