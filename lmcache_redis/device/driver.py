# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's driver, ``libcuda.so.1``, through ctypes: the functions that this package calls, typed.

Engine and agent call the driver and nothing above it, so the agent needs no torch and no CUDA
toolkit. The library is loaded at the first call. Addresses, contexts, streams, events and functions
are plain ints. A call that fails raises `DriverError`: a sentence that names the cause, with the
code; `GpuLost` for an error after which this process can no longer use the GPU.

ctypes releases the interpreter lock during each call, so a driver that does not return blocks one
thread. A call costs 0.6 to 5 µs. NVIDIA's cuda-bindings 13.0 needs 0.3 to 3.5 µs for the same
(measured over the driver of the tests), a few µs less in a gather of 150: too little for a
dependency, whose batches of copies also need a driver of CUDA 13. Keeping the lock during quick
calls (`ctypes.PyDLL`) saves 0.05 µs each, and with eight copying threads nothing.

Source: "CUDA Driver API" of NVIDIA, 12.0; `memcpy_batch` is of 12.8.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

from lmcache_redis.errors import CudaError, DeviceError, DriverError, GpuLost

IPC_HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
_LIBRARY = "libcuda.so.1"
# After these, every call of this process to this GPU returns an error: the process has to end.
# 214 ECC, 220 NVLink, 226 contained, 700 illegal address, 702 launch timeout, 709 no context, 710
# assert, 714-719 faults of the hardware or of a launch, 721 tensor memory, 810 MPS, 999 unknown.
_STICKY = frozenset({214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721, 810, 999})

_CAUSES = {
    2: "the GPU has too little free memory, or a single registration of host memory is too large",
    34: "only a stub of libcuda is installed: run with NVIDIA's driver",
    46: "the GPU's compute mode is exclusive or prohibited: nvidia-smi --compute-mode=DEFAULT",
    100: "no GPU is visible: check CUDA_VISIBLE_DEVICES and that the container has the GPUs",
    101: "no such GPU",
    201: "memory of another context, or a handle that this process made itself",
    205: "the memory cannot be mapped: with MIG, engine and agent must use the same instance",
    216: "another context or process holds the GPU exclusively",
    218: "the driver could not compile the kernels",
    221: "libnvidia-ptxjitcompiler is missing: NVIDIA_DRIVER_CAPABILITIES must have compute",
    222: "the driver is older than the kernels' PTX: 525 or newer is needed",
    223: "the driver may not compile the kernels: unset CUDA_DISABLE_PTX_JIT",
    304: "the operating system refused: engine and agent must run as one user and see one GPU",
    400: "the handle is not valid, or its process has ended",
    712: "the memory is already pinned",
    713: "the memory is not pinned",
    800: "not permitted by the driver or the container",
    801: "not supported on this system: CUDA IPC needs Linux without gVisor, WSL or vGPU",
    802: "the system is not ready: is the fabric manager running?",
    803: "the driver does not fit the installed libcuda",
    805: "MPS does not answer: share its pipe directory (CUDA_MPS_PIPE_DIRECTORY)",
    807: "MPS has no room for another client",
}


class Attribute:
    """Numbers of ``CUdevice_attribute``."""

    COMPUTE_MODE = 20  # 0: default, 2: prohibited, 3: exclusive process
    SEES_HOST_ADDRESSES = 91  # of registered memory: they are the same on the GPU
    WRITES_64_BIT_VALUES = 122  # cuStreamWriteValue64


class Range(NamedTuple):
    """An allocation."""

    address: int
    size_bytes: int


# Argument types by name; each function returns a CUresult.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
BATCHES = "cuMemcpyBatchAsync"  # which drivers lack that are older than 570 (CUDA 12.8)


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, initialised. Raises DriverError."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise DriverError(
            0,
            f"there is no NVIDIA driver here ({error}): start the process with access to the GPUs",
        ) from error
    for name, types in _FUNCTIONS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = types
        elif name != BATCHES:
            raise DriverError(0, f"the driver has no {name}: 525 or newer is needed")
    _check(library, "cuInit", library.cuInit(0))
    return library


def _check(library: ctypes.CDLL, name: str, code: int) -> None:
    if not code:
        return
    known = c_char_p()
    library.cuGetErrorName(code, byref(known))
    text = known.value.decode() if known.value else "unknown"
    cause = f": {_CAUSES[code]}" if code in _CAUSES else ""
    kind = GpuLost if code in _STICKY else DriverError
    raise kind(code, f"{name} failed with CUDA error {code} ({text}){cause}")


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    _check(library, name, getattr(library, name)(*arguments))


def _does(name: str, *types: Any, fixed: Sequence[int] = ()) -> Callable[..., None]:
    """A function by its name and the types of its arguments, of which the last are ``fixed``."""
    _FUNCTIONS[name] = types
    return lambda *arguments: _call(name, *arguments, *fixed)


def _gives(kind: Any, name: str, *types: Any, fixed: Sequence[int] = ()) -> Callable[..., int]:
    """As `_does`, of a function that writes its result, of this kind, to its first argument."""
    call = _does(name, POINTER(kind), *types, fixed=fixed)

    def get(*arguments: Any) -> int:
        value = kind()
        call(byref(value), *arguments)
        return value.value or 0

    return get


def has(name: str) -> bool:
    """Whether the driver has a function that older ones lack. Raises DriverError."""
    return hasattr(_library(), name)


# Devices and contexts

# The newest CUDA that the driver serves, as 12040 for 12.4.
driver_version = _gives(c_int, "cuDriverGetVersion")
_device_count = _gives(c_int, "cuDeviceGetCount")
# The ``CUdevice`` of an ordinal, which is what the next five take.
_device = _gives(c_int, "cuDeviceGet", c_int)
_device_uuid = _does("cuDeviceGetUuid_v2", c_void_p, c_int)
_device_name = _does("cuDeviceGetName", c_char_p, c_int, c_int)
_device_attribute = _gives(c_int, "cuDeviceGetAttribute", c_int, c_int)
_retain_context = _gives(c_void_p, "cuDevicePrimaryCtxRetain", c_int)
_release_context = _does("cuDevicePrimaryCtxRelease_v2", c_int)
# Of this thread.
set_context = _does("cuCtxSetCurrent", c_void_p)
_context = _gives(c_void_p, "cuCtxGetCurrent")
# Waits for all work of this thread's context.
synchronize = _does("cuCtxSynchronize")


def device_uuids() -> list[str]:
    """The GPUs of this process in its own order; with MIG those of its instance."""
    return [device_uuid(ordinal) for ordinal in range(_device_count())]


def ordinal_of(uuid: str) -> int:
    """The GPU with a UUID. Raises DeviceError if it is not visible here."""
    visible = device_uuids()
    if uuid not in visible:
        raise DeviceError(
            f"GPU {uuid} is not visible here (visible: {', '.join(visible) or 'none'}): add it to "
            "this process's CUDA_VISIBLE_DEVICES or container"
        )
    return visible.index(uuid)


def device_uuid(ordinal: int) -> str:
    """16 bytes in hexadecimal, as torch writes them (nvidia-smi: with a prefix)."""
    raw = ctypes.create_string_buffer(16)
    _device_uuid(raw, _device(ordinal))
    text = raw.raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def device_name(ordinal: int) -> str:
    name = ctypes.create_string_buffer(256)
    _device_name(name, len(name), _device(ordinal))
    return name.value.decode(errors="replace")


def device_attribute(attribute: int, ordinal: int) -> int:
    return _device_attribute(attribute, _device(ordinal))


def retain_context(ordinal: int) -> int:
    """The primary context of a GPU, which torch uses too. Takes a fraction of a second."""
    return _retain_context(_device(ordinal))


def release_context(ordinal: int) -> None:
    _release_context(_device(ordinal))


@contextlib.contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
    """This thread's context is that of a GPU, and after it the former one again."""
    context = retain_context(ordinal)
    try:
        with in_context(context):
            yield
    finally:
        with contextlib.suppress(CudaError):  # after a loss, which the caller learns by then
            release_context(ordinal)


@contextlib.contextmanager
def in_context(context: int) -> Iterator[None]:
    """As `on_gpu`, of a GPU whose context is retained."""
    former = _context()
    set_context(context)
    try:
        yield
    finally:
        with contextlib.suppress(CudaError):
            set_context(former)


# Memory, by address and size in bytes

_PORTABLE, _DEVICE_MAP = 1, 2

# Of the GPU, aligned to 256.
allocate = _gives(c_uint64, "cuMemAlloc_v2", c_size_t)
# Waits for the work of this process on that GPU.
free = _does("cuMemFree_v2", c_uint64)
# Of the host: new page-locked memory, or what is there, for every context of this process.
allocate_pinned = _gives(c_void_p, "cuMemHostAlloc", c_size_t, c_uint, fixed=[_PORTABLE])
free_pinned = _does("cuMemFreeHost", c_void_p)
pin = _does("cuMemHostRegister_v2", c_void_p, c_size_t, c_uint, fixed=[_PORTABLE | _DEVICE_MAP])
unpin = _does("cuMemHostUnregister", c_void_p)
# Where the GPU sees pinned host memory.
device_address = _gives(c_uint64, "cuMemHostGetDevicePointer_v2", c_void_p, c_uint, fixed=[0])
_range_of = _does("cuMemGetAddressRange_v2", POINTER(c_uint64), POINTER(c_size_t), c_uint64)


def allocation_of(address: int) -> Range:
    """The allocation in which an address of GPU memory lies."""
    base, size = c_uint64(), c_size_t()
    _range_of(byref(base), byref(size), address)
    return Range(base.value, size.value)


# Memory of other processes


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``: a ``CUmemLocation``, and what it may do."""

    _fields_ = [("type", c_int), ("id", c_int), ("flags", c_int)]


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``, with its last fields as one."""

    _fields_ = [
        ("type", c_int), ("handle_types", c_uint), ("location_type", c_int),
        ("location_id", c_int), ("metadata", c_void_p), ("flags", c_uint64),
    ]  # fmt: skip


_LAZY_PEER_ACCESS = 1
_FILE_DESCRIPTOR, _FABRIC = 1, 8  # of ``CUmemAllocationHandleType``
_ON_DEVICE, _READ_WRITE = 1, 3

_export_memory = _does("cuIpcGetMemHandle", c_void_p, c_uint64)
_open_memory = _gives(
    c_uint64, "cuIpcOpenMemHandle_v2", _IpcHandle, c_uint, fixed=[_LAZY_PEER_ACCESS]
)
# Once for each `open_memory`.
close_memory = _does("cuIpcCloseMemHandle", c_uint64)
# The allocation that is mapped at an address (``cuMemCreate``), until it is released.
retain_allocation = _gives(c_uint64, "cuMemRetainAllocationHandle", c_void_p)
# A file descriptor of an allocation. The allocation lives while one is open.
export_allocation = _gives(
    c_int, "cuMemExportToShareableHandle", c_uint64, c_int, c_uint64, fixed=[_FILE_DESCRIPTOR, 0]
)
_properties_of = _does("cuMemGetAllocationPropertiesFromHandle", c_void_p, c_uint64)
# Once for each handle of it. What is mapped stays.
release_allocation = _does("cuMemRelease", c_uint64)
# The allocation that a descriptor names, which may be closed; until it is released.
import_allocation = _gives(
    c_uint64, "cuMemImportFromShareableHandle", c_void_p, c_int, fixed=[_FILE_DESCRIPTOR]
)
# Of a size: where nothing else is mapped.
reserve_addresses = _gives(
    c_uint64, "cuMemAddressReserve", c_size_t, c_size_t, c_uint64, c_uint64, fixed=[0, 0, 0]
)
free_addresses = _does("cuMemAddressFree", c_uint64, c_size_t)
_map = _does("cuMemMap", c_uint64, c_size_t, c_size_t, c_uint64, c_uint64)
unmap = _does("cuMemUnmap", c_uint64, c_size_t)
_set_access = _does("cuMemSetAccess", c_uint64, c_size_t, c_void_p, c_size_t)


def export_memory(address: int) -> bytes:
    """A handle of the whole allocation in which ``address`` lies."""
    handle = _IpcHandle()
    _export_memory(byref(handle), address)
    return bytes(handle)


def open_memory(handle: bytes) -> int:
    """Map the allocation of a handle; its address here. A second call returns the same."""
    return _open_memory(_IpcHandle.from_buffer_copy(handle))


def is_for_fabric(allocation: int) -> bool:
    """Whether it can be exported by a handle for a fabric (IMEX), and by nothing else."""
    found = AllocationProperties()
    _properties_of(byref(found), allocation)
    return int(found.handle_types) == _FABRIC


def map_allocation(address: int, size_bytes: int, allocation: int) -> None:
    """At reserved addresses. Not accessible before `allow_access`."""
    _map(address, size_bytes, 0, allocation, 0)


def allow_access(address: int, size_bytes: int, ordinal: int) -> None:
    """Let a GPU read and write mapped memory."""
    access = _Access(_ON_DEVICE, ordinal, _READ_WRITE)
    _set_access(address, size_bytes, byref(access), 1)


# Streams and events

_NON_BLOCKING = 1
_EVENT_FLAGS = 1 | 2  # a waiting thread sleeps; no timing

# One that does not wait for the default stream.
create_stream = _gives(c_void_p, "cuStreamCreate", c_uint, fixed=[_NON_BLOCKING])
destroy_stream = _does("cuStreamDestroy_v2", c_void_p)
synchronize_stream = _does("cuStreamSynchronize", c_void_p)
# Stream, address, value: writes 64 bits when all earlier work of the stream has ended, and is
# visible to others. The address is as the GPU sees it (`device_address`), aligned to 8.
write_value = _does("cuStreamWriteValue64_v2", c_void_p, c_uint64, c_uint64, c_uint, fixed=[0])
# One for this process. A thread that waits for it sleeps.
create_event = _gives(c_void_p, "cuEventCreate", c_uint, fixed=[_EVENT_FLAGS])
destroy_event = _does("cuEventDestroy_v2", c_void_p)
# Event, stream.
record_event = _does("cuEventRecord", c_void_p, c_void_p)
wait_for = _does("cuEventSynchronize", c_void_p)


# Copies and kernels: enqueued on a stream


class _BatchAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = [
        ("src_access_order", c_uint), ("src_type", c_uint), ("src_id", c_int),
        ("dst_type", c_uint), ("dst_id", c_int), ("flags", c_uint),
    ]  # fmt: skip


_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM

# To, from, size in bytes, stream: from the host to the GPU, and out of it.
enqueue_copy_in = _does("cuMemcpyHtoDAsync_v2", c_uint64, c_void_p, c_size_t, c_void_p)
enqueue_copy_out = _does("cuMemcpyDtoHAsync_v2", c_void_p, c_uint64, c_size_t, c_void_p)
_copy_batch = _does(
    BATCHES, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t,
    c_void_p, c_void_p,
)  # fmt: skip
# Compiles PTX for the GPU of this thread's context.
load_module = _gives(c_void_p, "cuModuleLoadData", c_char_p)
_function_of = _gives(c_void_p, "cuModuleGetFunction", c_void_p, c_char_p)
_launch = _does("cuLaunchKernel", c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)


def enqueue_copies(to: int, sources: int, sizes: int, count: int, stream: int) -> None:
    """``count`` copies between host and GPU in one call, in no order among themselves.

    to, sources, sizes: addresses of arrays of 64-bit numbers, read before the return.
    """
    attributes = _BatchAttributes(src_access_order=_STREAM_ORDER)
    first, failed = c_size_t(0), c_size_t(0)
    attributed = (byref(attributes), byref(first), 1)
    _copy_batch(to, sources, sizes, count, *attributed, byref(failed), stream)


def function_of(module: int, name: str) -> int:
    return _function_of(module, name.encode())


def launch(
    function: int, grid: tuple[int, int], threads: int, arguments: Sequence[int], stream: int
) -> None:
    """Enqueue a kernel. arguments: 64-bit numbers."""
    values = (c_uint64 * len(arguments))(*arguments)
    size = ctypes.sizeof(c_uint64)
    pointers = (c_void_p * len(arguments))(
        *[ctypes.addressof(values) + size * index for index in range(len(arguments))]
    )
    _launch(function, *grid, 1, threads, 1, 1, 0, stream, pointers, None)
