# SPDX-License-Identifier: Apache-2.0
"""What is hardest on the order of copies, with whole agents over the driver of the tests.

Every byte that should change is compared, and every byte around. Beside these: engines that
register and leave amid loads, and that sleep while their agent is frozen, are in `test_gpu`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from lmcache_redis.device import driver
from tests import cuda_driver
from tests.agent.on_gpus import (
    DIRECT,
    HASHES,
    SOURCE,
    TARGET,
    TOKENS,
    Node,
    blocks_of,
    either_way,
    equal,
    in_agents,
    needs_the_driver,
    set_in_agents,
    store,
)
from tests.cuda_driver.buffers import bytes_at
from tests.cuda_driver.engine import GpuEngine, Host
from tests.harness import block_hashes, wait_until

pytestmark = needs_the_driver

OTHERS = block_hashes("another", 16)


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
def test_a_stream_far_behind_holds_up_its_own_work_alone(direct: int, node: Node) -> None:
    """As with two batches that overlap: a signal on one stream says nothing of the other."""
    streams = Streams(node.host)
    far = range(16, 32)
    engine = node.engine(node.agent(direct), num_blocks=80)
    (worker,) = engine.workers
    store(engine)
    before = blocks_of(engine, SOURCE)
    assert engine.lookup("late load", HASHES) == TOKENS
    streams.use(1)
    cuda_driver.set("pageable_waits", 0)
    cuda_driver.set("hang", streams.last)
    engine.randomize(far)
    engine.zero(range(32, 48))
    (late_store,) = worker.begin_stores(["far"], [engine.op(OTHERS, far)], worker.signal())
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
    assert not late_store.over
    assert not load.over

    cuda_driver.set("hang", 0)
    wait_until(lambda: late_store.over and load.over, "the stream")
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
def test_blocks_at_both_ends_of_a_packed_allocation(direct: int, node: Node) -> None:
    ends = [47, *range(8), *range(40, 47)]
    agent = node.agent(direct)
    engine = node.start.enter(PackedEngine(agent.endpoint, node.host))
    node.host.synchronize()
    engine.store("store", HASHES, ends)
    stored = [tensor.clone() for tensor in blocks_of(engine, ends)]
    for target in (range(16, 32), ends):
        engine.randomize(range(48))
        node.host.synchronize()
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
def test_an_agent_killed_at_any_moment_of_a_scatter(direct: int, node: Node) -> None:
    """The engine writes to failed blocks at once, and nothing is written over that."""
    agent = node.agent(direct)
    engine = node.engine(agent)
    store(engine)
    agent.wait_idle()
    chunk, failures = blocks_of(engine, SOURCE), 0
    # A scatter takes about half a second.
    set_in_agents("delay_us", 10_000)
    set_in_agents("piece_bytes", 512)
    # Of all half milliseconds up to 2.5, each way has every other one.
    for half_ms in range(direct == DIRECT, 6, 2):
        name = f"load {half_ms}"
        assert engine.lookup(name, HASHES) == TOKENS
        engine.zero(TARGET)
        node.host.synchronize()
        copies = moves_begun()
        (load,) = engine.begin_retrieves(name, HASHES, TARGET)
        wait_until(lambda: moves_begun() > copies or load.over, "a scatter")  # noqa: B023
        time.sleep(half_ms * 0.5e-3)
        agent.kill()
        wait_until(lambda: load.over, "the end of the load")  # noqa: B023
        failures += bool(load.failed_blocks)
        engine.randomize(sorted(load.failed_blocks))
        found = blocks_of(engine, TARGET)
        agent.start()
        engine.wait_ready()
        assert equal(blocks_of(engine, TARGET), found)
        right = [n for n, block in enumerate(TARGET) if block not in load.failed_blocks]
        assert equal([t[right] for t in found], [t[right] for t in chunk])
    assert failures


def moves_begun() -> int:
    names = ("cuMemcpyBatchAsync", "cuMemcpyHtoDAsync_v2", "cuLaunchKernel")
    return sum(cuda_driver.get(f"{name}.called", in_agents()) for name in names)
