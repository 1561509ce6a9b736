"""CUDA IPC through torch, with nothing pickled and nothing trusted.

The engine exports each storage of its KV cache once; the agent opens each once. The engine sends a
`lmcache_redis.device.handles.CudaIPCHandle`. Torch's own handle is reduced to CUDA's 64 bytes,
which every version of torch opens, so engine and agent may run different versions. A GPU is named
by its UUID, so their CUDA_VISIBLE_DEVICES may differ.

Engine and agent must share the GPU, the PID namespace (process ids tell whether the engine runs),
and ``/dev/shm``, which in containers comes with the IPC namespace and holds CUDA's interprocess
events and torch's counters. Each is checked here and has an error of its own.

Only memory from ``cudaMalloc`` can be exported. Expandable segments, cudaMallocAsync and vLLM's
cumem allocator (sleep mode) map memory in other ways: the error names the setting to change.

Sources: ``torch/multiprocessing/reductions.py``, ``torch/csrc/StorageSharing.cpp`` and
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch; "Interprocess Communication" in NVIDIA's CUDA
programming guide.
"""

from __future__ import annotations

import math
import os
import re
import stat
import weakref
from collections.abc import Sequence

import msgspec
import torch

from lmcache_redis.chunks.dtypes import dtype_name, itemsize, torch_dtype
from lmcache_redis.device.handles import CudaIPCHandle, check_exporter, own_process
from lmcache_redis.errors import DeviceError, FormatError

MEMORY_HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
_EXPANDABLE = ord("e")
_REF_COUNTERS_PER_FILE = 10_000
_REF_COUNTER_NAME = re.compile(rb"/torch_[0-9]+_[0-9]+(_[0-9]+)?")
_MAX_BYTES = 2**63 - 1
_SHM_DIRECTORY = "/dev/shm"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(CudaIPCHandle)
# CUDA does not open a handle in the process that made it: there, `to_tensor` looks here.
_exported: weakref.WeakValueDictionary[CudaIPCHandle, torch.Tensor] = weakref.WeakValueDictionary()

_EXPANDABLE_REFUSAL = (
    "the KV cache lies in expandable segments, which CUDA cannot share between processes: start "
    "the engine without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
)


def export_storages(storages: Sequence[torch.UntypedStorage]) -> tuple[CudaIPCHandle, ...]:
    """Export the storages of an engine's KV cache on one GPU, each as a flat uint8 tensor.

    Waits for the GPU first, so that work in flight (the zeroing of the new cache) cannot overwrite
    chunks that are loaded later. The handles are valid for as long as the tensors live. Raises
    DeviceError if the storages are on several GPUs, or CUDA cannot export their memory; the error
    names the setting to change.
    """
    devices = {storage.device for storage in storages}
    if len(devices) > 1:
        raise DeviceError(f"the KV cache of one worker is on {len(devices)} GPUs")
    torch.cuda.synchronize(devices.pop())
    return tuple(CudaIPCWrapper(_flat(storage)).handle for storage in storages)


class CudaIPCWrapper:
    """A tensor in GPU memory that another process can open; see `CudaIPCHandle`.

    Wrappers with equal handles are equal. Raises DeviceError if the tensor is not on a GPU, not
    contiguous, not at offset 0 of its storage, or in memory that CUDA cannot export.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        if not hasattr(tensor, "untyped_storage"):
            raise DeviceError(f"a tensor is shared, not a {type(tensor).__name__}")
        if tensor.device.type != "cuda":
            raise DeviceError(f"a tensor on {tensor.device} has no CUDA IPC handle")
        if not tensor.is_contiguous() or tensor.storage_offset() != 0:
            raise DeviceError(
                f"a tensor of shape {list(tensor.shape)}, strides {list(tensor.stride())} and "
                f"storage offset {tensor.storage_offset()}: only contiguous tensors at the start "
                "of their storage are exported"
            )
        storage = tensor.untyped_storage()
        try:
            shared = storage._share_cuda_()
        except RuntimeError as error:
            raise DeviceError(refusal(str(error))) from error
        # The last two are an event and whether to wait for it. The exporter has waited for the GPU.
        _, handle, size_bytes, offset_bytes, counter, counter_offset, _, _ = shared
        pid, pid_start_time = own_process()
        self.handle = CudaIPCHandle(
            pid=pid,
            pid_start_time=pid_start_time,
            device_uuid=device_uuid(tensor.device.index),
            memory_handle=bare_memory_handle(bytes(handle)),
            storage_size_bytes=size_bytes,
            storage_offset_bytes=offset_bytes,
            ref_counter_handle=bytes(counter),
            ref_counter_offset=counter_offset,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
        )
        _exported[self.handle] = tensor

    @classmethod
    def from_handle(cls, handle: CudaIPCHandle) -> CudaIPCWrapper:
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
        return self.handle.device_uuid

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
            check_handle(handle)
        except (msgspec.MsgspecError, UnicodeDecodeError, DeviceError) as error:
            raise FormatError(f"not an encoded CUDA IPC wrapper: {error}") from None
        return CudaIPCWrapper.from_handle(handle)

    def to_tensor(self) -> torch.Tensor:
        """Map the memory and return the tensor. The memory is unmapped when its storage is freed.

        In the process that made the handle, this is the exported tensor itself, while it lives.
        Raises DeviceError if the handle is malformed, its process has ended or shares no memory
        with this one, its GPU is not visible here, or CUDA does not open it.
        """
        handle = self.handle
        check_handle(handle)
        check_exporter(handle)
        if handle.pid == os.getpid():
            exported = _exported.get(handle)
            if exported is None:
                raise DeviceError("a CUDA IPC handle cannot be opened by the process that made it")
            return exported
        index = device_index(handle.device_uuid)
        _check_shared_memory(handle)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                index,
                handle.memory_handle,
                handle.storage_size_bytes,
                handle.storage_offset_bytes,
                handle.ref_counter_handle,
                handle.ref_counter_offset,
                bytes(MEMORY_HANDLE_BYTES),
                False,
            )
            tensor = torch.empty(0, dtype=torch_dtype(handle.dtype), device=f"cuda:{index}")
            return tensor.set_(storage, 0, handle.shape, handle.stride)
        except RuntimeError as error:
            raise DeviceError(
                f"the KV cache of process {handle.pid} on GPU {handle.device_uuid} cannot be "
                f"opened ({error}): engine and agent must share GPU, IPC and PID namespace "
                "(docker run --ipc=container:NAME --pid=container:NAME, or one pod with "
                "shareProcessNamespace)"
            ) from error


def bare_memory_handle(torch_handle: bytes) -> bytes:
    """CUDA's 64 bytes of torch's handle: version, kind ('c' or 'e'), then the 64 bytes.

    Raises DeviceError if the handle is of expandable segments or of an unknown format.
    """
    if len(torch_handle) == MEMORY_HANDLE_BYTES:
        return torch_handle
    if len(torch_handle) > 2 and torch_handle[1] == _EXPANDABLE:
        raise DeviceError(_EXPANDABLE_REFUSAL)
    if len(torch_handle) == MEMORY_HANDLE_BYTES + 2 and torch_handle[1:2] == b"c":
        return torch_handle[2:]
    raise DeviceError(
        f"torch {torch.__version__} made a CUDA IPC handle of {len(torch_handle)} bytes, a format "
        "that is not known here"
    )


def refusal(error: str) -> str:
    """The message for an error of torch's export: it names the setting to change."""
    if "expandable_segments" in error:
        return _EXPANDABLE_REFUSAL
    if "cudaMallocAsync" in error:
        return (
            "the KV cache was allocated by cudaMallocAsync, which CUDA IPC does not share: start "
            "the engine without backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF"
        )
    if "received from another process" in error:
        return "the KV cache belongs to another process, which alone may export it"
    if "invalid argument" in error or "invalid value" in error or "not supported" in error:
        return (
            f"CUDA cannot share the memory of the KV cache between processes ({error}): start the "
            "engine without --enable-sleep-mode and --enable-cumem-allocator, and without "
            "expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
        )
    return f"the KV cache could not be exported through CUDA IPC: {error}"


def check_handle(handle: CudaIPCHandle) -> None:
    """Raise DeviceError unless the handle is well formed and its tensor fits its storage."""
    if len(handle.memory_handle) != MEMORY_HANDLE_BYTES:
        raise DeviceError(f"a CUDA IPC handle of {len(handle.memory_handle)} bytes")
    size_bytes, offset_bytes = handle.storage_size_bytes, handle.storage_offset_bytes
    if not 0 < size_bytes <= _MAX_BYTES or not 0 <= offset_bytes <= _MAX_BYTES - size_bytes:
        raise DeviceError(f"a CUDA storage of {size_bytes} bytes at {offset_bytes}")
    # Torch opens the shared memory with this name and decrements the counter at this offset.
    if not _REF_COUNTER_NAME.fullmatch(handle.ref_counter_handle):
        raise DeviceError("a CUDA IPC handle whose reference counter torch did not make")
    if not 0 <= handle.ref_counter_offset < _REF_COUNTERS_PER_FILE:
        raise DeviceError(f"reference counter {handle.ref_counter_offset} of a CUDA IPC handle")
    try:
        item_bytes = itemsize(handle.dtype)
    except FormatError as error:
        raise DeviceError(f"a CUDA IPC handle: {error}") from error
    if any(size < 0 for size in handle.shape) or handle.stride != contiguous(handle.shape):
        raise DeviceError(
            f"a CUDA IPC handle of shape {list(handle.shape)}, strides {list(handle.stride)}: "
            "only contiguous tensors are opened"
        )
    if math.prod(handle.shape) * item_bytes > size_bytes:
        raise DeviceError(
            f"a CUDA tensor of shape {list(handle.shape)} ({handle.dtype}) in {size_bytes} bytes"
        )


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch counts them (a size of 0 counts as 1)."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def device_uuid(index: int) -> str:
    """The UUID of the GPU that this process calls ``cuda:<index>``."""
    return str(torch.cuda.get_device_properties(index).uuid)


def device_index(uuid: str) -> int:
    """The index of a GPU in this process. Makes no context on another GPU.

    Raises DeviceError if the GPU is not visible here.
    """
    if not torch.cuda.is_available():
        raise DeviceError(
            "the engine's KV cache is on a GPU, and this process sees none: start the agent with "
            "access to the GPUs and a torch that is built for CUDA"
        )
    uuids = [device_uuid(index) for index in range(torch.cuda.device_count())]
    if uuid not in uuids:
        raise DeviceError(
            f"GPU {uuid} is not visible here (visible: {', '.join(uuids)}): add it to the agent's "
            "CUDA_VISIBLE_DEVICES or container"
        )
    return uuids.index(uuid)


def _check_shared_memory(handle: CudaIPCHandle) -> None:
    """Raise DeviceError unless this process has the exporter's ``/dev/shm``, as the same user.

    Without it, the memory could be opened but every event would fail, because CUDA keeps events in
    shared memory. The check looks for torch's counter, which exists as long as the storage.
    """
    name = _SHM_DIRECTORY + handle.ref_counter_handle.decode("ascii")
    try:
        found = os.lstat(name)
    except OSError as error:
        raise DeviceError(
            f"{_SHM_DIRECTORY} of the engine's process {handle.pid} differs from the agent's, "
            "and CUDA's events need it: containers must share one IPC namespace "
            "(docker run --ipc=container:NAME, or one pod)"
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():  # torch writes to it
        raise DeviceError(f"{name} is not a file of this user: run engine and agent as one user")


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
