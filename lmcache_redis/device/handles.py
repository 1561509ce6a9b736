# SPDX-License-Identifier: Apache-2.0
"""Handles by which the agent opens an engine's memory. Wire types; free of torch.

A handle is not trusted: the agent checks it against the memory that it opens (`device.cpu`,
`device.cuda`).
"""

from __future__ import annotations

import os

import msgspec

from lmcache_redis.errors import DeviceError
from lmcache_redis.processes import is_running, process_start_time


class SharedMemoryHandle(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SHARED_MEMORY"
):
    """Shared memory that process ``pid`` keeps open as ``fd``: ``/proc/<pid>/fd/<fd>``.

    ``pid_start_time`` (clock ticks since boot) distinguishes the process from a later one with the
    same id; ``device`` and ``inode`` distinguish the memory from another file behind a reused fd.
    """

    pid: int
    pid_start_time: int
    fd: int
    device: int
    inode: int
    size_bytes: int

    @classmethod
    def of(cls, fd: int, size_bytes: int) -> SharedMemoryHandle:
        """Memory of this process."""
        found = os.fstat(fd)
        return cls(*own_process(), fd, found.st_dev, found.st_ino, size_bytes)


class _CudaMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of the process ``pid``, with which it dies, on a GPU.

    The GPU's number may differ between the processes, its UUID does not.
    """

    pid: int
    pid_start_time: int
    device_uuid: str


class CudaIPCHandle(_CudaMemory, frozen=True, tag="CUDA_IPC"):
    """A range of GPU memory in an allocation of ``cudaMalloc``, by CUDA's IPC handle.

    memory_handle: ``CUipcMemHandle``, of the whole allocation of ``allocation_bytes``.
    offset_bytes, size_bytes: the range inside it.
    """

    memory_handle: bytes
    allocation_bytes: int
    offset_bytes: int
    size_bytes: int


class CudaFdHandle(_CudaMemory, frozen=True, tag="CUDA_FD"):
    """A range of GPU memory that is mapped in pieces (``cuMemMap``), by a descriptor of each piece.

    Expandable segments of torch, and vLLM's cumem allocator if it exports its memory. fds: of the
    process ``pid``, in the order of addresses; it keeps them open. piece_bytes: size of each piece.
    offset_bytes, size_bytes: the range inside the pieces together.
    """

    fds: tuple[int, ...]
    piece_bytes: int
    offset_bytes: int
    size_bytes: int


CudaHandle = CudaIPCHandle | CudaFdHandle
StorageHandle = SharedMemoryHandle | CudaIPCHandle | CudaFdHandle


def own_process() -> tuple[int, int]:
    """``pid`` and ``pid_start_time`` of this process. Raises DeviceError without ``/proc``."""
    pid = os.getpid()
    started = process_start_time(pid)
    if started is None:
        raise _unseen(pid)
    return pid, started


def check_exporter(handle: StorageHandle) -> None:
    """Raise DeviceError unless the process that made the handle runs, as this process's user."""
    try:
        owner = os.stat(f"/proc/{int(handle.pid)}").st_uid
    except OSError as error:
        raise _unseen(handle.pid) from error
    if owner != os.geteuid():
        raise DeviceError(
            f"process {handle.pid} runs as user {owner} and this one as user {os.geteuid()}: run "
            "engine and agent as one user (docker run --user, runAsUser in Kubernetes)"
        )
    if not is_running(handle.pid, handle.pid_start_time):
        raise DeviceError(
            f"process {handle.pid} is not the engine that registered: the engine has ended, or "
            "runs in another PID namespace"
        )


def _unseen(pid: int) -> DeviceError:
    return DeviceError(
        f"process {pid} is not visible: it has ended, or it runs in another container; let engine "
        "and agent share one PID namespace (docker run --pid=container:NAME, "
        "shareProcessNamespace in Kubernetes)"
    )
