"""One store or retrieve of a worker, from its submission until its blocks are released."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_redis import messages as m
from lmcache_redis.client.calls import Call, CallState
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.ownership import retrieve_released, store_released
from lmcache_redis.processes import has_ended, is_running


class InterprocessEvent(Protocol):
    """A ``torch.cuda.Event(interprocess=True)`` that has been recorded."""

    def ipc_handle(self) -> bytes:
        """The handle by which another process opens it."""


class AgentProcess:
    """The process of the agent that sent a WELCOME.

    visible: whether it can be seen in ``/proc``, checked at once, while it is surely alive. In
        another PID namespace it cannot; then its absence proves nothing.
    """

    def __init__(self, welcome: m.Welcome) -> None:
        self._identity = (welcome.agent_pid, welcome.agent_start_time)
        self.visible = is_running(*self._identity)

    def has_ended(self) -> bool:
        """Whether the process is known to have ended."""
        return self.visible and has_ended(*self._identity)


@dataclass(slots=True, eq=False)
class Transfer:
    """An operation, the call that carries it, and its deadline.

    lease_ns: on CLOCK_MONOTONIC. blocks_per_chunk: positive. agent: None if there was none.
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
        """Number of chunks."""
        return len(self.op) // self.blocks_per_chunk

    def agent_ended(self) -> bool:
        """Whether the agent's process is known to have ended."""
        return self.agent is not None and self.agent.has_ended()


@dataclass(slots=True, eq=False)
class Store(Transfer):
    """The agent reads the blocks."""

    @property
    def over(self) -> bool:
        """Whether the agent no longer needs the blocks."""
        return store_released(
            self.call.state,
            sent=self.call.sent,
            now_ns=time.monotonic_ns(),
            lease_ns=self.lease_ns,
            agent_ended=self.agent_ended,
        )

    @property
    def result(self) -> m.StoreResult:
        """The agent's answer; without one, all chunks count as dropped."""
        answer = self.call.answer
        return answer if isinstance(answer, m.StoreResult) else m.StoreResult(0, 0, 0, self.chunks)


@dataclass(slots=True, eq=False)
class Retrieve(Transfer):
    """The agent writes the blocks, except the first ``skip_blocks``.

    remapped: whether the agent has mapped the engine's memory again since the call.
    """

    skip_blocks: int
    remapped: Callable[[], bool]

    @property
    def over(self) -> bool:
        """Whether the agent can no longer write to the blocks."""
        return retrieve_released(
            self.call.state,
            sent=self.call.sent,
            remapped=self.remapped(),
            agent_ended=self.agent_ended,
        )

    @property
    def given_up(self) -> bool:
        """Whether the load counts as failed, although its blocks may still be written."""
        if self.call.state is CallState.PENDING:
            return time.monotonic_ns() > self.lease_ns
        return self.call.state is CallState.LOST

    @property
    def failed_chunks(self) -> Sequence[int]:
        """Indices of the operation's chunks that were not loaded."""
        answer = self.call.answer
        if not isinstance(answer, m.RetrieveResult):
            return range(self.chunks)
        return [index for index in answer.failed_chunks if index < self.chunks]

    @property
    def failed_blocks(self) -> set[int]:
        """Ids of the blocks that were to be written and were not."""
        return {
            self.op.block_ids[block]
            for index in self.failed_chunks
            for block in range(
                max(self.skip_blocks, index * self.blocks_per_chunk),
                (index + 1) * self.blocks_per_chunk,
            )
        }
