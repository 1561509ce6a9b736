# SPDX-License-Identifier: Apache-2.0
"""Opening an engine's GPU memory: handles that are right, stale, wrong or forged."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_redis.device import driver, mapping
from lmcache_redis.device.handles import CudaFdHandle
from lmcache_redis.device.mapping import EngineMemory
from lmcache_redis.errors import DeviceError, GpuLost
from tests import cuda_driver
from tests.device.gpu_calls import NEEDS_DRIVER, changed
from tests.device.gpu_exporter import PIECE_BYTES, GpuExporter

pytestmark = NEEDS_DRIVER


@pytest.fixture(scope="module", params=[None, 3], ids=["one allocation", "pieces"])
def either(request: pytest.FixtureRequest) -> Iterator[GpuExporter]:
    size_bytes = (request.param or 1) * PIECE_BYTES
    with GpuExporter(size_bytes, request.param, cuda_driver.environment()) as started:
        yield started


@pytest.fixture(scope="module")
def pieces() -> Iterator[GpuExporter]:
    with GpuExporter(2 * PIECE_BYTES, 2, cuda_driver.environment()) as started:
        yield started


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """Whatever is refused, nothing stays mapped, and no descriptor stays open."""
    cuda_driver.reset()
    driver.set_context(driver.retain_context(0))
    open_files = len(os.listdir("/proc/self/fd"))
    yield
    assert cuda_driver.counts().keys() <= {"contexts", "refusals"}
    assert len(os.listdir("/proc/self/fd")) == open_files
    cuda_driver.reset()


class TestOfAnEngine:
    def test_several_ranges_open_it_once(self, either: GpuExporter) -> None:
        either.write(1)
        first = changed(either.memory, size_bytes=5)
        second = changed(either.memory, offset_bytes=9, size_bytes=7)
        memory = EngineMemory([first, second], 0)
        counts = cuda_driver.counts()
        assert counts.get("opened", 0) + counts.get("reservations", 0) == 1
        base = memory.storages[0].address
        assert memory.storages == [(base, 5), (base + 9, 7)]
        memory.close()
        memory.close()

    def test_a_second_mapping_outlives_the_first(self, either: GpuExporter) -> None:
        """As when an engine registers again: the new mapping comes before the old one's end."""
        first, second = (EngineMemory([either.memory], 0) for _ in range(2))
        first.close()
        address = second.storages[0].address
        host = driver.allocate_pinned(8)
        stream = driver.create_stream()
        driver.enqueue_copy_out(host, address, 8, stream)
        driver.synchronize_stream(stream)
        driver.destroy_stream(stream)
        driver.free_pinned(host)
        second.close()

    def test_another_process_than_the_one_that_registered(self, either: GpuExporter) -> None:
        with pytest.raises(DeviceError, match="not the engine that registered"):
            EngineMemory([changed(either.memory, pid_start_time=1)], 0)

    def test_a_lost_gpu_is_told_apart(self, either: GpuExporter) -> None:
        for function in ("cuIpcOpenMemHandle_v2", "cuMemImportFromShareableHandle"):
            cuda_driver.fail(function, 999)
        with pytest.raises(GpuLost):
            EngineMemory([either.memory], 0)
        cuda_driver.reset()  # the driver does not even unmap


class TestForged:
    def test_ipc_handle(self, engine: GpuExporter) -> None:
        forged = changed(engine.memory, memory_handle=os.urandom(64))
        said = r"KV cache of process \d+ on GPU .* cannot be opened: cuIpcOpenMemHandle"
        with pytest.raises(DeviceError, match=said):
            EngineMemory([engine.memory, forged], 0)

    def test_claim_beyond_the_allocation(self, engine: GpuExporter) -> None:
        claimed = changed(engine.memory, allocation_bytes=2 * PIECE_BYTES)
        with pytest.raises(DeviceError, match=f"of {2 * PIECE_BYTES} bytes .* has {PIECE_BYTES}"):
            EngineMemory([claimed], 0)

    def test_claim_that_the_driver_does_not_answer(self, engine: GpuExporter) -> None:
        """It is believed."""
        cuda_driver.fail("cuMemGetAddressRange_v2", 500)
        EngineMemory([engine.memory], 0).close()
        cuda_driver.fail("cuMemGetAddressRange_v2", 700)
        with pytest.raises(GpuLost):
            EngineMemory([engine.memory], 0)
        cuda_driver.reset()

    def test_an_allocation_that_may_share_a_block(self, engine: GpuExporter) -> None:
        """Refused before it is opened: which bytes would be its own is not told."""
        small = changed(engine.memory, allocation_bytes=4096, size_bytes=4096)
        with pytest.raises(DeviceError, match=r"4096 bytes .* whole blocks of 2 MiB"):
            EngineMemory([small], 0)
        assert not cuda_driver.get("cuIpcOpenMemHandle_v2.called")

    def test_own_handle(self) -> None:
        """Of this process: the driver refuses it."""
        address = driver.allocate(4096)
        mine = driver.export_memory(address)
        with pytest.raises(DeviceError, match="handle that this process made itself"):
            driver.open_memory(mine)
        driver.free(address)

    @pytest.mark.parametrize("fd", [0, 999])
    def test_descriptor_of_something_else(self, pieces: GpuExporter, fd: int) -> None:
        assert isinstance(pieces.memory, CudaFdHandle)
        forged = changed(pieces.memory, fds=(pieces.memory.fds[0], fd))
        with pytest.raises(DeviceError, match=r"it has closed them|cannot be opened"):
            EngineMemory([forged], 0)

    def test_pieces_of_another_size(self, pieces: GpuExporter) -> None:
        for size in (PIECE_BYTES // 2, 2 * PIECE_BYTES):
            forged = changed(pieces.memory, piece_bytes=size, size_bytes=1)
            with pytest.raises(DeviceError, match="cannot be opened"):
                EngineMemory([forged], 0)

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            (errno.EPERM, "ptrace_scope"),
            (errno.ENOSYS, "Linux 5.6"),
            (errno.EIO, "Input/output error"),
        ],
    )
    def test_what_the_system_refuses_is_a_sentence(
        self, pieces: GpuExporter, code: int, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Refusing:
            @staticmethod
            def syscall(*arguments: Any) -> int:
                return -1

        monkeypatch.setattr(mapping, "_libc", Refusing)
        monkeypatch.setattr(mapping.ctypes, "get_errno", lambda: code)
        with pytest.raises(DeviceError, match=said):
            EngineMemory([pieces.memory], 0)

    def test_memory_for_addresses_runs_out(self, pieces: GpuExporter) -> None:
        for function in ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
            cuda_driver.fail(function, 2)
            with pytest.raises(DeviceError, match=function):
                EngineMemory([pieces.memory], 0)
