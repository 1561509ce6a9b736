"""One store or retrieve of a worker, from its submission until its blocks are free again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_redis import messages as m
from lmcache_redis.client.link import Call, CallState
from lmcache_redis.client.liveness import AgentProcess, ProcessState
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.ownership import Blocks, retrieve_blocks, store_blocks


class InterprocessEvent(Protocol):
    """A ``torch.cuda.Event(interprocess=True)`` that has been recorded."""

    def ipc_handle(self) -> bytes:
        """The handle another process opens it by."""


@dataclass(slots=True, eq=False)
class Transfer:
    """What was asked, of whom, and until when.

    lease_ns: on CLOCK_MONOTONIC. blocks_per_chunk: positive. agent: None where there was none.
    event: kept alive until the agent has waited for it.
    """

    call: Call
    op: LoadStoreOp
    lease_ns: int
    blocks_per_chunk: int
    agent: AgentProcess | None
    event: InterprocessEvent | None

    @property
    def chunks(self) -> int:
        """Chunks of the operation."""
        return len(self.op) // self.blocks_per_chunk

    def agent_state(self) -> ProcessState:
        """What the agent's process is doing now."""
        return ProcessState.UNKNOWN if self.agent is None else self.agent.state()


@dataclass(slots=True, eq=False)
class Store(Transfer):
    """Blocks that the agent reads."""

    @property
    def over(self) -> bool:
        """Whether the agent no longer needs the blocks."""
        blocks = store_blocks(
            self.call.state,
            sent=self.call.sent,
            now_ns=time.monotonic_ns(),
            lease_ns=self.lease_ns,
            agent=self.agent_state,
        )
        return blocks is not Blocks.HELD

    @property
    def result(self) -> m.StoreResult:
        """What became of the chunks; all are dropped where there was no answer."""
        answer = self.call.answer
        return answer if isinstance(answer, m.StoreResult) else m.StoreResult(0, 0, 0, self.chunks)


@dataclass(slots=True, eq=False)
class Retrieve(Transfer):
    """Blocks that the agent writes, but for the first ``skip_blocks``.

    remapped: whether the agent has mapped the engine's memory again since.
    """

    skip_blocks: int
    remapped: Callable[[], bool]

    @property
    def over(self) -> bool:
        """Whether the agent will not touch the blocks any more."""
        blocks = retrieve_blocks(
            self.call.state, sent=self.call.sent, remapped=self.remapped(), agent=self.agent_state
        )
        return blocks is not Blocks.HELD

    @property
    def given_up(self) -> bool:
        """Whether the load counts as failed already, although its blocks may yet be written."""
        if self.call.state is CallState.PENDING:
            return time.monotonic_ns() > self.lease_ns
        return self.call.state is CallState.LOST

    @property
    def failed_chunks(self) -> Sequence[int]:
        """Chunks, by their place in the operation, whose blocks do not hold them."""
        answer = self.call.answer
        if not isinstance(answer, m.RetrieveResult):
            return range(self.chunks)
        return [chunk for chunk in answer.failed_chunks if chunk < self.chunks]

    @property
    def failed_blocks(self) -> set[int]:
        """Ids of blocks that were to be written and do not hold what they should."""
        return {
            self.op.block_ids[block]
            for chunk in self.failed_chunks
            for block in range(
                max(self.skip_blocks, chunk * self.blocks_per_chunk),
                (chunk + 1) * self.blocks_per_chunk,
            )
        }
