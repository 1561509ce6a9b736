"""``CudaIPCWrapper``: a tensor in GPU memory that another process opens by its handle."""

from __future__ import annotations

import math
import os
import weakref
from typing import Any

import msgspec
import torch

from lmcache_redis.chunks.metadata import dtype_name, itemsize, torch_dtype
from lmcache_redis.device import driver, export
from lmcache_redis.device.handles import CudaHandle, check_exporter
from lmcache_redis.device.mapping import EngineMemory, check_handle
from lmcache_redis.errors import DeviceError, FormatError


class TensorHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contiguous tensor at the start of its storage. memory: the storage."""

    memory: CudaHandle
    dtype: str
    shape: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TensorHandle)
# CUDA does not open a handle in the process that made it: there, `to_tensor` looks here.
_exported: weakref.WeakValueDictionary[TensorHandle, torch.Tensor] = weakref.WeakValueDictionary()


class CudaIPCWrapper:
    """A tensor in GPU memory. The handle is valid while the exported tensor lives.

    Wrappers with equal handles are equal. Raises DeviceError if the tensor is not on a GPU, not
    contiguous, not at offset 0 of its storage, or in memory that CUDA cannot export.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not hasattr(tensor, "untyped_storage"):
            raise DeviceError(f"a tensor is shared, not a {type(tensor).__name__}")
        gpu = export.gpu_of(tensor)
        if gpu is None:
            raise DeviceError(f"a tensor on {tensor.device} has no CUDA IPC handle")
        if not tensor.is_contiguous() or tensor.storage_offset() != 0:
            raise DeviceError(
                f"a tensor of shape {list(tensor.shape)}, strides {list(tensor.stride())} and "
                f"storage offset {tensor.storage_offset()}: only contiguous tensors at the start "
                "of their storage are exported"
            )
        (memory,) = export.export_storages([tensor.untyped_storage()], gpu)
        weakref.finalize(tensor, export.withdraw, [memory])
        self.handle = TensorHandle(memory, dtype_name(tensor.dtype), tuple(tensor.shape))
        _exported[self.handle] = tensor

    @classmethod
    def from_handle(cls, handle: TensorHandle) -> CudaIPCWrapper:
        """Wraps a received handle. `to_tensor` checks it."""
        wrapper = cls.__new__(cls)
        wrapper.handle = handle
        return wrapper

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.handle.dtype)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.handle.shape)

    @property
    def device_uuid(self) -> str:
        return self.handle.memory.device_uuid

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaIPCWrapper) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)

    @staticmethod
    def Serialize(obj: CudaIPCWrapper) -> bytes:
        """The fields of the handle as msgpack. Raises FormatError for what is no wrapper."""
        if not isinstance(obj, CudaIPCWrapper):
            raise FormatError(f"a CudaIPCWrapper is serialized, not a {type(obj).__name__}")
        return _encoder.encode(obj.handle)

    @staticmethod
    def Deserialize(data: bytes | bytearray | memoryview) -> CudaIPCWrapper:
        """The inverse of `Serialize`. Raises FormatError unless the handle is well formed."""
        try:
            handle = _decoder.decode(data)
            _check(handle)
        except (msgspec.MsgspecError, UnicodeDecodeError, DeviceError) as error:
            raise FormatError(f"not an encoded CUDA IPC wrapper: {error}") from None
        return CudaIPCWrapper.from_handle(handle)

    def to_tensor(self) -> torch.Tensor:
        """Map the memory and return the tensor. The memory is unmapped when its storage is freed.

        In the process that made the handle, this is the exported tensor itself, while it lives.
        Raises DeviceError if the handle is malformed, its process has ended, its GPU is not visible
        here, or CUDA does not open it.
        """
        handle = self.handle
        _check(handle)
        check_exporter(handle.memory)
        if handle.memory.pid == os.getpid():
            exported = _exported.get(handle)
            if exported is None:
                raise DeviceError("a CUDA IPC handle cannot be opened by the process that made it")
            return exported
        size_bytes = math.prod(handle.shape) * itemsize(handle.dtype)
        flat = _flat_tensor(_OpenedMemory(handle.memory))
        return flat[:size_bytes].view(torch_dtype(handle.dtype)).view(handle.shape)


class _OpenedMemory:
    """Memory of another process, until this object is freed: torch keeps it with the tensor."""

    def __init__(self, handle: CudaHandle) -> None:
        visible = driver.device_uuids()
        if handle.device_uuid not in visible:
            raise DeviceError(
                f"GPU {handle.device_uuid} is not visible here (visible: {', '.join(visible)})"
            )
        gpu = visible.index(handle.device_uuid)
        context = driver.retain_context(gpu)
        try:
            with driver.in_context(context):
                memory = EngineMemory([handle], gpu)
        except BaseException:
            driver.release_context(gpu)
            raise
        weakref.finalize(self, _close, memory, gpu, context).atexit = False
        address, size_bytes = memory.storages[0]
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _flat_tensor(memory: Any) -> torch.Tensor:
    return torch.as_tensor(memory)


def _close(memory: EngineMemory, gpu: int, context: int) -> None:
    with driver.in_context(context):
        driver.synchronize()
        memory.close()
    driver.release_context(gpu)


def _check(handle: TensorHandle) -> None:
    """Raise DeviceError unless the handle is well formed and its tensor fits its storage."""
    check_handle(handle.memory)
    try:
        item_bytes = itemsize(handle.dtype)
    except FormatError as error:
        raise DeviceError(f"a CUDA IPC handle: {error}") from error
    if any(size < 0 for size in handle.shape):
        raise DeviceError(f"a CUDA IPC handle of shape {list(handle.shape)}")
    if math.prod(handle.shape) * item_bytes > handle.memory.size_bytes:
        raise DeviceError(
            f"a CUDA tensor of shape {list(handle.shape)} ({handle.dtype}) in "
            f"{handle.memory.size_bytes} bytes"
        )
