# SPDX-License-Identifier: Apache-2.0
"""lmcache.v1.multiprocess.custom_types: keys, CUDA tensors and msgpack between processes.

The original pickles; nothing is pickled here. A wrapper is encoded as the plain fields of its
handle, which are validated when decoded.

Nothing of this package sends an `IPCCacheEngineKey`: engines send hashes (`messages`). It has one
encoding, LMCache's: msgpack of the dataclass, a map of its fields by name, alone or within other
values.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from lmcache_redis.chunks.keys import (
    MAX_WORLD_SIZE,
    ObjectKey,
    check_hash,
    model_name_bytes,
    token_array,
)
from lmcache_redis.chunks.metadata import MAX_SIZE, dtype_name, itemsize, torch_dtype
from lmcache_redis.device import driver, export
from lmcache_redis.device.handles import CudaHandle, check_exporter
from lmcache_redis.device.mapping import EngineMemory, check_handle
from lmcache_redis.errors import DeviceError, FormatError, check_int, checked_shape

__all__ = [
    "CudaIPCWrapper",
    "IPCCacheEngineKey",
    "KVCache",
    "get_customized_decoder",
    "get_customized_encoder",
]

MAX_KEY_TOKENS = 1 << 24
MAX_SALT_BYTES = 4096

# Extension types of msgpack.
_DTYPE, _WRAPPER = 1, 3


class TensorHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A contiguous tensor at the start of its storage. memory: the storage."""

    memory: CudaHandle
    dtype: str
    shape: tuple[int, ...]


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
        return msgspec.msgpack.encode(obj.handle)

    @staticmethod
    def Deserialize(data: bytes | bytearray | memoryview) -> CudaIPCWrapper:
        """The inverse of `Serialize`. Raises FormatError unless the handle is well formed."""
        try:
            handle = msgspec.msgpack.decode(data, type=TensorHandle)
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
        flat = torch.as_tensor(_OpenedMemory(handle.memory))
        return flat[:size_bytes].view(torch_dtype(handle.dtype)).view(handle.shape)


class _OpenedMemory:
    """Memory of another process, until this object is freed: torch keeps it with the tensor."""

    def __init__(self, handle: CudaHandle) -> None:
        gpu = driver.ordinal_of(handle.device_uuid)
        with driver.on_gpu(gpu):
            memory = EngineMemory([handle], gpu)
            driver.retain_context(gpu)  # until `_close`
        weakref.finalize(self, _close, memory, gpu).atexit = False
        address, size_bytes = memory.storages[0]
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _close(memory: EngineMemory, gpu: int) -> None:
    with driver.on_gpu(gpu):
        driver.synchronize()
        memory.close()
    driver.release_context(gpu)


def _check(handle: TensorHandle) -> None:
    """Raise DeviceError unless the handle is well formed and its tensor fits its storage."""
    check_handle(handle.memory)
    try:
        item_bytes = itemsize(handle.dtype)
    except FormatError as error:
        raise DeviceError(f"a CUDA IPC handle has no usable dtype: {error}") from error
    if any(size < 0 for size in handle.shape):
        raise DeviceError(f"a CUDA IPC handle has a size below 0: {list(handle.shape)}")
    if math.prod(handle.shape) * item_bytes > handle.memory.size_bytes:
        raise DeviceError(
            f"a CUDA tensor of shape {list(handle.shape)} ({handle.dtype}) in "
            f"{handle.memory.size_bytes} bytes"
        )


KVCache = list[CudaIPCWrapper]


@dataclass(frozen=True, order=True)
class IPCCacheEngineKey:
    """The name that an engine sends: a chunk hash, or tokens `start` to `end` of `token_ids`.

    Exactly one of chunk_hash (not empty) and token_ids (each below 2**32) is set; start and end are
    0 with a hash. worker_id is below world_size (1 to 255), or None: all workers.
    request_id identifies a request in logs and sessions; ==, hash and order ignore it. salt (0 to
    4,096 bytes) stands for everything else that the KV of the tokens depends on; it is empty with a
    chunk_hash, which covers it. Raises FormatError for anything else.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    chunk_hash: bytes | None = None
    token_ids: tuple[int, ...] | None = None
    start: int = 0
    end: int = 0
    request_id: str | None = field(default=None, compare=False)
    salt: bytes = b""

    def __post_init__(self) -> None:
        model_name_bytes(self.model_name)
        check_int("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        if self.worker_id is not None:
            check_int("worker_id", self.worker_id, 0, self.world_size - 1)
        if (self.chunk_hash is None) == (self.token_ids is None):
            raise FormatError("a key has either a chunk_hash or token_ids, exactly one of them")
        if self.token_ids is None:
            check_hash(self.chunk_hash)
        elif not isinstance(self.token_ids, tuple) or len(self.token_ids) > MAX_KEY_TOKENS:
            raise FormatError(f"token_ids is a tuple of at most {MAX_KEY_TOKENS} token ids")
        else:  # elements of tensors and arrays are integers too, but have no encoding
            object.__setattr__(self, "token_ids", tuple(token_array(self.token_ids)))
        if not isinstance(self.salt, bytes) or len(self.salt) > MAX_SALT_BYTES:
            raise FormatError(f"a salt is at most {MAX_SALT_BYTES} bytes, not {self.salt!r:.80}")
        if self.salt and self.token_ids is None:
            raise FormatError("a chunk_hash covers the salt: only token_ids take one")
        check_int("end", self.end, 0, len(self.token_ids or ()))
        check_int("start", self.start, 0, self.end)

    def no_worker_id_version(self) -> IPCCacheEngineKey:
        """The same key for all workers, as a lookup uses it."""
        return replace(self, worker_id=None)

    @classmethod
    def from_int_hash(
        cls,
        model_name: str,
        world_size: int,
        worker_id: int | None,
        chunk_hash: int,
        request_id: str | None = None,
    ) -> IPCCacheEngineKey:
        """A key with the eight bytes of an integer hash (`ObjectKey.IntHash2Bytes`)."""
        name = ObjectKey.IntHash2Bytes(chunk_hash)
        return cls(model_name, world_size, worker_id, name, request_id=request_id)

    @classmethod
    def from_token_ids(
        cls,
        model_name: str,
        world_size: int,
        worker_id: int | None,
        token_ids: Iterable[int],
        start: int = 0,
        end: int = 0,
        request_id: str = "",
    ) -> IPCCacheEngineKey:
        """A key of tokens ``start`` to ``end``."""
        tokens = tuple(token_ids)
        return cls(model_name, world_size, worker_id, None, tokens, start, end, request_id)

    @staticmethod
    def Serialize(obj: IPCCacheEngineKey) -> bytes:
        """What `get_customized_encoder` writes. Raises FormatError if a field has no encoding."""
        if not isinstance(obj, IPCCacheEngineKey):
            raise FormatError(f"an IPCCacheEngineKey is serialized, not a {type(obj).__name__}")
        try:
            return msgspec.msgpack.encode(obj)
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            raise FormatError(f"a key cannot be encoded: {error}") from None

    @staticmethod
    def Deserialize(data: bytes) -> IPCCacheEngineKey:
        """The inverse of `Serialize`; reads LMCache's keys too. Raises FormatError for other bytes.

        A field that a key does not have is ignored, as in LMCache.
        """
        try:
            return msgspec.msgpack.decode(data, type=IPCCacheEngineKey)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(f"not an encoded key: {error}") from None


def get_customized_encoder(type: Any) -> msgspec.msgpack.Encoder:
    """msgspec's encoder, for values of any type, also for wrappers and dtypes."""
    return msgspec.msgpack.Encoder(enc_hook=_encode_extension)


def get_customized_decoder(type: Any) -> msgspec.msgpack.Decoder[Any]:
    """msgspec's decoder for values of this type, which checks keys, wrappers and sizes."""
    return msgspec.msgpack.Decoder(type, dec_hook=_as_expected, ext_hook=_decode_extension)


def _encode_extension(value: Any) -> msgspec.msgpack.Ext:
    if isinstance(value, torch.dtype):
        return msgspec.msgpack.Ext(_DTYPE, dtype_name(value).encode())
    if isinstance(value, CudaIPCWrapper):
        return msgspec.msgpack.Ext(_WRAPPER, CudaIPCWrapper.Serialize(value))
    raise TypeError(f"{type(value).__name__} has no encoding")


def _decode_extension(code: int, data: memoryview) -> Any:
    if code == _DTYPE:
        return torch_dtype(str(data, "utf-8"))
    if code == _WRAPPER:
        return CudaIPCWrapper.Deserialize(bytes(data))
    raise FormatError(f"extension type {code} is unknown")


def _as_expected(expected: type, value: Any) -> Any:
    if expected is torch.Size:
        return torch.Size(checked_shape(value, MAX_SIZE))
    if isinstance(value, expected):
        return value
    raise FormatError(f"expected {expected.__name__}, got {type(value).__name__}")
