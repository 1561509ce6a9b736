# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, registered with an agent: for `lookups`, `recovery` and `gpu`.

The paged KV cache is one allocation of random bytes, one layer per segment of a `Shape`. Stores
read one half of its blocks, loads write the other half.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.client.worker import StoreTransfer, TransferOp, WorkerClient
from lmcache_redis.device.shares import HeadShares, shares_of_rank
from lmcache_redis.errors import LMCacheRedisError
from testkit.agent import AgentServer

if TYPE_CHECKING:
    import torch

CHUNK_TOKENS = 256
_MODEL = "bench/engine"
_REGISTER_S = 90.0
_TRANSFER_S = 30.0
_POLL_S = 0.002
_LOG_TAIL_LINES = 8


class EngineFailed(LMCacheRedisError):
    """The agent failed, or did not answer, a request of the engine."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One worker's KV cache: ``segments`` pages in each block.

    shares: how many shares of heads its chunks are cut into; 0: none.
    """

    name: str
    segments: int
    page_bytes: int
    blocks_per_chunk: int
    shares: int = 0

    @property
    def chunk_bytes(self) -> int:
        return self.segments * self.page_bytes * self.blocks_per_chunk

    @property
    def block_tokens(self) -> int:
        return CHUNK_TOKENS // self.blocks_per_chunk


class Transfer(NamedTuple):
    """A store in flight, and when it began."""

    request_id: str
    hashes: list[bytes]
    store: StoreTransfer
    started_s: float


class Engine:
    """Scheduler and worker; registered on return.

    chunks: the number of chunks in each transfer. Raises EngineFailed, with the agent's log, if
    the agent does not map the memory.
    """

    def __init__(
        self, agent: AgentServer, shape: Shape, chunks: int, device: torch.device | None = None
    ) -> None:
        import torch

        self.shape = shape
        self.chunks = chunks
        self.device = device or torch.device("cpu")
        self.bytes_moved = chunks * shape.chunk_bytes
        self._numbers = 0
        half = chunks * shape.blocks_per_chunk
        heads = max(1, shape.shares)
        size = (shape.segments, 2 * half, heads, shape.page_bytes // heads)
        self.memory = torch.randint(0, 256, size, dtype=torch.uint8, device=self.device)
        order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(2)).tolist()
        self.source_blocks, self.target_blocks = order[:half], order[half:]
        names = [f"layer.{n}" for n in range(shape.segments)]
        ids: dict[str, Any] = {"engine_id": uuid.uuid4().hex}
        tokens = shape.block_tokens
        self.scheduler = SchedulerClient(agent.endpoint, _MODEL, 1, tokens, **ids)
        self.worker = WorkerClient(agent.endpoint, _MODEL, 1, 0, tokens, **ids)
        cut = None
        if shape.shares:
            every = shares_of_rank(heads, heads, 0, 1)
            cut = HeadShares(dict.fromkeys(names, 1), every, heads)
        tensors = dict(zip(names, self.memory, strict=True))
        try:
            self.worker.register_groups(
                [CacheGroup(tensors, "uint8", tokens, heads=cut)],
                num_blocks=2 * half,
                identity={},
                block_strides=dict.fromkeys(names, shape.page_bytes),
            )
            self.wait_registered(agent)
        except BaseException:
            self.close()
            raise

    def new_hashes(self) -> list[bytes]:
        """The names of the chunks of a new prompt."""
        self._numbers += 1
        prompt, chunks = self._numbers, range(self.chunks)
        return [hashlib.sha256(f"{prompt}/{chunk}".encode()).digest() for chunk in chunks]

    def begin_store(self) -> Transfer:
        """Starts a store of all source blocks under new names."""
        hashes = self.new_hashes()
        request_id = f"store-{self._numbers}"
        op = TransferOp(self.source_blocks, hashes)
        started_s = time.perf_counter()
        (store,) = self.worker.begin_stores([request_id], [op], self.worker.signal())
        return Transfer(request_id, hashes, store, started_s)

    def store_over(self, transfer: Transfer) -> bool:
        """Whether the store is over. Raises EngineFailed if chunks were dropped."""
        if not transfer.store.over:
            return False
        dropped = transfer.store.result.dropped
        if dropped:
            raise EngineFailed(f"{dropped} of {self.chunks} chunks were not stored")
        # A request that stores has a session too.
        self.scheduler.end_session(transfer.request_id)
        return True

    def store(self) -> tuple[float, list[bytes]]:
        """Seconds of a store of all chunks, until the host pool has them; and their hashes.

        A store is answered when its blocks have been read; a lookup waits for the rest of it.
        """
        transfer = self.begin_store()
        transfer.store.call.wait(_TRANSFER_S)
        if not self.store_over(transfer):
            raise EngineFailed("a store was not answered")
        request_id = f"{transfer.request_id}-there"
        self._look_up(request_id, transfer.hashes)
        seconds = time.perf_counter() - transfer.started_s
        self.scheduler.end_session(request_id)
        return seconds, transfer.hashes

    def retrieve(self, hashes: list[bytes]) -> float:
        """Seconds of a RETRIEVE of all chunks, which a lookup has pinned in the host pool."""
        self._numbers += 1
        request_id = f"retrieve-{self._numbers}"
        self._look_up(request_id, hashes)
        op = TransferOp(self.target_blocks, hashes)
        after = self.worker.signal()
        started_s = time.perf_counter()
        (retrieve,) = self.worker.begin_retrieves([request_id], [op], after)
        retrieve.call.wait(_TRANSFER_S)
        seconds = time.perf_counter() - started_s
        if not retrieve.over:
            raise EngineFailed("a retrieve was not answered")
        if failed := len(retrieve.failed_chunks):
            raise EngineFailed(f"{failed} of {self.chunks} chunks were not loaded")
        self.scheduler.end_session(request_id)
        return seconds

    def check(self) -> None:
        """Raises EngineFailed unless the target blocks hold what the source blocks hold."""
        import torch

        source = torch.tensor(self.source_blocks, device=self.device)
        target = torch.tensor(self.target_blocks, device=self.device)
        for number, layer in enumerate(self.memory):
            if not torch.equal(layer[source], layer[target]):
                raise EngineFailed(f"layer {number}: other bytes were loaded than were stored")

    def ask(self, request_id: str, hashes: list[bytes]) -> None:
        """Submits a lookup; returns at once."""
        self.scheduler.begin_lookup(request_id, hashes)

    def answer(self, request_id: str) -> int:
        """The tokens that a lookup found, as soon as it is answered."""
        tokens = None
        while tokens is None:
            tokens = self.scheduler.hit_tokens(request_id, wait_s=0.05)
        return tokens

    def lookup(self, hashes: list[bytes]) -> int:
        """One whole lookup, as vLLM's scheduler makes it: the tokens that it may load."""
        self._numbers += 1
        request_id = f"lookup-{self._numbers}"
        self.ask(request_id, hashes)
        tokens = self.answer(request_id)
        self.scheduler.end_session(request_id)
        return tokens

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _look_up(self, request_id: str, hashes: list[bytes]) -> None:
        self.ask(request_id, hashes)
        tokens = self.answer(request_id)
        if tokens != self.chunks * CHUNK_TOKENS:
            raise EngineFailed(f"a lookup found {tokens} of {self.chunks * CHUNK_TOKENS} tokens")

    def wait_registered(self, agent: AgentServer) -> None:
        deadline_s = time.monotonic() + _REGISTER_S
        while not (self.worker.ready and self.scheduler.link.online):
            log = agent.log_path.read_text(errors="replace").splitlines()
            refused = [line for line in log if "refused the KV cache" in line]
            if refused or time.monotonic() > deadline_s:
                tail = "\n".join(refused or log[-_LOG_TAIL_LINES:])
                raise EngineFailed(f"the agent did not map the engine's KV cache:\n{tail}")
            time.sleep(_POLL_S)
