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
from collections.abc import Iterator, Sequence
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_uint,
    c_uint64,
    c_ulonglong,
    c_void_p,
)
from typing import Any, NamedTuple

from lmcache_redis.errors import DriverError, GpuLost

IPC_HANDLE_BYTES = 64  # sizeof(CUipcMemHandle)
_LIBRARY = "libcuda.so.1"
# After these, every call of this process to this GPU returns an error: the process has to end.
# 214 ECC, 220 NVLink, 700 illegal address, 702 launch timeout, 710 assert, 714-719 faults of the
# hardware or of a launch, 999 unknown.
_STICKY = frozenset({214, 220, 700, 702, 710, *range(714, 720), 999})

_CAUSES = {
    2: "the GPU has too little free memory, or a single registration of host memory is too large",
    34: "only a stub of libcuda is installed: run with NVIDIA's driver",
    35: "the driver is too old: 525 or newer is needed",
    46: "the GPU's compute mode is exclusive or prohibited: nvidia-smi --compute-mode=DEFAULT",
    100: "no GPU is visible: check CUDA_VISIBLE_DEVICES and that the container has the GPUs",
    101: "no such GPU",
    201: "memory of another context, or a handle that this process made itself",
    205: "the memory cannot be mapped: with MIG, engine and agent must use the same instance",
    216: "another context or process holds the GPU exclusively",
    218: "the driver could not compile the kernels",
    222: "the driver is older than the kernels' PTX: 525 or newer is needed",
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
    """Of ``CUdevice_attribute``."""

    COMPUTE_MODE = 20  # 0: default, 2: prohibited, 3: exclusive process
    MAJOR = 75
    MINOR = 76
    WRITES_64_BIT_VALUES = 122  # cuStreamWriteValue64


class Range(NamedTuple):
    """An allocation."""

    address: int
    size_bytes: int


# Argument types by function; each returns a CUresult.
_U64, _OUT_U64, _OUT_PTR, _OUT_INT = c_uint64, POINTER(c_uint64), POINTER(c_void_p), POINTER(c_int)
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT_INT,),
    "cuDeviceGetCount": (_OUT_INT,),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceGetAttribute": (_OUT_INT, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT_PTR, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxGetCurrent": (_OUT_PTR,),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (_OUT_U64, c_size_t),
    "cuMemFree_v2": (_U64,),
    "cuMemGetAddressRange_v2": (_OUT_U64, POINTER(c_size_t), _U64),
    "cuMemHostAlloc": (_OUT_PTR, c_size_t, c_uint),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostGetDevicePointer_v2": (_OUT_U64, c_void_p, c_uint),
    "cuIpcGetMemHandle": (c_void_p, _U64),
    "cuIpcCloseMemHandle": (_U64,),
    "cuStreamCreate": (_OUT_PTR, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWriteValue64_v2": (c_void_p, _U64, _U64, c_uint),
    "cuEventCreate": (_OUT_PTR, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_U64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _U64, c_size_t, c_void_p),
    "cuModuleLoadData": (_OUT_PTR, c_char_p),
    "cuModuleGetFunction": (_OUT_PTR, c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}
# Of newer drivers, or needed only for memory of `cuMemCreate`.
_OPTIONAL: dict[str, tuple[Any, ...]] = {
    "cuMemcpyBatchAsync": (
        c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p,
    ),
    "cuMemRetainAllocationHandle": (_OUT_U64, c_void_p),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (_OUT_U64, c_void_p, c_int),
    "cuMemRelease": (c_ulonglong,),
    "cuMemAddressReserve": (_OUT_U64, c_size_t, c_size_t, _U64, c_ulonglong),
    "cuMemAddressFree": (_U64, c_size_t),
    "cuMemMap": (_U64, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (_U64, c_size_t),
    "cuMemSetAccess": (_U64, c_size_t, c_void_p, c_size_t),
}  # fmt: skip


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * IPC_HANDLE_BYTES)]


class _BatchAttributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = [
        ("src_access_order", c_uint), ("src_type", c_uint), ("src_id", c_int),
        ("dst_type", c_uint), ("dst_id", c_int), ("flags", c_uint),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    """``CUmemAccessDesc``: a ``CUmemLocation``, and what it may do."""

    _fields_ = [("type", c_int), ("id", c_int), ("flags", c_int)]


_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_NON_BLOCKING = 1
_EVENT_FLAGS = 1 | 2  # a waiting thread sleeps; no timing
_LAZY_PEER_ACCESS = 1
_PORTABLE, _DEVICE_MAP = 1, 2
_FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE, _READ_WRITE = 1, 3


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
        try:
            function = getattr(library, name)
        except AttributeError:
            raise DriverError(0, f"the driver has no {name}: 525 or newer is needed") from None
        function.argtypes = types
    library.cuIpcOpenMemHandle_v2.argtypes = (_OUT_U64, _IpcHandle, c_uint)
    for name, types in _OPTIONAL.items():
        if hasattr(library, name):
            getattr(library, name).argtypes = types
    _check(library, "cuInit", library.cuInit(0))
    return library


def _check(library: ctypes.CDLL, name: str, code: int) -> None:
    if code:
        raise _error(library, name, code)


def _error(library: ctypes.CDLL, name: str, code: int) -> DriverError:
    known = c_char_p()
    library.cuGetErrorName(code, byref(known))
    text = known.value.decode() if known.value else "unknown"
    cause = f": {_CAUSES[code]}" if code in _CAUSES else ""
    kind = GpuLost if code in _STICKY else DriverError
    return kind(code, f"{name} failed with CUDA error {code} ({text}){cause}")


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    _check(library, name, getattr(library, name)(*arguments))


def _given(kind: Any, name: str, *arguments: Any) -> int:
    """What a function writes to its first argument."""
    value = kind()
    _call(name, byref(value), *arguments)
    return value.value or 0


def has(name: str) -> bool:
    """Whether the driver has a function that older ones lack. Raises DriverError."""
    return hasattr(_library(), name)


# Devices and contexts


def driver_version() -> int:
    """The newest CUDA that the driver serves, as 12040 for 12.4."""
    return _given(c_int, "cuDriverGetVersion")


def device_uuids() -> list[str]:
    """The GPUs of this process in its own order; with MIG those of its instance."""
    return [device_uuid(ordinal) for ordinal in range(_given(c_int, "cuDeviceGetCount"))]


def device_uuid(ordinal: int) -> str:
    """16 bytes in hexadecimal, as torch writes them (nvidia-smi: with a prefix)."""
    raw = ctypes.create_string_buffer(16)
    _call("cuDeviceGetUuid_v2", raw, ordinal)
    text = raw.raw.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def device_name(ordinal: int) -> str:
    name = ctypes.create_string_buffer(256)
    _call("cuDeviceGetName", name, len(name), ordinal)
    return name.value.decode(errors="replace")


def device_attribute(ordinal: int, attribute: int) -> int:
    return _given(c_int, "cuDeviceGetAttribute", attribute, ordinal)


def retain_context(ordinal: int) -> int:
    """The primary context of a GPU, which torch uses too. Takes a fraction of a second."""
    return _given(c_void_p, "cuDevicePrimaryCtxRetain", ordinal)


def release_context(ordinal: int) -> None:
    _call("cuDevicePrimaryCtxRelease_v2", ordinal)


def set_context(context: int) -> None:
    """Of this thread."""
    _call("cuCtxSetCurrent", context)


@contextlib.contextmanager
def on_gpu(ordinal: int) -> Iterator[None]:
    """This thread's context is that of a GPU, and after it the former one again."""
    context = retain_context(ordinal)
    try:
        with in_context(context):
            yield
    finally:
        with contextlib.suppress(DriverError):  # after a loss, which the caller learns by then
            release_context(ordinal)


@contextlib.contextmanager
def in_context(context: int) -> Iterator[None]:
    """As `on_gpu`, of a GPU whose context is retained."""
    former = _given(c_void_p, "cuCtxGetCurrent")
    set_context(context)
    try:
        yield
    finally:
        with contextlib.suppress(DriverError):
            set_context(former)


def synchronize() -> None:
    """Wait for all work of this thread's context."""
    _call("cuCtxSynchronize")


# Memory


def allocate(size_bytes: int) -> int:
    """The address of new GPU memory, aligned to 256."""
    return _given(c_uint64, "cuMemAlloc_v2", size_bytes)


def free(address: int) -> None:
    """Waits for the work of this process on that GPU."""
    _call("cuMemFree_v2", address)


def allocation_of(address: int) -> Range:
    """The allocation in which an address of GPU memory lies."""
    base, size = c_uint64(), c_size_t()
    _call("cuMemGetAddressRange_v2", byref(base), byref(size), address)
    return Range(base.value, size.value)


def allocate_pinned(size_bytes: int) -> int:
    """The address of new page-locked host memory."""
    return _given(c_void_p, "cuMemHostAlloc", size_bytes, _PORTABLE)


def pin(address: int, size_bytes: int) -> None:
    """Page-lock host memory for every context of this process."""
    _call("cuMemHostRegister_v2", address, size_bytes, _PORTABLE | _DEVICE_MAP)


def unpin(address: int) -> None:
    _call("cuMemHostUnregister", address)


def device_address(address: int) -> int:
    """Where the GPU sees pinned host memory."""
    return _given(c_uint64, "cuMemHostGetDevicePointer_v2", address, 0)


# Memory of other processes


def export_memory(address: int) -> bytes:
    """A handle of the whole allocation in which ``address`` lies."""
    handle = _IpcHandle()
    _call("cuIpcGetMemHandle", byref(handle), address)
    return bytes(handle)


def open_memory(handle: bytes) -> int:
    """Map the allocation of a handle; its address here. A second call returns the same."""
    taken = _IpcHandle.from_buffer_copy(handle)
    return _given(c_uint64, "cuIpcOpenMemHandle_v2", taken, _LAZY_PEER_ACCESS)


def close_memory(address: int) -> None:
    """Once for each `open_memory`."""
    _call("cuIpcCloseMemHandle", address)


def retain_allocation(address: int) -> int:
    """The allocation that is mapped at an address (``cuMemCreate``), until it is released."""
    return _given(c_uint64, "cuMemRetainAllocationHandle", address)


def export_allocation(allocation: int) -> int:
    """A file descriptor of an allocation. The allocation lives while one is open."""
    return _given(c_int, "cuMemExportToShareableHandle", allocation, _FILE_DESCRIPTOR, 0)


def release_allocation(allocation: int) -> None:
    """Once for each handle of it. What is mapped stays."""
    _call("cuMemRelease", allocation)


def import_allocation(fd: int) -> int:
    """The allocation that a descriptor names, which may be closed; until it is released."""
    return _given(c_uint64, "cuMemImportFromShareableHandle", fd, _FILE_DESCRIPTOR)


def reserve_addresses(size_bytes: int) -> int:
    """Where nothing else is mapped."""
    return _given(c_uint64, "cuMemAddressReserve", size_bytes, 0, 0, 0)


def free_addresses(address: int, size_bytes: int) -> None:
    _call("cuMemAddressFree", address, size_bytes)


def map_allocation(address: int, size_bytes: int, allocation: int) -> None:
    """At reserved addresses. Not accessible before `allow_access`."""
    _call("cuMemMap", address, size_bytes, 0, allocation, 0)


def unmap(address: int, size_bytes: int) -> None:
    _call("cuMemUnmap", address, size_bytes)


def allow_access(address: int, size_bytes: int, ordinal: int) -> None:
    """Let a GPU read and write mapped memory."""
    access = _Access(_ON_DEVICE, ordinal, _READ_WRITE)
    _call("cuMemSetAccess", address, size_bytes, byref(access), 1)


# Streams and events


def create_stream() -> int:
    """One that does not wait for the default stream."""
    return _given(c_void_p, "cuStreamCreate", _NON_BLOCKING)


def destroy_stream(stream: int) -> None:
    _call("cuStreamDestroy_v2", stream)


def synchronize_stream(stream: int) -> None:
    _call("cuStreamSynchronize", stream)


def write_value(stream: int, address: int, value: int) -> None:
    """Write 64 bits when all earlier work of the stream has ended, and is visible to others.

    address: as the GPU sees it (`device_address`), aligned to 8.
    """
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def create_event() -> int:
    """One for this process. A thread that waits for it sleeps."""
    return _given(c_void_p, "cuEventCreate", _EVENT_FLAGS)


def record_event(event: int, stream: int) -> None:
    _call("cuEventRecord", event, stream)


def wait_for(event: int) -> None:
    _call("cuEventSynchronize", event)


def destroy_event(event: int) -> None:
    _call("cuEventDestroy_v2", event)


# Copies and kernels: enqueued on a stream


def enqueue_copy_in(address: int, host: int, size_bytes: int, stream: int) -> None:
    _call("cuMemcpyHtoDAsync_v2", address, host, size_bytes, stream)


def enqueue_copy_out(host: int, address: int, size_bytes: int, stream: int) -> None:
    _call("cuMemcpyDtoHAsync_v2", host, address, size_bytes, stream)


def enqueue_copies(to: int, sources: int, sizes: int, count: int, stream: int) -> None:
    """``count`` copies between host and GPU in one call, in no order among themselves.

    to, sources, sizes: addresses of arrays of 64-bit numbers, read before the return.
    """
    attributes = _BatchAttributes(src_access_order=_STREAM_ORDER)
    first, failed = c_size_t(0), c_size_t(0)
    _call(
        "cuMemcpyBatchAsync", to, sources, sizes, count,
        byref(attributes), byref(first), 1, byref(failed), stream,
    )  # fmt: skip


def load_module(ptx: bytes) -> int:
    """Compile PTX for the GPU of this thread's context."""
    return _given(c_void_p, "cuModuleLoadData", ptx)


def function_of(module: int, name: str) -> int:
    return _given(c_void_p, "cuModuleGetFunction", module, name.encode())


def launch(
    function: int, grid: tuple[int, int], threads: int, arguments: Sequence[int], stream: int
) -> None:
    """Enqueue a kernel. arguments: 64-bit numbers."""
    values = (c_uint64 * len(arguments))(*arguments)
    size = ctypes.sizeof(c_uint64)
    pointers = (c_void_p * len(arguments))(
        *[ctypes.addressof(values) + size * index for index in range(len(arguments))]
    )
    _call("cuLaunchKernel", function, *grid, 1, threads, 1, 1, 0, stream, pointers, None)
