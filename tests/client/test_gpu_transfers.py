# SPDX-License-Identifier: Apache-2.0
"""A worker's client over GPU memory of the driver of the tests, with a real agent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.client.registering import CacheGroup
from lmcache_redis.client.worker import NEVER
from lmcache_redis.device.handles import CudaFdHandle
from lmcache_redis.errors import DeviceError
from tests import cuda_driver
from tests.cuda_driver.engine import GpuEngine, Host, gpus
from tests.harness import AgentServer, Engine, block_hashes

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(cuda_driver.missing() is not None, reason="no gcc"),
]

HASHES = block_hashes("a prompt", 16)
SOURCE, TARGET = range(16), range(24, 40)


@pytest.fixture
def host() -> Iterator[Host]:
    with gpus(devices=2, delay_us=200) as host:
        yield host


@pytest.fixture
def agent(host: Host, tmp_path: Path) -> Iterator[AgentServer]:
    with AgentServer(tmp_path / "agent", None) as agent:
        yield agent


def assert_moves(engine: GpuEngine) -> None:
    """The agent waits for what the engine computes, and for the zeroing of new blocks."""
    engine.randomize(SOURCE)
    engine.store("stores", HASHES, SOURCE)
    before = engine.snapshot()
    assert engine.lookup("loads", HASHES) == 256
    engine.zero(TARGET)
    assert engine.retrieve("loads", HASHES, TARGET) == set()
    for rank, caches in enumerate(engine.snapshot()):
        for name, tensor in caches.items():
            assert tensor[: TARGET[0]].equal(before[rank][name][: TARGET[0]])
            assert tensor[list(TARGET)].equal(before[rank][name][list(SOURCE)])


def test_engines_share_a_gpu(agent: AgentServer, host: Host) -> None:
    with (
        GpuEngine(agent.endpoint, host, model_name="one") as one,
        GpuEngine(agent.endpoint, host, model_name="two", memory="segment") as two,
    ):
        assert one.workers[0]._memory.signals is two.workers[0]._memory.signals
        assert_moves(one)
        assert_moves(two)
    host.close()  # nothing of them is open any more


def test_memory_that_cannot_be_exported_is_refused(agent: AgentServer, host: Host) -> None:
    with pytest.raises(DeviceError, match="--enable-sleep-mode"):
        GpuEngine(agent.endpoint, host, memory="unexportable pieces")


def test_an_engine_that_sleeps_gives_its_memory_back(agent: AgentServer, host: Host) -> None:
    """And is registered with other memory when it wakes, and the same signals."""
    with GpuEngine(agent.endpoint, host, memory="pieces") as engine:
        worker = engine.workers[0]
        signals = worker._memory.signals
        (fds, *_) = [each.fds for each in worker._memory.storages if isinstance(each, CudaFdHandle)]
        assert worker.unregister(60.0)
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        host.close()
        assert "handles" not in cuda_driver.counts()

        caches = host.tensors(list(engine.caches[0]), (48, 2, 16, 64), memory="pieces")
        engine.caches[0] = caches
        group = CacheGroup(caches, "float32", 16)
        worker.register_groups([group], num_blocks=48, identity={"rank": "0"})
        engine.wait_ready()
        assert worker._memory.signals is signals
        assert_moves(engine)


def test_a_gpu_that_hangs_drops_stores_and_fails_loads(agent: AgentServer, host: Host) -> None:
    with GpuEngine(agent.endpoint, host) as engine:
        (worker,) = engine.workers
        engine.store("stores", HASHES, SOURCE)
        assert engine.lookup("loads", HASHES) == 256
        before = engine.snapshot()
        cuda_driver.set("hang", -1)
        while worker.signal() != NEVER:
            pass
        store_op, load_op = engine.op(block_hashes("b", 16), SOURCE), engine.op(HASHES, TARGET)
        (store,) = worker.begin_stores(["b"], [store_op], worker.signal())
        (load,) = worker.begin_retrieves(["loads"], [load_op], worker.signal())
        assert store.over
        assert (store.result.stored, store.result.dropped) == (0, 4)
        assert load.over
        assert load.given_up
        assert load.failed_blocks == set(TARGET)
        assert not store.call.sent
        assert not load.call.sent

        cuda_driver.set("hang", 0)
        host.synchronize()
        for rank, caches in enumerate(engine.snapshot()):
            assert all(tensor.equal(before[rank][name]) for name, tensor in caches.items())
        assert worker.signal() != NEVER
        assert engine.retrieve("loads", HASHES, TARGET) == set()


def test_a_gpu_that_is_lost_does_not_end_the_engine(agent: AgentServer, host: Host) -> None:
    with GpuEngine(agent.endpoint, host) as engine:
        (worker,) = engine.workers
        cuda_driver.fail("cuStreamWriteValue64_v2", 719)
        assert [worker.signal() for _ in range(3)] == [NEVER] * 3


def test_a_cpu_engine_has_no_signals(agent: AgentServer) -> None:
    with Engine(agent.endpoint) as engine:
        (worker,) = engine.workers
        assert worker.signal() is None
        assert not worker.on_cuda
        assert "pinned" not in cuda_driver.counts()
