# SPDX-License-Identifier: Apache-2.0
"""Each wait of a call on a GPU is needed: without it bytes are wrong, with it they are not.

Operations of both processes take random times, far longer than those of a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import CopyStream, Gpus
from tests import cuda_driver
from tests.device.gpu_calls import NEEDS_DRIVER, Host, View, opened, plain
from tests.device.gpu_exporter import GpuExporter, content
from tests.device.layouts import one

pytestmark = NEEDS_DRIVER
DIRECT, BY_KERNEL = 1, 1 << 40
PAGE, BLOCKS, SEGMENTS, ROUNDS = 2048, 8, 4, 25
SIZE = PAGE * BLOCKS * SEGMENTS
IDS = [5, 0, 3, 6]
CHUNK = len(IDS) * SEGMENTS * PAGE

SIGNAL = (CudaDevice, "_await_signal")
DRAIN = (CopyStream, "drain")
KERNEL = (CopyStream, "wait_for_kernel")


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuExporter]:
    with GpuExporter(
        SIZE, None, cuda_driver.environment(delay_us=1500, piece_bytes=4096)
    ) as started:
        yield started


class Rounds:
    """Calls of one device; each method does one and says whether its bytes are right."""

    def __init__(self, engine: GpuExporter, direct_copy_bytes: int) -> None:
        self.engine = engine
        self.view, self.host = View(engine), Host(64 << 10, 1, 1)
        gpus = Gpus(direct_copy_bytes, self.host.pieces_of)
        self.device = opened(engine, plain(PAGE, BLOCKS, SEGMENTS), gpus, engine.signals)
        self.slots = self.host.slots([PAGE] * (CHUNK // PAGE), 64)

    def chunk(self, memory: bytes) -> bytes:
        pages = np.frombuffer(memory, np.uint8).reshape(SEGMENTS, BLOCKS, PAGE)
        return pages[:, IDS].tobytes()

    def gather(self, seed: int) -> bool:
        """After what the engine has enqueued."""
        self.host.memory[:] = 0
        ticket = self.engine.write_late(seed)
        self.device.gather(one(IDS, self.slots, after=ticket))
        return b"".join(self.slots) == self.chunk(content(seed, SIZE))

    def gather_and_reuse(self, seed: int) -> bool:
        """Blocks that were read are written again at once."""
        before = self.engine.write(seed)
        cuda_driver.set("delay_us", 1500)

        def reuse() -> None:
            cuda_driver.set("delay_us", 0)  # the next forward is fast
            self.view.write(bytes(SIZE))
            cuda_driver.set("delay_us", 1500)

        self.device.gather(one(IDS, self.slots), reuse)
        return b"".join(self.slots) == self.chunk(before)

    def scatter(self, seed: int) -> bool:
        """After what the engine has enqueued; the engine reads the blocks on its return."""
        chunk = np.random.default_rng(seed).bytes(CHUNK)
        for n, slot in enumerate(self.slots):
            slot[:] = chunk[n * PAGE : (n + 1) * PAGE]
        ticket = self.engine.write_late(seed)
        self.device.scatter(one(IDS, self.slots, after=ticket))
        found = self.chunk(self.view.read())
        if found == chunk:  # and it is still there when the engine has done what it enqueued
            self.engine.ask("wait")
            found = self.chunk(self.view.read())
        return found == chunk

    def close(self) -> None:
        cuda_driver.set("delay_us", 0)
        self.device.close()
        self.view.close()
        self.host.close()


@pytest.mark.parametrize("direct_copy_bytes", [DIRECT, BY_KERNEL])
def test_no_order_of_250_rounds_is_wrong(direct_copy_bytes: int) -> None:
    """Fast ones, in which the processes overtake each other. Each way has 250."""
    fast = GpuExporter(SIZE, None, cuda_driver.environment(delay_us=30, piece_bytes=16384))
    cuda_driver.reset()
    cuda_driver.set("delay_us", 50)
    rounds = Rounds(fast, direct_copy_bytes)
    try:
        right = [(rounds.gather(seed), rounds.scatter(seed)) for seed in range(125)]
        assert right == [(True, True)] * 125
    finally:
        rounds.close()
        cuda_driver.reset()
        fast.kill()


@pytest.mark.parametrize(
    ("kind", "wait", "direct_copy_bytes"),
    [
        ("gather", SIGNAL, DIRECT),
        ("gather", SIGNAL, BY_KERNEL),
        ("gather", DRAIN, DIRECT),
        ("gather", DRAIN, BY_KERNEL),
        ("gather_and_reuse", DRAIN, DIRECT),
        ("gather_and_reuse", KERNEL, BY_KERNEL),
        ("scatter", SIGNAL, DIRECT),
        ("scatter", SIGNAL, BY_KERNEL),
        ("scatter", DRAIN, DIRECT),
        ("scatter", DRAIN, BY_KERNEL),
    ],
)
def test_without_a_wait_bytes_are_wrong(
    engine: GpuExporter,
    kind: str,
    wait: tuple[type, str],
    direct_copy_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda_driver.reset()
    cuda_driver.set("piece_bytes", 4096)
    rounds = Rounds(engine, direct_copy_bytes)
    try:
        one_round = getattr(rounds, kind)
        cuda_driver.set("delay_us", 300)
        assert [one_round(seed) for seed in range(ROUNDS)] == [True] * ROUNDS
        with monkeypatch.context() as patch:
            patch.setattr(*wait, lambda *arguments: None)
            right = []
            for seed in range(ROUNDS):
                right.append(one_round(seed))
                patch.undo()
                cuda_driver.set("delay_us", 0)
                engine.ask("wait")
                rounds.device.gather(one([0], rounds.host.slots([PAGE] * SEGMENTS, 0)))
                cuda_driver.set("delay_us", 300)
                patch.setattr(*wait, lambda *arguments: None)
        assert not all(right), "the wait is not needed"
    finally:
        rounds.close()
        cuda_driver.reset()
