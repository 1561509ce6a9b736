# SPDX-License-Identifier: Apache-2.0
"""STORE and RETRIEVE through a real agent, beside plain copies between GPU and pinned memory.

The time of a store runs until a lookup finds all of it in the host pool; that of a retrieve until
its answer. Both include the messages, the agent and the copies. A plain copy is one
``cudaMemcpyAsync`` of the same bytes and the wait for it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.engine import CHUNK_TOKENS, Engine, Shape
from benchmarks.gpu.rows import (
    RETRIEVE,
    RETRIEVE_P50,
    RETRIEVE_P99,
    STORE,
    Options,
    Row,
    row_of,
    time_row_of,
)
from benchmarks.gpu.timing import wait_for_all
from benchmarks.report import percentile
from benchmarks.servers import own_server
from lmcache_redis.errors import ConfigError
from testkit.agent import AgentServer

if TYPE_CHECKING:
    import torch

_NO_SERVER_URL = "redis://127.0.0.1:9"  # the discard port: refused at once
_SLACK_BYTES = 256 << 20


@contextlib.contextmanager
def engine_beside_agent(
    shape: Shape, chunks: int, device: torch.device, say: Callable[[str], None]
) -> Iterator[Engine]:
    """An engine of ``shape`` that moves ``chunks`` at a time, and its agent; ended on exit.

    The agent writes nothing to Redis, which is not measured; if no server can be started it runs
    without one. Its host pool holds the stores of two rounds.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            url = stack.enter_context(own_server())
        except ConfigError as error:
            url = _NO_SERVER_URL
            say(f"the agent runs without a Redis: {error}")
        agent = AgentServer(
            f"ipc://{directory}/agent.sock",
            url,
            directory / "agent.log",
            pool_bytes=2 * chunks * shape.chunk_bytes + _SLACK_BYTES,
            chunk_size_tokens=CHUNK_TOKENS,
            write_queue_bytes=0,
        )
        stack.enter_context(agent)
        yield stack.enter_context(contextlib.closing(Engine(agent, shape, chunks, device)))


class PlainCopy:
    """One copy of ``nbytes`` in each direction: the ideal."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        import torch

        on_gpu = device.type != "cpu"
        self._device = device
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._there = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def to_host(self) -> float:
        """Seconds."""
        return self._timed(self._host, self._there)

    def to_device(self) -> float:
        """Seconds."""
        return self._timed(self._there, self._host)

    def _timed(self, target: torch.Tensor, source: torch.Tensor) -> float:
        wait_for_all(self._device)
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        wait_for_all(self._device)
        return time.perf_counter() - started_s


def measure(engine: Engine, options: Options, say: Callable[[str], None]) -> list[Row]:
    """Rows of store, retrieve, and the retrieve's median and 99th percentile.

    Raises EngineFailed if chunks are dropped or differ.
    """
    plain = PlainCopy(engine.bytes_moved, engine.device)
    plain.to_host(), plain.to_device()
    hashes = engine.store()[1]
    engine.retrieve(hashes)
    engine.check()
    speeds: dict[str, list[float]] = {"out": [], "in": [], STORE: [], RETRIEVE: []}
    for number in range(options.rounds):
        say(f"through the agent: round {number + 1} of {options.rounds}")
        seconds = {"out": plain.to_host()}
        seconds[STORE], hashes = engine.store()
        seconds["in"] = plain.to_device()
        seconds[RETRIEVE] = engine.retrieve(hashes)
        for name, taken_s in seconds.items():
            speeds[name].append(engine.bytes_moved / 1e9 / taken_s)
    say(f"{options.retrieves} retrieves")
    ideal: list[float] = []
    retrieves: list[float] = []
    for _ in range(options.retrieves):
        ideal.append(plain.to_device())
        retrieves.append(engine.retrieve(hashes))
    engine.check()
    rows = [
        row_of(what, engine.shape, engine.chunks, speeds[what], speeds[reference], against)
        for what, reference, against in (
            (STORE, "out", "plain copy to pinned memory"),
            (RETRIEVE, "in", "plain copy from it"),
        )
    ]
    reference_s = median(ideal)
    for what, percent in ((RETRIEVE_P50, 50), (RETRIEVE_P99, 99)):
        value_s = percentile(retrieves, percent)
        rows.append(
            time_row_of(
                engine,
                what,
                value_s,
                reference_s,
                "plain copy from pinned memory, median",
                ratio=value_s / reference_s,
                worst=max(retrieves) / reference_s,
                rounds=options.retrieves,
            )
        )
    return rows
