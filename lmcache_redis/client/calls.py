"""Calls to the agent, and the stores and retrieves that they carry.

The engine may reuse the blocks of a store or retrieve when it is ``over``:

- A store reads. The agent discards what it reads after the lease. So the blocks are free when the
  agent has answered, when the lease has expired, or when the agent's process has ended.
- A retrieve writes, and a write cannot be undone. So the blocks are free when the agent has
  answered, when its process has ended, or when it has closed the mapping that the retrieve writes
  through. The agent reports that by mapping the engine's memory again (`RegisterKVCache`), which it
  does only after the copies through the old mapping have ended. While the agent is frozen, the
  blocks stay held.

A call that never reached the agent (LOST, not ``sent``) holds no blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lmcache_redis import messages as m
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.processes import has_ended, is_running

STORE_LEASE_S = 1.5
# A store from a GPU waits for the queued work of that GPU: the step that computes the blocks.
STEP_S = 5.0
# A retrieve also has the time that its bytes take at this rate: the agent may have to load them.
RETRIEVE_LEASE_S = 5.0
LEAST_RETRIEVE_RATE = 100e6


class CallState(Enum):
    """PENDING until the answer arrives or the agent is lost; LOST calls are never answered."""

    PENDING = "pending"
    ANSWERED = "answered"
    LOST = "lost"


class Call:
    """One message to the agent, from its submission to its answer.

    changed: the condition that is notified when the call ends.
    listener: called with the call when it ends, on the thread that ends it.
    """

    __slots__ = ("_changed", "_listener", "answer", "call_id", "sent", "state")

    def __init__(
        self, call_id: int, changed: threading.Condition, listener: Callable[[Call], None] | None
    ) -> None:
        self.call_id = call_id
        self.state = CallState.PENDING
        self.answer: m.Answer | None = None
        self.sent = False  # whether the agent may have received the message
        self._changed = changed
        self._listener = listener

    @property
    def done(self) -> bool:
        return self.state is not CallState.PENDING

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most ``timeout_s``; returns ``done``."""
        if not self.done and timeout_s > 0:
            with self._changed:
                self._changed.wait_for(lambda: self.done, timeout_s)
        return self.done

    def end(self, answer: m.Answer | None) -> None:
        """Ends the call: ANSWERED with an answer, LOST with None. Only the link does this."""
        with self._changed:
            self.answer = answer
            self.state = CallState.LOST if answer is None else CallState.ANSWERED
        try:
            if self._listener is not None:
                self._listener(self)
        finally:
            # Last, for those who wait for what the listener changes.
            with self._changed:
                self._changed.notify_all()


class InterprocessEvent(Protocol):
    """A ``torch.cuda.Event(interprocess=True)`` that has been recorded."""

    def ipc_handle(self) -> bytes:
        """The handle by which another process opens it."""

    def synchronize(self) -> None:
        """Waits until the work before it has ended."""


class AgentProcess:
    """The process of the agent that sent a WELCOME.

    visible: whether ``/proc`` shows it, checked at once, while it is certainly alive. A process in
        another PID namespace is not visible, so its absence proves nothing.
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

    lease_ns: on CLOCK_MONOTONIC. blocks_per_part: positive. agent: None if there was none.
    event: kept alive until the agent has waited for it.
    """

    call: Call
    op: LoadStoreOp
    lease_ns: int
    blocks_per_part: int
    agent: AgentProcess | None
    event: InterprocessEvent | None

    @property
    def chunks(self) -> int:
        return len(self.op) // self.blocks_per_part

    @property
    def answered(self) -> bool:
        return self.call.state is CallState.ANSWERED

    @property
    def abandoned(self) -> bool:
        """Whether the call is lost and no agent can be executing it."""
        if self.call.state is not CallState.LOST:
            return False
        return not self.call.sent or (self.agent is not None and self.agent.has_ended())


@dataclass(slots=True, eq=False)
class Store(Transfer):
    """The agent reads the blocks."""

    @property
    def over(self) -> bool:
        """Whether the agent no longer needs the blocks."""
        return self.answered or time.monotonic_ns() > self.lease_ns or self.abandoned

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
        lost_mapping = self.call.state is CallState.LOST and self.remapped()
        return self.answered or lost_mapping or self.abandoned

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
        """Ids of the blocks that the retrieve should have written and did not."""
        return {
            self.op.block_ids[block]
            for index in self.failed_chunks
            for block in range(
                max(self.skip_blocks, index * self.blocks_per_part),
                (index + 1) * self.blocks_per_part,
            )
        }
