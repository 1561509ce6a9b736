"""CUDA IPC handles: everything about them that needs no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_redis.device import cuda_ipc
from lmcache_redis.device.blocks import view_tensors
from lmcache_redis.device.cuda_ipc import (
    CudaIPCWrapper,
    bare_memory_handle,
    check_handle,
    contiguous,
    refusal,
)
from lmcache_redis.device.handles import CudaIPCHandle
from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import process_start_time

RAW = bytes(range(64))
NO_GPU = not torch.cuda.is_available()


def handle(**changes: Any) -> CudaIPCHandle:
    pid = os.getppid()
    fields: dict[str, Any] = {
        "pid": pid,
        "pid_start_time": process_start_time(pid),
        "device_uuid": "GPU-0",
        "memory_handle": RAW,
        "storage_size_bytes": 96,
        "storage_offset_bytes": 512,
        "ref_counter_handle": b"/torch_12_345_0",
        "ref_counter_offset": 7,
        "dtype": "float16",
        "shape": (2, 3, 8),
        "stride": (24, 8, 1),
    }
    return CudaIPCHandle(**(fields | changes))


class TestBareMemoryHandle:
    @pytest.mark.parametrize("torch_handle", [RAW, b"\x01c" + RAW, b"\x03c" + RAW])
    def test_of_any_torch(self, torch_handle: bytes) -> None:
        assert bare_memory_handle(torch_handle) == RAW

    @pytest.mark.parametrize("torch_handle", [b"\x02e" + RAW, b"\x03e" + bytes(20)])
    def test_expandable_segments_name_the_setting(self, torch_handle: bytes) -> None:
        with pytest.raises(DeviceError, match=r"expandable_segments:True in PYTORCH_CUDA_ALLOC"):
            bare_memory_handle(torch_handle)

    @pytest.mark.parametrize("torch_handle", [b"", b"\x02", RAW[:-1], b"\x02x" + RAW])
    def test_unknown(self, torch_handle: bytes) -> None:
        with pytest.raises(DeviceError, match="not known"):
            bare_memory_handle(torch_handle)


class TestRefusal:
    @pytest.mark.parametrize(
        ("error", "said"),
        [
            ("Tensors allocated with expandable_segments:True cannot be", "expandable_segments"),
            ("cudaMallocAsync does not yet support shareIpcHandle", "backend:cudaMallocAsync"),
            ("CUDA error: invalid argument", "--enable-sleep-mode and --enable-cumem-allocator"),
            ("CUDA error: operation not supported", "--enable-sleep-mode"),
            ("Attempted to send CUDA tensor received from another process", "alone may export"),
            ("out of luck", "out of luck"),
        ],
    )
    def test_names_the_setting(self, error: str, said: str) -> None:
        assert said in refusal(error)


class TestCheckHandle:
    def test_accepts_what_fits(self) -> None:
        check_handle(handle())
        check_handle(handle(dtype="uint8", shape=(96,), stride=(1,)))
        check_handle(handle(shape=(0, 3), stride=(3, 1)))
        check_handle(handle(ref_counter_handle=b"/torch_12_345"))

    @pytest.mark.parametrize(
        "changes",
        [
            {"memory_handle": RAW[:-1]},
            {"memory_handle": b"\x02c" + RAW},
            {"storage_size_bytes": 0},
            {"storage_size_bytes": -1},
            {"storage_size_bytes": 95},
            {"storage_size_bytes": 2**63},
            {"storage_offset_bytes": -1},
            {"storage_offset_bytes": 2**63 - 1},
            {"ref_counter_handle": b"/etc_passwd"},
            {"ref_counter_handle": b"/torch_1_2_3/../x"},
            {"ref_counter_handle": b"/torch_1_2_3\n"},
            {"ref_counter_handle": b"/torch_1_2\x00_3"},
            {"ref_counter_offset": -1},
            {"ref_counter_offset": 10_000},
            {"dtype": "float17"},
            {"shape": (-2, -3, 8)},
            {"shape": (2, 3, 9), "stride": (27, 9, 1)},
            {"stride": (24, 8)},
            {"stride": (0, 8, 1)},
            {"stride": (8, 16, 1)},
            {"shape": (2**62, 2**62), "stride": (2**62, 1)},
        ],
    )
    def test_refuses(self, changes: dict[str, Any]) -> None:
        with pytest.raises(DeviceError):
            check_handle(handle(**changes))

    @given(st.lists(st.integers(0, 5), max_size=4))
    def test_contiguous_is_what_torch_says(self, shape: list[int]) -> None:
        assert contiguous(tuple(shape)) == torch.empty(shape).stride()


class FakeTensor:
    """What `CudaIPCWrapper` asks of a tensor on a GPU."""

    device = torch.device("cuda:0")
    dtype = torch.float16
    shape = (2, 3, 8)

    def __init__(self, shared: Any, *, offset: int = 0, dense: bool = True) -> None:
        self.shared = shared
        self.offset = offset
        self.dense = dense

    def is_contiguous(self) -> bool:
        return self.dense

    def storage_offset(self) -> int:
        return self.offset

    def stride(self) -> tuple[int, ...]:
        return (24, 8, 1)

    def untyped_storage(self) -> Any:
        def share() -> Any:
            if isinstance(self.shared, Exception):
                raise self.shared
            return self.shared

        return SimpleNamespace(_share_cuda_=share)


class TestWrapper:
    def test_fields(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_ipc, "device_uuid", lambda index: f"GPU-{index}")
        shared = (0, b"\x03c" + RAW, 96, 512, b"/torch_1_2_3", 7, bytes(64), True)
        made: Any = FakeTensor(shared)
        expected = handle(
            pid=os.getpid(),
            pid_start_time=process_start_time(os.getpid()),
            ref_counter_handle=b"/torch_1_2_3",
        )
        assert CudaIPCWrapper(made).handle == expected
        check_handle(expected)

    def test_memory_that_cannot_be_exported(self) -> None:
        tensor: Any = FakeTensor(RuntimeError("CUDA error: invalid argument"))
        with pytest.raises(DeviceError, match="--enable-sleep-mode"):
            CudaIPCWrapper(tensor)

    @pytest.mark.parametrize("change", [{"offset": 8}, {"dense": False}])
    def test_only_whole_contiguous_tensors(self, change: dict[str, Any]) -> None:
        tensor: Any = FakeTensor((), **change)
        with pytest.raises(DeviceError, match="only contiguous tensors at the start"):
            CudaIPCWrapper(tensor)

    def test_a_tensor_on_the_cpu(self) -> None:
        with pytest.raises(DeviceError, match="on cpu has no CUDA IPC handle"):
            CudaIPCWrapper(torch.zeros(4))
        with pytest.raises(DeviceError, match=r"'layer\.0' is on cpu, not on cuda"):
            view_tensors({"layer.0": torch.zeros(4, 4)}, "cuda")

    def test_from_a_handle(self) -> None:
        assert CudaIPCWrapper.from_handle(handle()).handle == handle()


class TestOpening:
    def test_checks_before_it_opens(self) -> None:
        forged = handle(ref_counter_offset=-1)
        with pytest.raises(DeviceError, match="reference counter"):
            CudaIPCWrapper.from_handle(forged).to_tensor()

    def test_an_exporter_that_has_ended(self) -> None:
        gone = handle(pid_start_time=1)
        with pytest.raises(DeviceError, match="has ended"):
            CudaIPCWrapper.from_handle(gone).to_tensor()

    def test_the_exporter_itself(self) -> None:
        pid = os.getpid()
        mine = handle(pid=pid, pid_start_time=process_start_time(pid))
        with pytest.raises(DeviceError, match="process that made it"):
            CudaIPCWrapper.from_handle(mine).to_tensor()

    @pytest.mark.skipif(not NO_GPU, reason="there is a GPU here")
    def test_no_gpu_here(self) -> None:
        with pytest.raises(DeviceError, match="this process sees none"):
            CudaIPCWrapper.from_handle(handle()).to_tensor()

    def test_a_gpu_that_is_not_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(cuda_ipc, "device_uuid", lambda index: f"GPU-{index + 1}")
        with pytest.raises(DeviceError, match=r"GPU-0 is not visible.*GPU-1, GPU-2.*VISIBLE"):
            CudaIPCWrapper.from_handle(handle()).to_tensor()
        assert cuda_ipc.device_index("GPU-2") == 1

    def test_shared_memory_of_another_container(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """CUDA would open the memory, but then no event of a store or retrieve."""

        def opened(*args: Any) -> None:
            raise AssertionError("it was opened")

        monkeypatch.setattr(cuda_ipc, "device_index", lambda uuid: 0)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
        with pytest.raises(DeviceError, match=r"/dev/shm of .* differs.*one IPC namespace"):
            CudaIPCWrapper.from_handle(handle()).to_tensor()

    def test_torch_names_shared_memory_as_is_expected_here(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Torch names CPU storages and counters in the same way."""
        storage = torch.zeros(4).untyped_storage()
        _, name, _ = storage._share_filename_cpu_()
        check_handle(handle(ref_counter_handle=name))
        cuda_ipc._check_shared_memory(handle(ref_counter_handle=name))
        del storage
        with pytest.raises(DeviceError, match="one IPC namespace"):
            cuda_ipc._check_shared_memory(handle(ref_counter_handle=name))

    def test_a_counter_that_is_no_memory_of_this_user(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Torch would write to it."""
        monkeypatch.setattr(cuda_ipc, "_SHM_DIRECTORY", str(tmp_path))
        counter = tmp_path / "torch_12_345_0"
        (tmp_path / "elsewhere").touch()
        counter.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DeviceError, match="not a file of this user"):
            cuda_ipc._check_shared_memory(handle())
        counter.unlink()
        counter.touch()
        cuda_ipc._check_shared_memory(handle())
        monkeypatch.setattr(os, "geteuid", lambda: counter.stat().st_uid + 1)
        with pytest.raises(DeviceError, match="not a file of this user"):
            cuda_ipc._check_shared_memory(handle())

    def test_what_cuda_will_not_open(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def refuse(*args: Any) -> None:
            assert args == (1, RAW, 96, 512, b"/torch_12_345_0", 7, bytes(64), False)
            raise RuntimeError("CUDA error: invalid device context")

        (tmp_path / "torch_12_345_0").touch()
        monkeypatch.setattr(cuda_ipc, "_SHM_DIRECTORY", str(tmp_path))
        monkeypatch.setattr(cuda_ipc, "device_index", lambda uuid: 1)
        monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
        with pytest.raises(DeviceError, match=r"invalid device context.*IPC and PID namespace"):
            CudaIPCWrapper.from_handle(handle()).to_tensor()


def test_round_trip_on_the_wire() -> None:
    encoded = msgspec.msgpack.encode(handle())
    assert msgspec.msgpack.decode(encoded, type=CudaIPCHandle) == handle()
