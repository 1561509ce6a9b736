"""An engine without a model, registered with an agent beside it.

The paged KV cache is one allocation of random bytes, a layer each segment of a `Shape`. Half of
its blocks are stored from, the other half is loaded into.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache_redis.bench.agent import AgentServer
from lmcache_redis.bench.gpu.shapes import CHUNK_TOKENS, Shape
from lmcache_redis.bench.plane.server import own_server
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.client.transfers import Store
from lmcache_redis.client.worker import WorkerClient
from lmcache_redis.errors import ConfigError, LMCacheRedisError

if TYPE_CHECKING:
    import torch

_MODEL = "bench/gpu"
_NOBODY_URL = "redis://127.0.0.1:9"  # the discard port: refused at once
_REGISTER_S = 90.0
_TRANSFER_S = 30.0
_POLL_S = 0.002
_SLACK_BYTES = 256 << 20
_LOG_TAIL_LINES = 8


class EngineFailed(LMCacheRedisError):
    """A transfer of the stand-in engine did not do what it was to do."""


@contextlib.contextmanager
def engine_beside_agent(
    shape: Shape, chunks: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[Engine]:
    """An engine of ``shape`` that moves ``chunks`` at a time, and its agent; ended on exit.

    The agent writes nothing to Redis, which is not what is measured; where no server can be
    started it runs without one. Its host pool takes what two rounds store.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            url = stack.enter_context(own_server())
        except ConfigError as error:
            url = _NOBODY_URL
            say(f"the agent runs without a Redis: {error}")
        log = directory / "agent.log"
        agent = stack.enter_context(
            AgentServer(
                f"ipc://{directory}/agent.sock",
                url,
                log,
                pool_bytes=2 * chunks * shape.chunk_bytes + _SLACK_BYTES,
                chunk_size_tokens=CHUNK_TOKENS,
                write_queue_bytes=0,
            )
        )
        engine = stack.enter_context(contextlib.closing(Engine(agent, shape, chunks, device)))
        engine.wait_until_registered(log)
        yield engine


class Engine:
    """Both halves of an engine: it stores from one half of its blocks and loads into the other."""

    def __init__(self, agent: AgentServer, shape: Shape, chunks: int, device: torch.device) -> None:
        import torch

        self.shape = shape
        self.chunks = chunks
        self.device = device
        self.bytes_moved = chunks * shape.chunk_bytes
        self._numbers = 0
        half = chunks * shape.blocks_per_chunk
        self.memory = torch.randint(
            0, 256, (shape.segments, 2 * half, shape.page_bytes), dtype=torch.uint8, device=device
        )
        order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(2)).tolist()
        self.source_blocks, self.target_blocks = order[:half], order[half:]
        names = [f"layer.{n}" for n in range(shape.segments)]
        engine_id = uuid.uuid4().hex
        common: dict[str, Any] = {"engine_id": engine_id}
        self.scheduler = LMCacheMPSchedulerAdapter(
            agent.endpoint, _MODEL, 1, shape.block_tokens, **common
        )
        self.worker = WorkerClient(agent.endpoint, _MODEL, 1, 0, shape.block_tokens, **common)
        try:
            self.worker.register_kv_caches(
                dict(zip(names, self.memory, strict=True)),
                num_blocks=2 * half,
                dtype="uint8",
                identity={},
                block_strides=dict.fromkeys(names, shape.page_bytes),
            )
        except BaseException:
            self.close()
            raise

    def wait_until_registered(self, log: Path) -> None:
        """Raises EngineFailed, with what the agent says, where it does not map the memory."""
        deadline_s = time.monotonic() + _REGISTER_S
        while not (self.worker.ready and self.scheduler.link.online):
            said = log.read_text(errors="replace").splitlines()
            refused = [line for line in said if "refused the KV cache" in line]
            if refused or time.monotonic() > deadline_s:
                tail = "\n".join(refused or said[-_LOG_TAIL_LINES:])
                raise EngineFailed(f"the agent did not map the engine's KV cache:\n{tail}")
            time.sleep(_POLL_S)

    def begin_store(self) -> Transfer:
        """Has all source blocks stored under new names; returns at once."""
        self._numbers += 1
        hashes = [
            hashlib.sha256(f"{self._numbers}/{block}".encode()).digest()
            for block in range(len(self.source_blocks))
        ]
        request_id = f"store-{self._numbers}"
        op = LoadStoreOp(block_ids=self.source_blocks, block_hashes=hashes)
        started_s = time.perf_counter()
        return Transfer(
            request_id, hashes, self.worker.begin_store(request_id, op, self._event()), started_s
        )

    def store_over(self, transfer: Transfer) -> bool:
        """Whether it is. Raises EngineFailed where chunks were dropped."""
        if not transfer.store.over:
            return False
        dropped = transfer.store.result.dropped
        if dropped:
            raise EngineFailed(f"{dropped} of {self.chunks} chunks were not stored")
        # A request that stores has a session, as one that loads has.
        self.scheduler.end_session(transfer.request_id)
        return True

    def store(self) -> tuple[float, list[bytes]]:
        """Seconds of a store of all chunks, until the host pool has them; and their names.

        The answer comes before that, when the blocks have been read: a lookup waits for the rest.
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
        op = LoadStoreOp(block_ids=self.target_blocks, block_hashes=hashes)
        event = self._event()
        started_s = time.perf_counter()
        retrieve = self.worker.begin_retrieve(request_id, op, event)
        retrieve.call.wait(_TRANSFER_S)
        seconds = time.perf_counter() - started_s
        if not retrieve.over:
            raise EngineFailed("a retrieve was not answered")
        if retrieve.failed_chunks:
            raise EngineFailed(
                f"{len(retrieve.failed_chunks)} of {self.chunks} chunks were not loaded"
            )
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

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def _look_up(self, request_id: str, hashes: list[bytes]) -> None:
        self.scheduler.maybe_submit_lookup_request(request_id, block_hashes=hashes)
        tokens = None
        while tokens is None:
            tokens = self.scheduler.check_lookup_result(request_id, wait_s=1.0)
        if tokens != self.chunks * CHUNK_TOKENS:
            raise EngineFailed(f"a lookup found {tokens} of {self.chunks * CHUNK_TOKENS} tokens")

    def _event(self) -> Any:
        """An event after what the GPU has been given; none on the CPU."""
        if self.device.type == "cpu":
            return None
        import torch

        event = torch.cuda.Event(interprocess=True)
        event.record()
        return event


class Transfer(NamedTuple):
    """A store that was begun, and when."""

    request_id: str
    hashes: list[bytes]
    store: Store
    started_s: float
