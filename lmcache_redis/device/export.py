# SPDX-License-Identifier: Apache-2.0
"""An engine's KV cache on a GPU, exported to the agent by the driver alone.

Memory of ``cudaMalloc`` is exported as one handle for each allocation. Memory that is mapped in
pieces (vLLM's cumem allocator, expandable segments) is exported as a file descriptor for each
piece, if it was allocated so that it can be. Else the error names the setting to change.

Source: "Interprocess Communication" and "Virtual Memory Management" in NVIDIA's CUDA driver API.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lmcache_redis.device import driver
from lmcache_redis.device.driver import Range
from lmcache_redis.device.handles import CudaFdHandle, CudaHandle, CudaIPCHandle, own_process
from lmcache_redis.errors import DeviceError, DriverError

if TYPE_CHECKING:
    import torch

# What cuIpcGetMemHandle answers for memory that cuMemAlloc did not allocate.
_NOT_ALLOCATED_WHOLE = (1, 801)
_PR_SET_PTRACER = 0x59616D61  # prctl(2)

_libc = ctypes.CDLL(None)


def gpu_of(tensor: torch.Tensor) -> int | None:
    """The GPU that a tensor is on, as this process numbers them; None on the CPU.

    Raises DeviceError for any other device.
    """
    if tensor.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"a KV cache is on {tensor.device}: only cpu and cuda are supported")
    return tensor.device.index if tensor.device.type == "cuda" else None


def current_stream(gpu: int) -> Any:
    """This thread's stream of torch on a GPU; its ``cuda_stream`` is the driver's."""
    import torch

    return torch.cuda.current_stream(gpu)


def export_storages(storages: Sequence[torch.UntypedStorage], gpu: int) -> tuple[CudaHandle, ...]:
    """A handle for each storage. Those in one allocation have its handle in common.

    Waits for the GPU first, so that work in flight (the zeroing of the new cache) cannot overwrite
    chunks that are loaded later. The handles are valid for as long as the storages live, and until
    `withdraw`. Raises DeviceError if the memory cannot be exported.
    """
    with driver.on_gpu(gpu):
        driver.synchronize()
        exports = _Exports(gpu)
        try:
            return tuple(exports.export(each.data_ptr(), each.nbytes()) for each in storages)
        except BaseException:
            _close(exports.fds.values())
            raise


def permit(agent_pid: int) -> None:
    """Let the agent take this process's descriptors where Linux (Yama) asks for a permission."""
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0)


def withdraw(handles: Iterable[Any]) -> None:
    """Close the descriptors of handles that this process made: an open one keeps the memory.

    What was opened by them stays open.
    """
    _close({fd for each in handles if isinstance(each, CudaFdHandle) for fd in each.fds})


class _Exports:
    """Exports ranges of memory on one GPU. fds: by the address of each piece."""

    def __init__(self, gpu: int) -> None:
        self.fds: dict[int, int] = {}
        self._ipc_handle = functools.cache(driver.export_memory)
        self._of = (*own_process(), driver.device_uuid(gpu))

    def export(self, address: int, size_bytes: int) -> CudaHandle:
        allocation = driver.allocation_of(address)
        offset = address - allocation.address
        try:
            handle = self._ipc_handle(allocation.address)
        except DriverError as error:
            if error.code not in _NOT_ALLOCATED_WHOLE:
                raise
            pieces = self._pieces(address, size_bytes, error)
            fds = tuple(self.fds[piece.address] for piece in pieces)
            return CudaFdHandle(*self._of, fds, allocation.size_bytes, offset, size_bytes)
        if offset + size_bytes > allocation.size_bytes:
            raise DeviceError(
                f"a storage of {size_bytes} bytes at {offset} of an allocation of "
                f"{allocation.size_bytes} bytes"
            )
        return CudaIPCHandle(*self._of, handle, allocation.size_bytes, offset, size_bytes)

    def _pieces(self, address: int, size_bytes: int, refused: DriverError) -> list[Range]:
        """The pieces that cover a range, each of them exported."""
        pieces: list[Range] = []
        end = address + size_bytes
        while address < end:
            piece = driver.allocation_of(address)
            if pieces and piece.size_bytes != pieces[0].size_bytes:
                raise DeviceError(
                    f"the KV cache is mapped in pieces of {pieces[0].size_bytes} and of "
                    f"{piece.size_bytes} bytes: only equal pieces are shared"
                )
            if piece.address not in self.fds:
                self.fds[piece.address] = _descriptor(piece, refused)
            pieces.append(piece)
            address = piece.address + piece.size_bytes
        return pieces


def _descriptor(piece: Range, refused: DriverError) -> int:
    try:
        allocation = driver.retain_allocation(piece.address)
        try:
            return driver.export_allocation(allocation)
        except DriverError as error:
            if driver.is_for_fabric(allocation):
                raise DeviceError(
                    f"the KV cache is FABRIC memory, which agents cannot open ({error}): start the "
                    "engine without --enable-sleep-mode and --enable-cumem-allocator"
                ) from error
            raise
        finally:
            driver.release_allocation(allocation)
    except DriverError as error:
        raise DeviceError(
            f"CUDA cannot share the memory of the KV cache between processes ({refused}; {error}): "
            "start the engine without --enable-sleep-mode and --enable-cumem-allocator, and "
            "without expandable_segments:True and backend:cudaMallocAsync in "
            "PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF)"
        ) from error


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
