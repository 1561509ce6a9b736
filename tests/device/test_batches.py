# SPDX-License-Identifier: Apache-2.0
"""Batches of copies: how long they are, where there are none, and what becomes of a refused one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_redis.device import driver
from lmcache_redis.device.gpu import Batches, CopyStream, Gpus
from lmcache_redis.errors import DeviceError, GpuLost
from tests import cuda_driver
from tests.cuda_driver.buffers import bytes_at
from tests.device.gpu_calls import NEEDS_DRIVER, Host, View, opened, plain
from tests.device.gpu_exporter import GpuExporter
from tests.device.layouts import one

pytestmark = NEEDS_DRIVER
BATCH, OUT = "cuMemcpyBatchAsync", "cuMemcpyDtoHAsync_v2"
PAGE, BLOCKS, COPIES = 512, 4096, 1300
DIRECT = 1
IDS = np.random.default_rng(1).permutation(BLOCKS)[:COPIES].tolist()
SAID = "copies one by one from now on"


class Moves:
    """Calls of one device, over slots apart, each with one page of a scattered block."""

    def __init__(
        self, engine: GpuExporter, memory: tuple[View, Host], *, batch_copies: bool = True
    ) -> None:
        self.engine = engine
        self.view, _ = memory
        self.host = Host(1 << 20, 1, 1)
        gpus = Gpus(DIRECT, self.host.pieces_of, batch_copies=batch_copies)
        self.device = opened(engine, plain(PAGE, BLOCKS, 1), gpus)
        self.slots = self.host.slots([PAGE] * COPIES, 64)

    def gather(self) -> bool:
        whole = self.engine.write(3)
        self.device.gather(one(IDS, self.slots))
        pages = np.frombuffer(whole, np.uint8).reshape(BLOCKS, PAGE)
        return b"".join(self.slots) == pages[IDS].tobytes()

    def scatter(self) -> bool:
        before = np.frombuffer(self.engine.write(4), np.uint8).reshape(BLOCKS, PAGE).copy()
        chunk = np.random.default_rng(5).bytes(COPIES * PAGE)
        for number, slot in enumerate(self.slots):
            slot[:] = chunk[number * PAGE : (number + 1) * PAGE]
        self.device.scatter(one(IDS, self.slots))
        before[IDS] = np.frombuffer(chunk, np.uint8).reshape(COPIES, PAGE)
        return self.view.read() == before.tobytes()

    def close(self) -> None:
        self.device.close()
        self.host.close()


@pytest.fixture
def moves(engine: GpuExporter, memory: tuple[View, Host]) -> Iterator[Moves]:
    made = Moves(engine, memory)
    yield made
    made.close()


def called(name: str) -> int:
    return cuda_driver.get(f"{name}.called")


def test_a_batch_has_512_copies_at_most(moves: Moves, caplog: pytest.LogCaptureFixture) -> None:
    cuda_driver.set("batch_most", 512)
    for move in (moves.gather, moves.scatter):
        before = called(BATCH)
        assert move()
        assert called(BATCH) == before + 3
    assert SAID not in caplog.text


def test_there_may_be_none(engine: GpuExporter, memory: tuple[View, Host]) -> None:
    moves = Moves(engine, memory, batch_copies=False)
    assert moves.gather()
    assert moves.scatter()
    assert not called(BATCH)
    moves.close()


def test_there_are_none_where_pinned_memory_has_other_addresses(
    engine: GpuExporter, memory: tuple[View, Host], caplog: pytest.LogCaptureFixture
) -> None:
    """The GPU is asked once. The stub refuses such addresses, and counts that."""
    cuda_driver.set("distinct_pinned", 1)
    moves = Moves(engine, memory)
    asked = called("cuDeviceGetAttribute")
    assert moves.gather()
    assert moves.scatter()
    assert not called(BATCH)
    assert called("cuDeviceGetAttribute") == asked
    assert SAID not in caplog.text
    moves.close()


@pytest.mark.parametrize("kind", ["gather", "scatter"])
@pytest.mark.parametrize(("code", "at"), [(1, 1), (1, 2), (2, 3), (400, 1), (801, 1)])
def test_what_is_refused_is_copied_one_by_one(
    moves: Moves, kind: str, code: int, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_driver.fail(BATCH, code, at=at, times=0)
    for _ in range(3):
        assert getattr(moves, kind)()
        assert called(BATCH) == at
    assert caplog.text.count(SAID) == 1
    assert f"CUDA error {code} " in caplog.text


def test_copies_that_fail_either_way_leave_batches_on(
    moves: Moves, caplog: pytest.LogCaptureFixture
) -> None:
    cuda_driver.fail(BATCH, 1)
    cuda_driver.fail(OUT, 1)
    with pytest.raises(DeviceError, match=rf"{OUT} failed with CUDA error 1 "):
        moves.gather()
    assert SAID not in caplog.text
    assert moves.gather()
    assert called(BATCH) == 4


def test_a_lost_gpu_copies_nothing(engine: GpuExporter, caplog: pytest.LogCaptureFixture) -> None:
    cuda_driver.reset()
    host = Host(1 << 20, 1, 1)
    device = opened(engine, plain(PAGE, BLOCKS, 1), Gpus(DIRECT, host.pieces_of))
    cuda_driver.fail(BATCH, 226)
    with pytest.raises(GpuLost, match="error 226 "):
        device.gather(one(IDS[:8], host.slots([PAGE] * 8, 64)))
    assert not called(OUT)
    assert SAID not in caplog.text
    cuda_driver.reset()


def test_ids_are_sent_without_a_wait_for_the_stream(memory: tuple[View, Host]) -> None:
    """Of pageable memory the driver may wait. Whoever sends may change them afterwards."""
    driver.set_context(driver.retain_context(0))
    context = driver.retain_context(0)
    batches = Batches(0, wanted=False)
    streams = [CopyStream(memory[1].pieces_of, batches) for _ in range(16)]
    ids = [np.arange(n, n + 100, dtype=np.int64) for n in range(16)]
    sent: list[int] = []

    def send() -> None:
        driver.set_context(context)
        for stream, each in zip(streams, ids, strict=True):
            sent.append(stream.send(each))
            each[:] = -1

    cuda_driver.set("hang", -1)
    try:
        thread = threading.Thread(target=send)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        cuda_driver.set("hang", 0)
        thread.join()
    for n, (stream, there) in enumerate(zip(streams, sent, strict=True)):
        stream.drain()
        found = bytes_at(there, 800).view(np.int64)
        assert found.tolist() == list(range(n, n + 100))
        stream.close()
