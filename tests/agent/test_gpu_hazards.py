# SPDX-License-Identifier: Apache-2.0
"""What is hardest on the order of copies, with whole agents over the driver of the tests.

Every byte that should change is compared, and every byte around. Beside these: engines that
register and leave amid loads, and that sleep while their agent is frozen, are in `test_gpu`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.cuda_driver.buffers import bytes_at
from tests.cuda_driver.engine import GpuEngine, Host, gpus
from tests.harness import AgentServer, block_hashes, wait_until
from tests.servers import RedisServer

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(cuda_driver.missing() is not None, reason=f"{cuda_driver.missing()}"),
]

DIRECT, BY_KERNELS = 4096, 1 << 20  # bytes: the harness's pages have 8192
either_way = pytest.mark.parametrize("direct", [DIRECT, BY_KERNELS], ids=["direct", "kernels"])
HASHES, OTHERS = block_hashes("a prompt", 16), block_hashes("another", 16)
TOKENS = 256


@pytest.fixture
def host() -> Iterator[Host]:
    with gpus(delay_us=300) as host:
        yield host


def new_agent(tmp_path: Path, redis_url: str | None, direct: int) -> AgentServer:
    return AgentServer(tmp_path / "agent", redis_url, canary_every=0, direct_copy_bytes=direct)


def blocks_of(engine: GpuEngine, blocks: Sequence[int]) -> list[torch.Tensor]:
    caches = engine.snapshot()
    return [tensor[list(blocks)] for each in caches for tensor in each.values()]


def equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


class Streams:
    """Two streams of a process on one GPU: what it computes is enqueued on either."""

    def __init__(self, host: Host) -> None:
        self._host = host
        with host.on(0):
            self._numbers = [host.stream(0), driver.create_stream()]
        self.last = cuda_driver.get("streams")  # how the second one is known to the settings

    def use(self, number: int) -> None:
        self._host._streams[0] = self._numbers[number]


@either_way
def test_a_stream_far_behind_holds_up_its_own_work_alone(
    direct: int, host: Host, tmp_path: Path
) -> None:
    """As with two batches that overlap: a signal on one stream says nothing of the other."""
    streams = Streams(host)
    near, far = range(16), range(16, 32)
    with (
        new_agent(tmp_path, None, direct) as agent,
        GpuEngine(agent.endpoint, host, num_blocks=80) as engine,
    ):
        (worker,) = engine.workers
        engine.randomize(near)
        engine.store("first", HASHES, near)
        (before,) = [blocks_of(engine, near)]
        assert engine.lookup("late load", HASHES) == TOKENS
        streams.use(1)
        cuda_driver.set("pageable_waits", 0)
        cuda_driver.set("hang", streams.last)
        engine.randomize(far)
        engine.zero(range(32, 48))
        (store,) = worker.begin_stores(["far"], [engine.op(OTHERS, far)], worker.signal())
        (load,) = engine.begin_retrieves("late load", HASHES, range(32, 48))

        streams.use(0)
        for number in range(2):
            engine.zero(range(48, 64))
            assert engine.lookup(f"load {number}", HASHES) == TOKENS
            assert engine.retrieve(f"load {number}", HASHES, range(48, 64)) == set()
            assert equal(blocks_of(engine, range(48, 64)), before)
            more = block_hashes(f"near {number}", 16)
            engine.randomize(range(64, 80))
            engine.store(f"store {number}", more, range(64, 80))
            assert engine.lookup(f"stored {number}", more) == TOKENS
        assert not store.over
        assert not load.over

        cuda_driver.set("hang", 0)
        wait_until(lambda: store.over and load.over, "the stream")
        streams.use(1)
        assert not load.failed_blocks
        assert equal(blocks_of(engine, range(32, 48)), before)
        computed = blocks_of(engine, far)
        assert engine.lookup("far", OTHERS) == TOKENS
        engine.zero(far)
        assert engine.retrieve("far", OTHERS, far) == set()
        assert equal(blocks_of(engine, far), computed)


class PackedEngine(GpuEngine):
    """All layers in one allocation, a block's pages side by side, with bytes between and around."""

    _AROUND, _BETWEEN = 1000, 8  # numbers

    def new_caches(
        self, rank: int, names: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        page = int(np.prod(shape[1:]))
        step = (page + self._BETWEEN) * len(names)
        count = 2 * self._AROUND + shape[0] * step
        address = self._host.allocate(0, count * dtype.itemsize)
        self.flat = self._host.tensor(address, (count,), dtype)
        with self._host.on(0):
            self.all_bytes = bytes_at(address, driver.allocation_of(address).size_bytes)
        self._host.write(self.flat, torch.rand(count))
        inner = torch.empty(shape[1:]).stride()
        return {
            name: self.flat.as_strided(
                shape, (step, *inner), self._AROUND + number * (page + self._BETWEEN)
            )
            for number, name in enumerate(names)
        }


@either_way
def test_blocks_at_both_ends_of_a_packed_allocation(
    direct: int, host: Host, tmp_path: Path
) -> None:
    ends = [47, *range(8), *range(40, 47)]
    with (
        new_agent(tmp_path, None, direct) as agent,
        PackedEngine(agent.endpoint, host) as engine,
    ):
        host.synchronize()
        engine.store("store", HASHES, ends)
        stored = [tensor.clone() for tensor in blocks_of(engine, ends)]
        for target in (range(16, 32), ends):
            engine.randomize(range(48))
            host.synchronize()
            before = engine.all_bytes.copy()
            assert engine.lookup(f"load {target}", HASHES) == TOKENS
            assert engine.retrieve(f"load {target}", HASHES, list(target)) == set()
            assert equal(blocks_of(engine, target), stored)
            after = engine.all_bytes.copy()
            engine.all_bytes[:] = before
            for tensor, chunk in zip(engine.caches[0].values(), stored, strict=True):
                tensor[list(target)] = chunk
            assert np.array_equal(engine.all_bytes, after), "beside the blocks"


@either_way
def test_an_agent_killed_at_any_moment_of_a_scatter(
    direct: int, host: Host, tmp_path: Path, redis_server: RedisServer
) -> None:
    """The engine writes to failed blocks at once, and nothing is written over that."""
    source, target = range(16), range(24, 40)
    with (
        new_agent(tmp_path, redis_server.unix_url, direct) as agent,
        GpuEngine(agent.endpoint, host) as engine,
    ):
        engine.randomize(source)
        engine.store("store", HASHES, source)
        agent.wait_idle()
        chunk, failures = blocks_of(engine, source), 0
        # A scatter takes about half a second.
        cuda_driver.set("delay_us", 10_000, dict(os.environ))
        cuda_driver.set("piece_bytes", 512, dict(os.environ))
        # Of all half milliseconds up to 2.5, each way has every other one.
        for half_ms in range(direct == DIRECT, 6, 2):
            name = f"load {half_ms}"
            assert engine.lookup(name, HASHES) == TOKENS
            engine.zero(target)
            host.synchronize()
            copies = moves_begun()
            (load,) = engine.begin_retrieves(name, HASHES, target)
            wait_until(lambda: moves_begun() > copies or load.over, "a scatter")  # noqa: B023
            time.sleep(half_ms * 0.5e-3)
            agent.kill()
            wait_until(lambda: load.over, "the end of the load")  # noqa: B023
            failures += bool(load.failed_blocks)
            engine.randomize(sorted(load.failed_blocks))
            found = blocks_of(engine, target)
            agent.start()
            engine.wait_ready()
            assert equal(blocks_of(engine, target), found)
            right = [n for n, block in enumerate(target) if block not in load.failed_blocks]
            assert equal([t[right] for t in found], [t[right] for t in chunk])
        assert failures


def moves_begun() -> int:
    names = ("cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel")
    return sum(cuda_driver.get(f"{name}.called", dict(os.environ)) for name in names)
