"""Stores and retrieves: blocks and the chunks that they hold, and when the blocks are free again.

The engine may reuse the blocks of a store or retrieve when it is ``over``. The docstring of
`messages` gives the reasons (Leases). A call that never reached the agent (LOST, not ``sent``)
holds no blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmcache_redis import messages as m
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.link import AgentCall, CallState
from lmcache_redis.processes import has_ended, is_running

if TYPE_CHECKING:
    import torch

STORE_LEASE_S = 1.5
# A store from a GPU waits for the queued work of that GPU: the step that computes the blocks.
STEP_S = 5.0
# A retrieve also has the time that its bytes take at this rate: the agent may have to load them.
RETRIEVE_LEASE_S = 5.0
LEAST_RETRIEVE_RATE = 100e6
# In the place of a ticket that could not be recorded: what comes after it is lost at once.
NEVER = 0


@dataclass(frozen=True)
class CacheGroup:
    """The KV cache of one group of a worker's layers, which share their block ids.

    tensors: by name, in the order of a chunk's part. Each has a dimension that counts blocks.
    dtype: the name of the elements' type.
    block_size_tokens: tokens of one block; the chunk size is a multiple of it.
    reach: which parts of a prefix the engine needs after it.
    identity: what decides the bytes of this group's parts and not of the others.
    shard: number of this worker's share of the group's bytes, and how many shares there are; None:
        every worker has its own. Workers with equal shares hold equal bytes.
    replica: number of this worker among those with equal shares, and how many they are.
    """

    tensors: Mapping[str, torch.Tensor]
    dtype: str
    block_size_tokens: int
    reach: Reach = FULL_REACH
    identity: Mapping[str, str] = field(default_factory=dict)
    shard: tuple[int, int] | None = None
    replica: tuple[int, int] = (0, 1)


@dataclass(frozen=True)
class TransferOp:
    """Parts of chunks of one request, and the blocks to store or to load them.

    block_ids: ids of paged blocks in token order, equally many for each chunk: all of its blocks,
        or the last ones if the group's parts hold no more (`Reach.blocks_per_part`).
    skip_first_n_tokens: a load does not write the first blocks, those of this many tokens, because
        other requests may be reading them.

    Raises TypeError for hashes that are no bytes, ValueError for blocks that do not divide among
    the chunks.
    """

    block_ids: Sequence[int]
    hashes: Sequence[bytes]
    skip_first_n_tokens: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        # Only the first is checked: there may be thousands, and the agent checks each.
        if len(self.hashes) and not isinstance(self.hashes[0], bytes):
            raise TypeError(f"a chunk hash is bytes, not {type(self.hashes[0]).__name__}")
        blocks, chunks = len(self.block_ids), len(self.hashes)
        if blocks % chunks if chunks else blocks:
            raise ValueError(f"{blocks} blocks do not divide among {chunks} chunks")

    def __len__(self) -> int:
        return len(self.block_ids)

    @property
    def blocks_per_part(self) -> int:
        """Blocks of each chunk's part; 1 for an operation without chunks."""
        return max(1, len(self.block_ids) // max(1, len(self.hashes)))

    def share(self, number: int, of: int) -> TransferOp:
        """What replica ``number`` stores of ``of``: every chunk belongs to one, by its hash."""
        if of == 1:
            return self
        size = self.blocks_per_part
        mine = [n for n, name in enumerate(self.hashes) if name[-1] % of == number]
        return replace(
            self,
            block_ids=[block for n in mine for block in self.block_ids[n * size : (n + 1) * size]],
            hashes=[self.hashes[n] for n in mine],
        )


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
class BlockTransfer:
    """An operation, the call that carries it, and its deadline.

    lease_ns: on CLOCK_MONOTONIC. agent: None if there was none.
    """

    call: AgentCall
    op: TransferOp
    lease_ns: int
    agent: AgentProcess | None

    @property
    def chunks(self) -> int:
        return len(self.op.hashes)

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
class StoreTransfer(BlockTransfer):
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
class RetrieveTransfer(BlockTransfer):
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
        size = self.op.blocks_per_part
        return {
            self.op.block_ids[block]
            for index in self.failed_chunks
            for block in range(max(self.skip_blocks, index * size), (index + 1) * size)
        }
