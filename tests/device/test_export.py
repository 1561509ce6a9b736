# SPDX-License-Identifier: Apache-2.0
"""An engine's GPU memory, exported over the driver of the tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from lmcache_redis.device import driver, export
from lmcache_redis.device.context import export_kv_caches
from lmcache_redis.device.handles import CudaFdHandle, CudaIPCHandle, own_process
from lmcache_redis.errors import DeviceError, GpuLost
from tests import cuda_driver
from tests.cuda_driver import more
from tests.cuda_driver.engine import PIECE_BYTES, Host, Memory, gpus
from tests.device.gpu_exporter import Range

pytestmark = pytest.mark.skipif(cuda_driver.missing() is not None, reason="no gcc")

BLOCKS = 8
SHAPE = (BLOCKS, 512, 128)  # 2 MiB
NAMES = ("layer.0", "layer.1", "layer.2")
SIZE = 2 << 20


@pytest.fixture
def host() -> Iterator[Host]:
    with gpus(devices=2) as host:
        yield host


def storages(host: Host, memory: Memory, gpu: int = 0) -> list[torch.UntypedStorage]:
    caches = host.tensors(NAMES, SHAPE, gpu=gpu, memory=memory)
    return [tensor.untyped_storage() for tensor in caches.values()]


def open_descriptors() -> set[str]:
    """Without that of the list itself."""
    return {fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


class TestWholeAllocations:
    def test_each_has_its_handle(self, host: Host) -> None:
        handles = export.export_storages(storages(host, "allocations", gpu=1), 1)
        assert len({each.memory_handle for each in handles}) == 3  # type: ignore[union-attr]
        for each in handles:
            assert isinstance(each, CudaIPCHandle)
            assert (each.pid, each.pid_start_time) == own_process()
            assert each.device_uuid == driver.device_uuid(1)
            assert (each.allocation_bytes, each.offset_bytes, each.size_bytes) == (SIZE, 0, SIZE)

    def test_storages_of_one_have_one_handle(self, host: Host) -> None:
        handles = export.export_storages(storages(host, "segment"), 0)
        assert len({each.memory_handle for each in handles}) == 1  # type: ignore[union-attr]
        offsets = [each.offset_bytes for each in handles]
        assert offsets == [offsets[0] + SIZE * number for number in range(3)]
        assert {each.size_bytes for each in handles} == {SIZE}
        assert cuda_driver.get("cuIpcGetMemHandle.called") == 1

    def test_a_storage_that_ends_behind_it_is_refused(self, host: Host) -> None:
        address = host.allocate(0, SIZE)
        with pytest.raises(DeviceError, match="of an allocation of 2097152 bytes"):
            export.export_storages([Range(address + 4096, SIZE)], 0)  # type: ignore[list-item]

    @pytest.mark.parametrize(("code", "kind"), [(999, GpuLost), (400, DeviceError)])
    def test_other_errors_keep_their_cause(
        self, host: Host, code: int, kind: type[DeviceError]
    ) -> None:
        found = storages(host, "allocations")
        cuda_driver.fail("cuIpcGetMemHandle", code)
        with pytest.raises(kind, match=rf"cuIpcGetMemHandle failed with CUDA error {code}"):
            export.export_storages(found, 0)
        assert not cuda_driver.get("cuMemRetainAllocationHandle.called")


class TestPieces:
    def test_each_piece_that_a_storage_touches_has_a_descriptor(self, host: Host) -> None:
        """The layers begin in the middle of a piece: neighbours have one in common."""
        found = storages(host, "pieces", gpu=1)
        before = open_descriptors()
        handles = export.export_storages(found, 1)
        for each in handles:
            assert isinstance(each, CudaFdHandle)
            assert each.piece_bytes == PIECE_BYTES
            assert (each.offset_bytes, each.size_bytes) == (PIECE_BYTES // 2, SIZE)
            assert each.device_uuid == driver.device_uuid(1)
        fds = [each.fds for each in handles if isinstance(each, CudaFdHandle)]
        assert [len(each) for each in fds] == [2, 2, 2]
        assert [first[1] for first in fds[:-1]] == [second[0] for second in fds[1:]]
        assert open_descriptors() - before == {str(fd) for each in fds for fd in each}
        export.withdraw(handles)
        assert open_descriptors() == before
        assert cuda_driver.counts()["handles"] == 4  # those that are mapped

    @pytest.mark.parametrize(
        "function", ["cuMemRetainAllocationHandle", "cuMemExportToShareableHandle"]
    )
    def test_a_failed_piece_leaves_nothing_open(self, host: Host, function: str) -> None:
        found = storages(host, "pieces")
        before = open_descriptors()
        cuda_driver.fail(function, 1, at=3)
        with pytest.raises(DeviceError, match="cannot share the memory"):
            export.export_storages(found, 0)
        assert open_descriptors() == before
        host.close()
        assert not cuda_driver.counts().get("handles")

    def test_memory_that_is_not_exportable_names_the_settings(self, host: Host) -> None:
        with pytest.raises(DeviceError) as caught:
            export.export_storages(storages(host, "unexportable pieces"), 0)
        for setting in (
            "--enable-sleep-mode", "--enable-cumem-allocator", "expandable_segments:True",
            "backend:cudaMallocAsync",
        ):  # fmt: skip
            assert setting in str(caught.value)

    def test_memory_for_a_fabric_is_called_so(self, host: Host) -> None:
        cuda_driver.set("fabric", 1)
        with pytest.raises(DeviceError, match="is FABRIC memory") as caught:
            export.export_storages(storages(host, "fabric pieces"), 0)
        for setting in ("--enable-sleep-mode", "--enable-cumem-allocator"):
            assert setting in str(caught.value)
        assert "expandable" not in str(caught.value)
        host.close()
        assert not cuda_driver.counts().get("handles")

    def test_pieces_of_several_sizes_are_refused(
        self, host: Host, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes = iter([PIECE_BYTES, PIECE_BYTES, 2 * PIECE_BYTES])
        find = driver.allocation_of
        monkeypatch.setattr(
            driver, "allocation_of", lambda at: find(at)._replace(size_bytes=next(sizes))
        )
        with pytest.raises(DeviceError, match="only equal pieces are shared"):
            export.export_storages(storages(host, "pieces"), 0)

    def test_a_gpu_that_is_lost_is_said_to_be(self, host: Host) -> None:
        found = storages(host, "pieces")
        cuda_driver.fail("cuMemRetainAllocationHandle", 719)
        with pytest.raises(GpuLost):
            export.export_storages(found, 0)


class TestCaches:
    def test_what_is_queued_is_written_first(self, host: Host) -> None:
        """vLLM zeroes a new cache: late zeros would overwrite what is loaded."""
        caches = host.tensors(NAMES, SHAPE)
        cuda_driver.set("delay_us", 50_000)
        host.write(caches["layer.2"], torch.ones(1))
        exported = export_kv_caches([caches], BLOCKS)
        assert caches["layer.2"].eq(1).all()
        assert (exported.device, len(exported.storages)) == ("cuda", 3)
        assert len(exported.groups[0].segments) == 3

    def test_a_process_has_one_page_of_signals_for_a_gpu(self, host: Host) -> None:
        first, again, other = (
            export_kv_caches([host.tensors(NAMES, SHAPE, gpu=gpu)], BLOCKS).signals
            for gpu in (0, 0, 1)
        )
        assert first is not None
        assert other is not None
        assert first is again
        assert (first.gpu, other.gpu) == (0, 1)
        assert first.handle != other.handle

    def test_the_context_of_the_thread_stays(self, host: Host) -> None:
        with host.on(1):
            export_kv_caches([host.tensors(NAMES, SHAPE, gpu=0)], BLOCKS)
            assert more.current_device() == 1

    def test_a_gpu_that_writes_no_values_is_refused(self, host: Host) -> None:
        cuda_driver.set("write_values", 0)
        with pytest.raises(DeviceError, match="does not write 64-bit values"):
            export_kv_caches([host.tensors(NAMES, SHAPE)], BLOCKS)
        assert not cuda_driver.get("cuIpcGetMemHandle.called")

    @pytest.mark.parametrize("where", [(0, 1), (0, None)])
    def test_one_worker_has_one_device(self, host: Host, where: Sequence[int | None]) -> None:
        caches: dict[str, torch.Tensor] = {}
        for number, gpu in enumerate(where):
            name = f"layer.{number}"
            caches |= (
                {name: torch.zeros(SHAPE)} if gpu is None else host.tensors([name], SHAPE, gpu=gpu)
            )
        with pytest.raises(DeviceError, match="only one device is supported"):
            export_kv_caches([caches], BLOCKS)


def test_the_gpu_of_a_tensor() -> None:
    assert export.gpu_of(torch.zeros(1)) is None
    on_a_gpu: Any = torch.empty(1, device="meta")
    with pytest.raises(DeviceError, match="on meta: only cpu and cuda"):
        export.gpu_of(on_a_gpu)
