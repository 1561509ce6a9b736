# SPDX-License-Identifier: Apache-2.0
"""`CudaDevice` when something fails: arguments, times, the engine, the driver, the GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from lmcache_redis.device import cuda, driver
from lmcache_redis.device.cuda import CudaDevice
from lmcache_redis.device.gpu import Gpus
from lmcache_redis.errors import DeviceError, GpuLost
from tests import cuda_driver
from tests.device.gpu_calls import (
    GUARD,
    NEEDS_DRIVER,
    Host,
    View,
    changed,
    opened,
    plain,
    range_of,
    unpinned_gpus,
    viewed,
)
from tests.device.gpu_exporter import GpuExporter
from tests.device.layouts import one
from tests.servers import wait_until

pytestmark = NEEDS_DRIVER
DIRECT, BY_KERNEL = 1, 1 << 40
PAGE, BLOCKS = 512, 8
SIZE = 1 << 16
LAYOUT = plain(PAGE, BLOCKS, 1)

each_way = pytest.mark.parametrize("direct_copy_bytes", [DIRECT, BY_KERNEL])


@pytest.fixture(scope="module")
def engine() -> Iterator[GpuExporter]:
    with GpuExporter(SIZE, None, cuda_driver.environment(devices=2)) as started:
        yield started


@pytest.fixture(params=[DIRECT, BY_KERNEL], ids=["direct", "by kernel"])
def device(
    engine: GpuExporter, memory: tuple[View, Host], request: pytest.FixtureRequest
) -> Iterator[CudaDevice]:
    memory[1].memory[:] = GUARD
    made = opened(engine, LAYOUT, Gpus(request.param, memory[1].pieces_of), engine.signals)
    yield made
    made.close()


def slots_of(memory: tuple[View, Host], blocks: int = 2, first: int = 0) -> list[memoryview]:
    return memory[1].slots([PAGE] * blocks, 16, first)


class TestNothingIsTouched:
    @pytest.fixture(autouse=True)
    def unchanged(self, engine: GpuExporter, memory: tuple[View, Host]) -> Iterator[None]:
        content = engine.write(1)
        memory[1].memory[:] = GUARD
        yield
        assert memory[0].read() == content
        assert (memory[1].memory == GUARD).all()

    @pytest.mark.parametrize(
        ("ids", "skip"),
        [
            ([0, 8], 0),
            ([0, -1], 0),
            ([0, 1, 2], 0),
            ([0], 0),
            ([0, 1], 3),
            ([0, 1], -1),
        ],
    )
    def test_by_wrong_arguments(
        self, device: CudaDevice, memory: tuple[View, Host], ids: list[int], skip: int
    ) -> None:
        with pytest.raises(DeviceError):
            device.scatter(one(ids, slots_of(memory), skip))
        if not skip:
            with pytest.raises(DeviceError):
                device.gather(one(ids, slots_of(memory)))

    def test_before_a_signal_that_never_comes(
        self, device: CudaDevice, memory: tuple[View, Host]
    ) -> None:
        """Until the lease ends. The stream is free again."""
        for _ in range(2):
            for move in (device.gather, device.scatter):
                until_ns = time.monotonic_ns() + 10**7
                with pytest.raises(DeviceError, match="did not come in time"):
                    move(one([0, 1], slots_of(memory), after=1 << 40, until_ns=until_ns))

    def test_after_the_deadline_of_signals(
        self, device: CudaDevice, memory: tuple[View, Host], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "_SIGNAL_DEADLINE_S", 0.01)
        with pytest.raises(DeviceError, match="did not come in time"):
            device.gather(one([0, 1], slots_of(memory), after=1 << 40))

    def test_after_the_lease(
        self, engine: GpuExporter, device: CudaDevice, memory: tuple[View, Host]
    ) -> None:
        for after in (None, engine.write_late(1)):
            engine.ask("wait")
            for move in (device.gather, device.scatter):
                with pytest.raises(DeviceError, match="lease on the blocks"):
                    move(one([0], slots_of(memory, 1), after=after, until_ns=1))


def test_a_ticket_needs_signals(engine: GpuExporter, memory: tuple[View, Host]) -> None:
    device = opened(engine, LAYOUT, unpinned_gpus())
    with pytest.raises(DeviceError, match="registered no signals"):
        device.gather(one([0], slots_of(memory, 1), after=1))
    device.gather(one([0], slots_of(memory, 1)))
    device.close()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failed


def waits_of_copies() -> int:
    """How often a copy was waited for: one by a kernel has a table copied first."""
    calls = ("cuEventSynchronize", "cuMemcpyHtoDAsync_v2")
    return sum(cuda_driver.get(f"{call}.called") for call in calls)


class TestHang:
    @pytest.fixture(autouse=True)
    def goes_on(self) -> Iterator[None]:
        yield
        cuda_driver.set("hang", 0)

    def test_close_waits_for_a_call(self, device: CudaDevice, memory: tuple[View, Host]) -> None:
        cuda_driver.set("hang", -1)
        called = waits_of_copies()
        copy, failed = in_thread(lambda: device.gather(one([0, 1], slots_of(memory))))
        wait_until(lambda: waits_of_copies() > called)
        close, _ = in_thread(device.close)
        close.join(0.05)
        assert copy.is_alive()
        assert close.is_alive()
        cuda_driver.set("hang", 0)
        copy.join()
        close.join()
        assert not failed
        with pytest.raises(DeviceError, match="no longer mapped"):
            device.gather(one([0, 1], slots_of(memory)))


class TestTheDriverRefuses:
    def test_a_call_that_fails_halfway_is_drained(
        self, engine: GpuExporter, device: CudaDevice, memory: tuple[View, Host]
    ) -> None:
        """Its stream serves the next call."""
        content = engine.write(2)
        cuda_driver.set("delay_us", 2000)
        for function in ("cuMemcpyDtoHAsync_v2", "cuEventRecord"):
            cuda_driver.fail("cuMemcpyBatchAsync", 1)  # the copies are made one by one then
            cuda_driver.fail(function, 1, at=2 if function.startswith("cuMemcpy") else 1)
            with pytest.raises(DeviceError, match=rf"{function} failed with CUDA error 1 "):
                device.gather(one([0, 1], slots_of(memory)))
        slots = slots_of(memory)
        device.gather(one([0, 1], slots))
        assert b"".join(slots) == content[: 2 * PAGE]

    def test_an_end_that_is_not_known_ends_the_process(
        self, device: CudaDevice, memory: tuple[View, Host]
    ) -> None:
        cuda_driver.fail("cuEventSynchronize", 1, times=2)
        with pytest.raises(GpuLost, match="not known which copies have ended"):
            device.scatter(one([0, 1], slots_of(memory)))
        device.use_context()
        driver.synchronize()

    @pytest.mark.parametrize("function", ["cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate"])
    def test_out_of_memory_for_a_call(
        self, engine: GpuExporter, memory: tuple[View, Host], function: str
    ) -> None:
        """Only that call fails."""
        content = engine.write(3)
        gpus = Gpus(BY_KERNEL, memory[1].pieces_of)
        device = opened(engine, LAYOUT, gpus)
        slots = slots_of(memory)
        for _ in range(3):
            cuda_driver.fail(function, 2)
            with pytest.raises(DeviceError, match="too little free memory"):
                device.gather(one([0, 1], slots))
        device.gather(one([0, 1], slots))
        assert b"".join(slots) == content[: 2 * PAGE]
        device.close()

    @each_way
    def test_opening_leaves_nothing_if_a_call_fails(
        self, engine: GpuExporter, memory: tuple[View, Host], direct_copy_bytes: int
    ) -> None:
        functions = ["cuMemAlloc_v2", "cuStreamCreate", "cuEventCreate", "cuIpcOpenMemHandle_v2"]
        functions += ["cuModuleLoadData", "cuModuleGetFunction", "cuDeviceGetAttribute"]
        before = cuda_driver.counts()
        for function in functions:
            for at in range(1, 6):
                cuda_driver.fail(function, 2, at=at)
                gpus = unpinned_gpus(direct_copy_bytes)
                try:
                    device = opened(engine, LAYOUT, gpus, engine.signals)
                except DeviceError:
                    pass
                else:
                    device.close()
                cuda_driver.fail(function, 0)
                left = cuda_driver.counts()
                assert {**left, "modules": 0} == {**before, "modules": 0}, (function, at)

    @pytest.mark.parametrize(
        ("code", "cause"),
        [(221, "libnvidia-ptxjitcompiler is missing"), (223, "unset CUDA_DISABLE_PTX_JIT")],
    )
    def test_kernels_that_cannot_be_compiled_have_a_cause(
        self, engine: GpuExporter, memory: tuple[View, Host], code: int, cause: str
    ) -> None:
        cuda_driver.fail("cuModuleLoadData", code)
        with pytest.raises(DeviceError, match=cause):
            opened(engine, LAYOUT, unpinned_gpus(BY_KERNEL))

    def test_a_driver_that_is_too_old_for_kernels(
        self, engine: GpuExporter, memory: tuple[View, Host]
    ) -> None:
        """It is known when the engine registers."""
        cuda_driver.set("ptx_version", 79)
        with pytest.raises(DeviceError, match="older than the kernels' PTX"):
            opened(engine, LAYOUT, unpinned_gpus(BY_KERNEL))
        opened(engine, LAYOUT, unpinned_gpus(DIRECT)).close()


class TestLost:
    """A sticky error: every call says so, and closing ends."""

    @each_way
    def test_every_call_says_so(self, engine: GpuExporter, direct_copy_bytes: int) -> None:
        cuda_driver.reset()
        host = Host(64 << 10, 1, 1)
        gpus = Gpus(direct_copy_bytes, host.pieces_of)
        device = opened(engine, LAYOUT, gpus)
        cuda_driver.set("lose", 700)
        for _ in range(2):
            for move in (device.gather, device.scatter):
                with pytest.raises(GpuLost, match="error 700"):
                    move(one([0, 1], host.slots([PAGE] * 2, 0)))
        with pytest.raises(GpuLost):
            opened(engine, LAYOUT, gpus)
        with pytest.raises(GpuLost):
            device.close()
        device.close()
        cuda_driver.reset()


class TestTheEngineEnds:
    def test_its_blocks_are_left_alone(self) -> None:
        engine = GpuExporter(SIZE, None, cuda_driver.environment())
        try:
            with viewed(engine) as memory:
                gpus = Gpus(DIRECT, memory[1].pieces_of)
                device = opened(engine, LAYOUT, gpus, engine.signals)
                slots = slots_of(memory)
                waiting, failed = in_thread(
                    lambda: device.gather(one([0, 1], slots, after=1 << 40))
                )
                time.sleep(0.05)
                engine.kill()
                waiting.join(20)
                assert "has ended" in str(failed)
                with pytest.raises(DeviceError, match="has ended"):
                    device.scatter(one([0, 1], slots))
                device.close()
                with pytest.raises(DeviceError, match="not visible: it has ended"):
                    opened(engine, LAYOUT, gpus)
        finally:
            engine.kill()


class TestTwoGpus:
    def test_one_that_hangs_delays_only_its_own(self, engine: GpuExporter) -> None:
        other = GpuExporter(SIZE, None, cuda_driver.environment(devices=2), gpu=1)
        cuda_driver.reset()
        cuda_driver.set("devices", 2)
        try:
            content = other.write(9)
            host = Host(64 << 10, 1, 1)
            gpus = Gpus(BY_KERNEL, host.pieces_of)
            hung = opened(engine, LAYOUT, gpus)
            device = opened(other, LAYOUT, gpus)
            cuda_driver.set("hang", 1)  # its gathers
            copy, failed = in_thread(lambda: hung.gather(one([0, 1], host.slots([PAGE] * 2, 0))))
            time.sleep(0.05)
            slots = host.slots([PAGE] * 2, 0, 8192)
            for _ in range(3):
                device.gather(one([3, 1], slots))
                assert b"".join(slots) == content[3 * PAGE : 4 * PAGE] + content[PAGE : 2 * PAGE]
            device.close()
            assert copy.is_alive()
            cuda_driver.set("hang", 0)
            copy.join()
            assert not failed
            hung.close()
            host.close()
            assert set(cuda_driver.counts()) <= {"contexts", "modules"}
        finally:
            other.kill()
            cuda_driver.reset()

    def test_storages_of_two_are_refused(self, engine: GpuExporter) -> None:
        first, second = LAYOUT.segments[0], replace(LAYOUT.segments[0], storage=1)
        layout = replace(LAYOUT, segments=(first, second))
        handle = range_of(engine, PAGE * BLOCKS)
        cuda_driver.reset()
        for changes, said in (
            ({"device_uuid": "GPU-1"}, "different GPUs"),
            ({"pid": 1}, "different processes"),
        ):
            with pytest.raises(DeviceError, match=said):
                CudaDevice([layout], [handle, changed(handle, **changes)], unpinned_gpus())
