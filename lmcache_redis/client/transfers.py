"""Stores and retrieves: blocks and the chunks that they hold, and when the blocks are free again.

The engine may reuse the blocks of a store or retrieve when it is ``over``. The docstring of
`messages` gives the reasons (Leases). A call that never reached the agent (LOST, not ``sent``)
holds no blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from lmcache_redis import messages as m
from lmcache_redis.chunks.keys import IPCCacheEngineKey
from lmcache_redis.chunks.names import FULL_REACH, Reach
from lmcache_redis.client.link import Call, CallState
from lmcache_redis.processes import has_ended, is_running

if TYPE_CHECKING:
    import torch

STORE_LEASE_S = 1.5
# A store from a GPU waits for the queued work of that GPU: the step that computes the blocks.
STEP_S = 5.0
# A retrieve also has the time that its bytes take at this rate: the agent may have to load them.
RETRIEVE_LEASE_S = 5.0
LEAST_RETRIEVE_RATE = 100e6


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
class LoadStoreOp:
    """Parts of chunks of one request, and the blocks to store or to load them.

    Exactly one of ``token_ids``, ``block_hashes`` and ``chunk_hashes`` is given. The first fields
    are in the order of LMCache's class of the same name.

    block_ids: ids of paged blocks in token order, equally many for each chunk: all of its blocks,
        or the last ones if the group's parts hold no more (`Reach.blocks_per_part`).
    token_ids: all tokens of the request up to ``end``, or more (token mode). The blocks hold those
        of ``[start, end)``, by default none.
    block_hashes: the engine's hash of each of these blocks (hash mode).
    chunk_hashes: the name of each chunk, instead of the hash of each block.
    skip_first_n_tokens: a load does not write the first blocks, those of so many tokens, because
        other requests may be reading them.
    group: the number of the group that the blocks belong to.

    Only whole chunks are stored and loaded; hashes and tokens may begin or end within one.
    Raises TypeError for hashes in place of token ids or the reverse, ValueError for inconsistent
    arguments.
    """

    block_ids: Sequence[int]
    token_ids: Sequence[int] | None = None
    block_hashes: Sequence[bytes] | None = None
    start: int = 0
    end: int = 0
    _: KW_ONLY
    chunk_hashes: Sequence[bytes] | None = None
    skip_first_n_tokens: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        if self.chunk_hashes is not None:
            check_names(self.token_ids, self.block_hashes or self.chunk_hashes)
            if len(self.block_ids) % max(1, len(self.chunk_hashes)):
                raise ValueError(
                    f"{len(self.block_ids)} blocks do not divide among {len(self.chunk_hashes)} "
                    "chunks"
                )
            return
        check_names(self.token_ids, self.block_hashes)
        if self.block_hashes is not None and len(self.block_hashes) != len(self.block_ids):
            raise ValueError(
                f"{len(self.block_hashes)} block hashes for {len(self.block_ids)} blocks"
            )
        if self.token_ids is not None and not 0 <= self.start <= self.end <= len(self.token_ids):
            raise ValueError(
                f"tokens {self.start} to {self.end} of {len(self.token_ids)}: in token mode, start "
                "and end say which tokens the blocks hold"
            )

    def __len__(self) -> int:
        return len(self.block_ids)

    def whole_chunks(self, blocks_per_chunk: int, block_tokens: int) -> LoadStoreOp:
        """The operation without parts of chunks at its ends. Chunks that are named are whole.

        Unchanged if the chunk size is not known (0), or if the number of blocks leaves open which
        tokens they hold: the agent refuses such an operation.
        """
        count = len(self.block_ids)
        if self.chunk_hashes is not None or not blocks_per_chunk:
            return self
        if self.block_hashes is not None:
            kept = count - count % blocks_per_chunk
            if kept == count:
                return self
            return replace(
                self, block_ids=self.block_ids[:kept], block_hashes=self.block_hashes[:kept]
            )
        chunk_tokens = blocks_per_chunk * block_tokens
        start, end = -(-self.start // chunk_tokens), self.end // chunk_tokens
        if start >= end:
            return replace(self, block_ids=(), start=0, end=0)
        before = self.start // block_tokens
        first, last = start * blocks_per_chunk - before, end * blocks_per_chunk - before
        most = -(-self.end // block_tokens) - before
        # Where the first block begins within the tokens, a block at the end may be left out.
        least = most if self.start % block_tokens else last
        if not least <= count <= most:
            return self
        return replace(
            self,
            block_ids=self.block_ids[first:last],
            start=start * chunk_tokens,
            end=end * chunk_tokens,
            skip_first_n_tokens=max(0, self.skip_first_n_tokens - first * block_tokens),
        )

    def share(self, number: int, of: int) -> LoadStoreOp:
        """What replica ``number`` stores, if ``of`` replicas share the chunks between them.

        Every chunk belongs to one of them, by its hash; all chunks if they are not named so.
        """
        if of == 1 or self.chunk_hashes is None:
            return self
        per_chunk = len(self.block_ids) // max(1, len(self.chunk_hashes))
        mine = [n for n, name in enumerate(self.chunk_hashes) if name[-1] % of == number]
        return replace(
            self,
            block_ids=[
                block for n in mine for block in self.block_ids[n * per_chunk : (n + 1) * per_chunk]
            ],
            chunk_hashes=[self.chunk_hashes[n] for n in mine],
        )


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
    left_out: blocks that the engine asked for, and that are in no whole chunk.
    """

    skip_blocks: int
    remapped: Callable[[], bool]
    left_out: Collection[int] = ()

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
        }.union(self.left_out)


def check_names(
    token_ids: Sequence[int] | None,
    block_hashes: Sequence[bytes] | None,
    cache_salt: str | bytes = "",
) -> None:
    """Checks that exactly one of both is given, of the right type, and a salt only with token ids.

    Raises TypeError or ValueError.
    """
    if (block_hashes is None) == (token_ids is None):
        raise ValueError("give exactly one of block_hashes and token_ids")
    if not isinstance(cache_salt, (str, bytes)):
        raise TypeError(f"a cache_salt is text or bytes, not {type(cache_salt).__name__}")
    if block_hashes is not None:
        if cache_salt:
            raise ValueError("block hashes cover the salt: a cache_salt is for token_ids")
        # Only the first is checked: there may be thousands, and the agent checks each.
        if len(block_hashes) and not isinstance(block_hashes[0], bytes):
            raise TypeError(
                f"a block hash is bytes, not {type(block_hashes[0]).__name__}: "
                "pass token ids as token_ids"
            )
    elif token_ids is not None and len(token_ids) and isinstance(token_ids[0], bytes):
        raise TypeError("a token id is an int, not bytes: pass hashes as block_hashes")


def chunk_names(
    model_name: str,
    world_size: int,
    request_id: str,
    *,
    blocks_per_chunk: int,
    block_hashes: Sequence[bytes] | None = None,
    token_ids: Sequence[int] | None = None,
    start: int = 0,
    end: int = 0,
    worker_id: int | None = None,
    cache_salt: str | bytes = "",
) -> m.ChunkNames:
    """The names of the whole chunks among ``block_hashes``, or of ``token_ids[start:end]``.

    A chunk is named by the hash of its last block: block hashes are chained, so that hash covers
    every token before it. The agent hashes ``cache_salt`` (text as UTF-8), then the token ids. If
    ``blocks_per_chunk`` is 0 there are no chunks. Raises as `check_names` does, and FormatError for
    a salt of more than 4,096 bytes.
    """
    check_names(token_ids, block_hashes, cache_salt)
    if not blocks_per_chunk:
        return m.ChunkNames()
    if block_hashes is not None:
        return m.ChunkNames(tuple(block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]))
    assert token_ids is not None
    if end <= start:
        return m.ChunkNames()
    return m.ChunkNames(
        tokens=IPCCacheEngineKey(
            model_name=model_name,
            world_size=world_size,
            worker_id=worker_id,
            token_ids=tuple(token_ids[:end]),
            start=start,
            end=end,
            request_id=request_id,
            salt=cache_salt.encode() if isinstance(cache_salt, str) else cache_salt,
        )
    )
