# SPDX-License-Identifier: Apache-2.0
"""An agent process, and an engine without a model: real clients over real shared memory."""

from __future__ import annotations

import hashlib
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.scheduler import SchedulerClient
from lmcache_redis.client.worker import RetrieveTransfer, TransferOp, WorkerClient
from testkit import agent
from tests.forks import Forked
from tests.servers import wait_until as wait_until

if TYPE_CHECKING:
    import torch  # tests of the agent alone run without it

# What only a hang reaches: the machine may run several test runs at once.
WAIT_S = 60.0
_Self = TypeVar("_Self", bound="AgentServer")


class AgentServer(agent.AgentServer):
    """One `lmcache-redis agent` with a small host pool. Killed on exit, whatever its state.

    constants: of its modules, see `Forked`.
    """

    def __init__(
        self,
        directory: Path,
        redis_url: str | None,
        constants: Mapping[str, object] | None = None,
        **options: Any,
    ) -> None:
        self._constants = constants
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        small = {"pool_bytes": 64 << 20, "slot_bytes": 64 << 10, "chunk_size_tokens": 64}
        # One hit in a thousand would be computed, where a test expects that it is loaded.
        small["canary_every"] = 0
        endpoint, log_path = f"ipc://{directory}/agent.sock", directory / "agent.log"
        super().__init__(endpoint, redis_url, log_path, **small | options)

    def _spawn(self, words: Sequence[str]) -> Any:
        return Forked(words, self.log_path, constants=self._constants)

    def start(self: _Self) -> _Self:
        """Also waits until it has read the files of its disk: before, none is found."""
        super().start()
        if self._settings.get("disk_path") is not None:
            wait_until(lambda: self.status()["disk"]["up"], what="the disk read")
        return self

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def counter(self, name: str) -> int:
        return self.counters()[name]

    def end(self) -> None:
        if self.running:
            self.kill()

    def terminate(self) -> int:
        """SIGTERM, also to a stopped agent; its exit status."""
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        return self.process.wait(WAIT_S)

    def children(self) -> list[int]:
        """Processes that any of its threads has started."""
        lists = [each.read_text() for each in Path(f"/proc/{self.pid}/task").glob("*/children")]
        return [int(child) for text in lists for child in text.split()]

    def stop(self) -> None:
        """Return when every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")

        def states() -> set[str]:
            stats = [task.joinpath("stat").read_text() for task in tasks.iterdir()]
            return {stat.rpartition(")")[2].split()[0] for stat in stats}

        wait_until(lambda: states() == {"T"}, what="a stopped agent")

    def cont(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class StartedAgent(AgentServer):
    """An agent that is started as users start it, not forked."""

    def _spawn(self, words: Sequence[str]) -> Any:
        return agent.AgentServer._spawn(self, words)


def block_hashes(prompt: str, count: int) -> list[bytes]:
    """Chained hashes of ``count`` blocks of a prompt, as an engine makes them."""
    hashes, parent = [], b""
    for number in range(count):
        parent = hashlib.sha256(parent + f"{prompt}/{number}".encode()).digest()
        hashes.append(parent)
    return hashes


class Engine:
    """The clients of one engine, with KV tensors but without a model.

    Blocks of 16 tokens, 4 to a chunk with the harness's agent, filled at random. endpoint: the
    agent's, or one for each rank, as on several nodes; the scheduler has that of the first.
    scheduler: further options of its client.
    """

    block_size_tokens = 16
    tenant = ""  # of the requests from now on

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        model_name: str = "test/model",
        layers: int = 3,
        num_blocks: int = 48,
        width: int = 64,
        dtype: torch.dtype | None = None,
        world_size: int = 1,
        identity: dict[str, str] | None = None,
        wait: bool = True,
        agent_dead_after_s: float = 1.5,
        **scheduler: Any,
    ) -> None:
        import torch

        dtype = dtype or torch.float32
        engine_id = uuid.uuid4().hex
        self.num_blocks = num_blocks
        endpoints = [endpoint] * world_size if isinstance(endpoint, str) else endpoint
        self.scheduler = SchedulerClient(
            endpoints[0],
            model_name,
            world_size,
            self.block_size_tokens,
            engine_id=engine_id,
            agent_dead_after_s=agent_dead_after_s,
            **scheduler,
        )
        self.workers: list[WorkerClient] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        for rank in range(world_size):
            shape = (num_blocks, 2, self.block_size_tokens, width)
            caches = self.new_caches(rank, [f"layer.{n}" for n in range(layers)], shape, dtype)
            worker = WorkerClient(
                endpoints[rank],
                model_name,
                world_size,
                rank,
                self.block_size_tokens,
                engine_id=engine_id,
                agent_dead_after_s=agent_dead_after_s,
            )
            self.workers.append(worker)
            self.caches.append(caches)
            try:
                worker.register_groups(
                    self.groups_of(rank, caches, str(dtype).removeprefix("torch.")),
                    num_blocks=num_blocks,
                    identity={"rank": str(rank), **(identity or {})},
                )
            except BaseException:
                self.close()  # its links would log into other tests
                raise
        if wait:
            self.wait_ready()

    def new_caches(
        self, rank: int, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The KV cache of a rank, all zero."""
        import torch

        return {name: torch.zeros(shape, dtype=dtype) for name in names}

    def groups_of(self, rank: int, caches: dict[str, torch.Tensor], dtype: str) -> list[CacheGroup]:
        return [CacheGroup(caches, dtype, self.block_size_tokens)]

    def wait_ready(self, timeout_s: float = WAIT_S) -> float:
        return wait_until(
            lambda: self.scheduler.link.online and all(w.ready for w in self.workers),
            "a registered engine",
            timeout_s,
        )

    def randomize(self, block_ids: Sequence[int]) -> None:
        """The bytes of these blocks."""
        import torch

        for caches in self.caches:
            for tensor in caches.values():
                fresh = torch.rand((len(block_ids), *tensor.shape[1:]))
                tensor[list(block_ids)] = fresh.to(tensor.dtype)

    def snapshot(self) -> list[dict[str, torch.Tensor]]:
        return [{name: t.clone() for name, t in caches.items()} for caches in self.caches]

    def chunks(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The names of the whole chunks among blocks with these hashes."""
        size = self.scheduler.num_blocks_per_chunk() or 4
        return [*hashes[size - 1 :: size]]

    def ops(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], skip_first_n_tokens: int = 0
    ) -> list[TransferOp]:
        """One for each group."""
        return [self.op(hashes, block_ids, skip_first_n_tokens)]

    def op(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], skip_first_n_tokens: int = 0
    ) -> TransferOp:
        skip_blocks = skip_first_n_tokens // self.block_size_tokens
        return TransferOp([*block_ids], self.chunks(hashes), skip_blocks, tenant=self.tenant)

    def store(self, request_id: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Stores, and waits until no block is read any more."""
        for worker in self.workers:
            ops = self.ops(hashes, block_ids)
            for store in worker.begin_stores([request_id] * len(ops), ops, worker.signal()):
                wait_until(lambda store=store: store.over, what="a store")

    def compare(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        client_named: int = 0,
    ) -> None:
        """Has blocks compared with what a lookup has pinned; waits until each was looked at.

        client_named: chunks at the end whose names cover media.
        """
        for worker in self.workers:
            op = replace(self.op(hashes, block_ids), client_named=client_named)
            (check,) = worker.begin_stores([request_id], [op], worker.signal(), compare=True)
            wait_until(lambda check=check: check.call.done, what="a comparison")

    def lookup(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        first_chunk: int = 0,
        token_s: float = 0.0,
    ) -> int:
        """Tokens that the agent holds for the request, after a step in which workers report."""
        self.scheduler.ranks.reported({rank: w.place for rank, w in enumerate(self.workers)})
        names = self.chunks(hashes)[first_chunk:]
        how = {"token_s": token_s, "tenant": self.tenant}
        self.scheduler.begin_lookup(request_id, names, first_chunk=first_chunk, **how)
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            tokens = self.scheduler.hit_tokens(request_id, wait_s=0.05)
            if tokens is not None:
                return tokens
        raise AssertionError("a lookup without an answer")

    def retrieve(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        skip_first_n_tokens: int = 0,
    ) -> set[int]:
        """Retrieves with every worker; returns ids of blocks that failed anywhere."""
        loads = self.begin_retrieves(request_id, hashes, block_ids, skip_first_n_tokens)
        wait_until(lambda: all(load.over for load in loads), what="a retrieve")
        return set().union(*(load.failed_blocks for load in loads))

    def begin_retrieves(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        skip_first_n_tokens: int = 0,
    ) -> list[RetrieveTransfer]:
        """Of every worker, one for each group, or for each share of it."""
        ops = self.ops(hashes, block_ids, skip_first_n_tokens)
        return [
            load
            for worker in self.workers
            for load in worker.begin_retrieves([request_id] * len(ops), ops, worker.signal())
        ]

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
