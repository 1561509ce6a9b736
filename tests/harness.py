"""A real agent process, and an engine without a model: real adapters over real shared memory."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lmcache_redis.client.adapter import LMCacheMPWorkerAdapter
from lmcache_redis.client.control import ControlClient
from lmcache_redis.client.operations import LoadStoreOp
from lmcache_redis.client.scheduler import LMCacheMPSchedulerAdapter
from lmcache_redis.errors import LMCacheRedisError

# What only a hang reaches: the machine may run several test runs at once.
WAIT_S = 60.0


def wait_until(condition: Callable[[], Any], timeout_s: float = WAIT_S, what: str = "") -> float:
    """Waits for ``condition`` to hold and returns how long that took; fails after a time."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            raise AssertionError(f"not within {timeout_s} s: {what or condition}")
        time.sleep(0.005)
    return time.monotonic() - started_s


class AgentServer:
    """One `lmcache-redis agent` process. A context manager; ``options`` become CLI options."""

    def __init__(self, directory: Path, redis_url: str | None, **options: Any) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        self.endpoint = f"ipc://{directory}/agent.sock"
        self.log_path = directory / "agent.log"
        options.setdefault("pool_bytes", 64 << 20)
        options.setdefault("slot_bytes", 64 << 10)
        options.setdefault("chunk_size_tokens", 64)
        self._options = {"endpoint": self.endpoint, "redis_url": redis_url, **options}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> AgentServer:
        """Starts the process and does not wait for it."""
        words = [sys.executable, "-m", "lmcache_redis.cli", "agent"]
        for name, value in self._options.items():
            if value is not None:
                words += ["--" + name.replace("_", "-"), str(value)]
        with open(self.log_path, "ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        return self

    def start(self) -> AgentServer:
        self.spawn()
        wait_until(self._answers, what=f"an agent at {self.endpoint}")
        return self

    def status(self) -> dict[str, Any]:
        return ControlClient(self.endpoint, timeout_s=WAIT_S).status()

    def counter(self, name: str) -> int:
        return int(self.status()["counters"][name])

    def wait_idle(self) -> None:
        """Waits until nothing is queued for Redis and no copy is on its way."""
        wait_until(lambda: not any(self.status()["queues"].values()), what="idle queues")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def terminate(self) -> int:
        self._end(signal.SIGTERM)
        return self.process.returncode

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

    def restart(self) -> AgentServer:
        self.kill()
        return self.start()

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the agent ended:\n{self.log}")
        try:
            ControlClient(self.endpoint, timeout_s=1.0).ping()
        except LMCacheRedisError:
            return False
        return True

    def _end(self, signum: int) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, signum)
            if signum != signal.SIGKILL:
                os.kill(self._process.pid, signal.SIGCONT)
            self._process.wait(WAIT_S)

    def __enter__(self) -> AgentServer:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(signal.SIGKILL)


def block_hashes(prompt: str, count: int) -> list[bytes]:
    """Chained hashes of ``count`` blocks of a prompt, as an engine makes them."""
    hashes, parent = [], b""
    for number in range(count):
        parent = hashlib.sha256(parent + f"{prompt}/{number}".encode()).digest()
        hashes.append(parent)
    return hashes


class Engine:
    """The adapters of one engine around KV tensors that nobody computes.

    Blocks of 16 tokens, 4 a chunk with the harness's agent. Content of blocks is random.
    """

    block_size_tokens = 16

    def __init__(
        self,
        endpoint: str,
        *,
        model_name: str = "test/model",
        layers: int = 3,
        num_blocks: int = 48,
        width: int = 64,
        dtype: torch.dtype = torch.float32,
        world_size: int = 1,
        identity: dict[str, str] | None = None,
        wait: bool = True,
    ) -> None:
        engine_id = uuid.uuid4().hex
        self.num_blocks = num_blocks
        self.scheduler = LMCacheMPSchedulerAdapter(
            endpoint, model_name, world_size, self.block_size_tokens, engine_id=engine_id
        )
        self.workers: list[LMCacheMPWorkerAdapter] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        for rank in range(world_size):
            shape = (num_blocks, 2, self.block_size_tokens, width)
            caches = {f"layer.{n}": torch.zeros(shape, dtype=dtype) for n in range(layers)}
            worker = LMCacheMPWorkerAdapter(
                endpoint,
                model_name,
                world_size,
                rank,
                self.block_size_tokens,
                engine_id=engine_id,
            )
            worker.register_kv_caches(
                caches,
                num_blocks=num_blocks,
                dtype=str(dtype).removeprefix("torch."),
                identity={"rank": str(rank), **(identity or {})},
            )
            self.workers.append(worker)
            self.caches.append(caches)
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = WAIT_S) -> float:
        return wait_until(
            lambda: self.scheduler.link.online and all(w.ready for w in self.workers),
            timeout_s,
            "a registered engine",
        )

    def randomize(self, block_ids: Sequence[int]) -> None:
        for caches in self.caches:
            for tensor in caches.values():
                fresh = torch.rand((len(block_ids), *tensor.shape[1:]))
                tensor[list(block_ids)] = fresh.to(tensor.dtype)

    def snapshot(self) -> list[dict[str, torch.Tensor]]:
        return [{name: t.clone() for name, t in caches.items()} for caches in self.caches]

    def store(self, request_id: str, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Stores and waits until every worker reports it."""
        op = LoadStoreOp(block_ids=list(block_ids), block_hashes=list(hashes))
        for worker in self.workers:
            worker.submit_store_request(request_id, op)
            wait_until(
                lambda worker=worker: request_id in worker.get_finished({request_id})[0],
                what="a store",
            )

    def lookup(self, request_id: str, hashes: Sequence[bytes], first_chunk: int = 0) -> int:
        """Tokens that the agent holds for the request."""
        self.scheduler.maybe_submit_lookup_request(
            request_id, block_hashes=hashes, first_chunk=first_chunk
        )
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            tokens = self.scheduler.check_lookup_result(request_id, wait_s=0.05)
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
        op = LoadStoreOp(
            block_ids=list(block_ids),
            block_hashes=list(hashes),
            skip_first_n_tokens=skip_first_n_tokens,
        )
        failed: set[int] = set()
        for worker in self.workers:
            worker.submit_retrieve_request(request_id, op)
        for worker in self.workers:
            wait_until(
                lambda worker=worker: request_id in worker.get_finished(set())[1], what="a retrieve"
            )
            failed |= worker.get_block_ids_with_load_errors()
        return failed

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
