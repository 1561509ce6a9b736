"""What the two halves of the connector tell each other through vLLM, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from lmcache_redis.client.operations import LoadStoreOp


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers.

    loads, stores: what to begin in this step, by request.
    preempted: requests whose blocks are reused from this step on.
    held: finished requests whose blocks the scheduler holds until their stores are reported.
    idle: the step runs no model, so waiting a moment costs nobody anything.
    """

    loads: list[tuple[str, LoadStoreOp]] = field(default_factory=list)
    stores: list[tuple[str, LoadStoreOp]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    idle: bool = False


@dataclass
class CompletedStores(KVConnectorWorkerMetadata):
    """Workers to scheduler: how many stores of each request are over, summed over workers.

    dropped: some of their chunks were not taken by the agent.
    """

    counts: dict[str, int]
    dropped: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> CompletedStores:
        """The sum of both."""
        assert isinstance(other, CompletedStores)
        counts = dict(self.counts)
        for request_id, count in other.counts.items():
            counts[request_id] = counts.get(request_id, 0) + count
        return CompletedStores(counts, self.dropped or other.dropped)
