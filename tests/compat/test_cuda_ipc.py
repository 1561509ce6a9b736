# SPDX-License-Identifier: Apache-2.0
"""A tensor on a GPU that goes to another process, over the driver of the tests."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.custom_types import CudaIPCWrapper, IPCCacheEngineKey
from lmcache_redis.device import driver
from lmcache_redis.device.handles import CudaFdHandle
from lmcache_redis.errors import DeviceError, FormatError
from tests import cuda_driver
from tests.compat.gpu_tensors import SHAPE, gpu_tensor
from tests.cuda_driver.engine import PIECE_BYTES, Host, gpus

pytestmark = pytest.mark.skipif(cuda_driver.missing() is not None, reason="no gcc")

OBJECT_KEY = ObjectKey(b"hash", "model", 0x01000100)


@pytest.fixture
def host() -> Iterator[Host]:
    with gpus() as host:
        yield host


@pytest.fixture
def tensor(host: Host) -> torch.Tensor:
    return gpu_tensor(host)


def the_documented_calls(tensor: Any) -> Any:
    wrapper = CudaIPCWrapper(tensor)
    data = CudaIPCWrapper.Serialize(wrapper)
    assert type(data) is bytes
    restored_wrapper = CudaIPCWrapper.Deserialize(data)
    restored_tensor = restored_wrapper.to_tensor()
    assert restored_wrapper == wrapper
    key = IPCCacheEngineKey(
        model_name="llama-7b",
        world_size=4,
        worker_id=0,
        chunk_hash=b"\x01\x02\x03\x04",
    )
    lookup_key = key.no_worker_id_version()
    assert (lookup_key.worker_id, lookup_key.chunk_hash) == (None, key.chunk_hash)
    assert IPCCacheEngineKey.Deserialize(data=IPCCacheEngineKey.Serialize(obj=key)) == key
    return restored_tensor


def test_the_documented_calls(tensor: Any) -> None:
    assert the_documented_calls(tensor) is tensor


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_the_documented_calls_on_a_gpu() -> None:
    tensor = torch.randn(256, 128, device="cuda:0")
    restored = the_documented_calls(tensor)
    assert restored.data_ptr() == tensor.data_ptr()
    assert torch.equal(restored, tensor)


class TestWrapper:
    def test_fields(self, tensor: torch.Tensor) -> None:
        wrapper = CudaIPCWrapper.Deserialize(CudaIPCWrapper.Serialize(CudaIPCWrapper(tensor)))
        assert wrapper.dtype is torch.float32
        assert wrapper.shape == torch.Size([256, 128])
        assert wrapper.device_uuid == driver.device_uuid(0)

    def test_is_equal_if_its_fields_are(self, tensor: torch.Tensor, host: Host) -> None:
        one, same, other = (CudaIPCWrapper(each) for each in (tensor, tensor, gpu_tensor(host)))
        assert one == same
        assert hash(one) == hash(same)
        assert one != other
        assert one != one.handle

    def test_the_exporter_gets_its_tensor_while_that_lives(self, host: Host) -> None:
        wrapper = CudaIPCWrapper(gpu_tensor(host))
        with pytest.raises(DeviceError, match="process that made it"):
            wrapper.to_tensor()

    def test_descriptors_are_open_while_the_tensor_lives(self, host: Host) -> None:
        tensor = gpu_tensor(host, "pieces")
        memory = CudaIPCWrapper(tensor).handle.memory
        assert isinstance(memory, CudaFdHandle)
        for fd in memory.fds:
            os.fstat(fd)
        del tensor
        gc.collect()
        for fd in memory.fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def test_is_opened_only_while_its_exporter_runs(self, tensor: torch.Tensor) -> None:
        handle = CudaIPCWrapper(tensor).handle
        gone = replace(handle, memory=replace(handle.memory, pid=os.getpid() + (1 << 22)))
        wrapper = CudaIPCWrapper.Deserialize(
            CudaIPCWrapper.Serialize(CudaIPCWrapper.from_handle(gone))
        )
        with pytest.raises(DeviceError, match="not visible"):
            wrapper.to_tensor()

    @pytest.mark.parametrize(
        "changes",
        [
            {"memory": {"memory_handle": b"short"}},
            {"memory": {"size_bytes": 0}},
            {"memory": {"size_bytes": 1}},
            {"memory": {"offset_bytes": PIECE_BYTES}},
            {"dtype": "float17"},
            {"shape": (-1, -1)},
            {"shape": (2**62, 2**62)},
        ],
    )
    def test_a_malformed_handle_is_refused(
        self, tensor: torch.Tensor, changes: dict[str, Any]
    ) -> None:
        handle = CudaIPCWrapper(tensor).handle
        memory = replace(handle.memory, **changes.pop("memory", {}))
        handle = replace(handle, memory=memory, **changes)
        data = CudaIPCWrapper.Serialize(CudaIPCWrapper.from_handle(handle))
        with pytest.raises(FormatError, match="not an encoded CUDA IPC wrapper"):
            CudaIPCWrapper.Deserialize(data)

    def test_only_whole_contiguous_tensors(self, tensor: torch.Tensor) -> None:
        for part in (tensor[1:], tensor.T, tensor[:, 1:]):
            with pytest.raises(DeviceError, match="only contiguous tensors at the start"):
                CudaIPCWrapper(part)

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            (torch.zeros(4), "on cpu has no CUDA IPC handle"),
            ([1], "a tensor is shared, not a list"),
        ],
    )
    def test_only_tensors_of_a_gpu(self, value: Any, why: str) -> None:
        with pytest.raises(DeviceError, match=why):
            CudaIPCWrapper(value)

    @pytest.mark.parametrize("value", [None, "abc", OBJECT_KEY])
    def test_only_its_own_kind_is_serialized(self, value: Any) -> None:
        for kind in (CudaIPCWrapper, IPCCacheEngineKey):
            with pytest.raises(FormatError, match=f"not a {type(value).__name__}"):
                kind.Serialize(value)  # type: ignore[attr-defined]


@pytest.mark.servers
def test_another_process_opens_the_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its tensor is freed."""

    def flat_tensor(opened: Any) -> torch.Tensor:
        """As torch's own takes ``__cuda_array_interface__``, if it is built for CUDA."""
        found = opened.__cuda_array_interface__
        raw = (ctypes.c_uint8 * found["shape"][0]).from_address(found["data"][0])
        raw.opened = opened
        return torch.frombuffer(raw, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", flat_tensor)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.compat.gpu_tensors"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    ) as exporter:
        assert exporter.stdin is not None
        assert exporter.stdout is not None
        for memory in ("allocations", "segment", "pieces"):
            print(memory, file=exporter.stdin, flush=True)
            wrapper = CudaIPCWrapper.Deserialize(bytes.fromhex(exporter.stdout.readline()))
            tensor = wrapper.to_tensor()
            assert torch.equal(tensor, torch.arange(tensor.numel()).view(SHAPE).float())
            part = tensor[3]
            opened = "mappings" if memory == "pieces" else "opened"
            del tensor
            assert cuda_driver.counts()[opened] > 0
            assert part[0] == 3 * SHAPE[1]
            del part
            assert opened not in cuda_driver.counts()
            assert "refusals" not in cuda_driver.counts()
        exporter.stdin.close()
