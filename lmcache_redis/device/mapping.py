# SPDX-License-Identifier: Apache-2.0
"""How the agent opens an engine's GPU memory: by CUDA's IPC handles, or by descriptors.

A handle is not trusted. The engine's process must run, as this user. The allocation that a handle
opens must be as large as the engine says, as far as the driver tells. One that is no multiple of
2 MiB is refused: CUDA shares whole blocks, and does not tell where in one it lies. Several handles
of one allocation open it once.

Memory of ``cuMemCreate`` has no IPC handle. The engine exports each of its pieces as a descriptor,
which the agent duplicates from it (``pidfd_getfd(2)``: the permission of a debugger), imports, and
maps side by side.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Hashable, Sequence
from contextlib import ExitStack

from lmcache_redis.device import driver
from lmcache_redis.device.handles import CudaFdHandle, CudaHandle, CudaIPCHandle, check_exporter
from lmcache_redis.device.table import Storage
from lmcache_redis.errors import DeviceError, DriverError

_MOST_BYTES = 2**62
_BLOCK_BYTES = 2 << 20  # CUDA shares whole ones; allocations of other sizes may lie within
_MOST_PIECES = 65_536
_PIDFD_GETFD = 438  # of every architecture
_REFUSALS = {
    errno.EPERM: (
        "the agent may not take them: run engine and agent as one user, and allow one to trace "
        "the other (kernel.yama.ptrace_scope=0, or docker run --cap-add=SYS_PTRACE)"
    ),
    errno.EBADF: "it has closed them",
    errno.ESRCH: "it has ended",
    errno.ENOSYS: "this needs Linux 5.6 and a container that permits pidfd_getfd",
    errno.EMFILE: "the agent has too many open files: raise its limit (ulimit -n)",
}

_libc = ctypes.CDLL(None, use_errno=True)


class EngineMemory:
    """The ranges that handles name, mapped in the context of this thread until `close`.

    ordinal: the GPU of that context. Raises DeviceError if a handle is malformed or cannot be
    opened; then nothing stays mapped.

    Attributes:
        storages: of each handle.
    """

    def __init__(self, handles: Sequence[CudaHandle], ordinal: int) -> None:
        for each in handles:
            check_handle(each)
        for each in {(each.pid, each.pid_start_time): each for each in handles}.values():
            check_exporter(each)
        self._ordinal = ordinal
        self._opened: dict[Hashable, int] = {}
        self._mapped = ExitStack()
        try:
            self.storages = [
                Storage(self._base(each) + each.offset_bytes, each.size_bytes) for each in handles
            ]
        except BaseException:
            self._mapped.close()
            raise

    def close(self) -> None:
        """Unmap, in the same context. No copy may be in flight. Idempotent."""
        self._mapped.close()

    def _base(self, handle: CudaHandle) -> int:
        """Where the allocation of the handle is mapped."""
        shared = handle.memory_handle if isinstance(handle, CudaIPCHandle) else handle.fds
        key = (handle.pid, shared)
        if key not in self._opened:
            try:
                if isinstance(handle, CudaIPCHandle):
                    self._opened[key] = self._open(handle)
                else:
                    self._opened[key] = self._map(handle)
            except DriverError as error:
                raise DeviceError(
                    f"the KV cache of process {handle.pid} on GPU {handle.device_uuid} cannot be "
                    f"opened: {error}"
                ) from error
        return self._opened[key]

    def _open(self, handle: CudaIPCHandle) -> int:
        if handle.allocation_bytes % _BLOCK_BYTES:
            raise DeviceError(
                f"process {handle.pid} registered an allocation of {handle.allocation_bytes} bytes "
                "of GPU memory: CUDA shares whole blocks of 2 MiB, in which others may lie (start "
                "the engine without PYTORCH_NO_CUDA_MEMORY_CACHING)"
            )
        base = driver.open_memory(handle.memory_handle)
        self._mapped.callback(driver.close_memory, base)
        try:
            found = driver.allocation_of(base)
        except DriverError:
            return base  # this driver does not tell: the engine's word has to do
        if found.address != base or found.size_bytes < handle.allocation_bytes:
            raise DeviceError(
                f"process {handle.pid} registered an allocation of {handle.allocation_bytes} bytes "
                f"of GPU memory, which has {found.size_bytes}"
            )
        return base

    def _map(self, handle: CudaFdHandle) -> int:
        size_bytes = handle.piece_bytes * len(handle.fds)
        base = driver.reserve_addresses(size_bytes)
        self._mapped.callback(driver.free_addresses, base, size_bytes)
        with ExitStack() as opened:
            process = os.pidfd_open(handle.pid)
            opened.callback(os.close, process)
            check_exporter(handle)  # the process behind the pidfd is the one that registered
            for number, fd in enumerate(handle.fds):
                at = base + number * handle.piece_bytes
                self._map_piece(handle, at, _duplicate(process, fd, handle.pid))
        driver.allow_access(base, size_bytes, self._ordinal)
        return base

    def _map_piece(self, handle: CudaFdHandle, address: int, fd: int) -> None:
        try:
            allocation = driver.import_allocation(fd)
        finally:
            os.close(fd)
        try:
            driver.map_allocation(address, handle.piece_bytes, allocation)
        finally:
            driver.release_allocation(allocation)
        self._mapped.callback(driver.unmap, address, handle.piece_bytes)


def check_handle(handle: CudaHandle) -> None:
    """Raise DeviceError unless the handle is well formed and its range lies in its allocation."""
    if isinstance(handle, CudaIPCHandle):
        if len(handle.memory_handle) != driver.IPC_HANDLE_BYTES:
            found = len(handle.memory_handle)
            raise DeviceError(f"a CUDA IPC handle has {driver.IPC_HANDLE_BYTES} bytes, not {found}")
        whole_bytes = handle.allocation_bytes
    else:
        if not 0 < len(handle.fds) <= _MOST_PIECES or not all(0 <= fd < 2**31 for fd in handle.fds):
            raise DeviceError(
                f"GPU memory has 1 to {_MOST_PIECES} valid descriptors, not {len(handle.fds)}"
            )
        if not 0 < handle.piece_bytes <= _MOST_BYTES:
            raise DeviceError(f"GPU memory cannot have pieces of {handle.piece_bytes} bytes")
        whole_bytes = handle.piece_bytes * len(handle.fds)
    offset, size = handle.offset_bytes, handle.size_bytes
    if not 0 < whole_bytes <= _MOST_BYTES or size <= 0 or not 0 <= offset <= whole_bytes - size:
        raise DeviceError(
            f"{size} bytes of GPU memory at {offset} of an allocation of {whole_bytes} bytes"
        )


def _duplicate(process: int, fd: int, pid: int) -> int:
    """A descriptor of another process, here. Raises DeviceError."""
    copy: int = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
    if copy < 0:
        code = ctypes.get_errno()
        why = _REFUSALS.get(code, os.strerror(code))
        raise DeviceError(
            f"the descriptors of process {pid}, by which it shares GPU memory, cannot be "
            f"taken: {why}"
        )
    return copy
