"""Names of an engine's memory that another process can open. Wire types; free of torch.

A handle is no capability: whoever receives one checks it against the memory that it really
opened (`lmcache_redis.device.cpu`, `lmcache_redis.device.cuda_ipc`) before use.
"""

from __future__ import annotations

import os
from typing import Union

import msgspec

from lmcache_redis.errors import DeviceError


class SharedMemoryHandle(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="SHARED_MEMORY"
):
    """Shared memory that process ``pid`` keeps open as ``fd``: ``/proc/<pid>/fd/<fd>``.

    ``pid_start_time`` (clock ticks since boot) tells the process from a later one with its
    number, ``device`` and ``inode`` tell the memory from another file behind a reused fd.
    """

    pid: int
    pid_start_time: int
    fd: int
    device: int
    inode: int
    size_bytes: int


class CudaIPCHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="CUDA_IPC"):
    """One tensor in GPU memory: a CUDA IPC handle of its allocation, and what it is there.

    Attributes:
        pid, pid_start_time: the exporting process; the memory dies with it.
        device_uuid: the GPU, whatever its number is in either process.
        memory_handle: the 64 bytes of CUDA's ``cudaIpcMemHandle_t``. Torch wraps them in a
            format that changes with its version; bare, every version opens them.
        storage_size_bytes, storage_offset_bytes: the storage inside the allocation.
        ref_counter_handle, ref_counter_offset: torch's shared count of users, which releasing
            the storage decrements; named as torch names it.
        dtype, shape, stride: the tensor; contiguous, at offset 0 of the storage. Elements.
    """

    pid: int
    pid_start_time: int
    device_uuid: str
    memory_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


StorageHandle = Union[SharedMemoryHandle, CudaIPCHandle]  # noqa: UP007 (resolved at run time)


def process_start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: field 22 of ``/proc/<pid>/stat``.

    Raises:
        DeviceError: there is no such process to be seen from here.
    """
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as stat:
            fields = stat.read()
    except OSError as error:
        raise _unseen(pid, error) from error
    # The command name, field 2, may itself hold spaces and parentheses.
    return int(fields[fields.rindex(b")") + 2 :].split()[19])


def check_owner(pid: int) -> None:
    """Raise DeviceError unless process ``pid`` runs as this process's effective user.

    Its end is not seen here: `is_running` after this tells that it was the right process.
    """
    try:
        owner = os.stat(f"/proc/{int(pid)}").st_uid
    except OSError as error:
        raise _unseen(pid, error) from error
    if owner != os.geteuid():
        raise DeviceError(
            f"process {pid} runs as user {owner} and this one as user {os.geteuid()}: run engine "
            "and agent as one user (docker run --user, runAsUser in Kubernetes)"
        )


def _unseen(pid: int, error: OSError) -> DeviceError:
    return DeviceError(
        f"process {pid} cannot be seen ({os.strerror(error.errno or 0)}): it has ended, or it "
        "runs in another container; let engine and agent share one PID namespace "
        "(docker run --pid=container:NAME, shareProcessNamespace in Kubernetes)"
    )


def is_running(pid: int, pid_start_time: int) -> bool:
    """Whether that very process still exists; a zombie has given up its memory."""
    try:
        with open(f"/proc/{int(pid)}/stat", "rb") as stat:
            fields = stat.read()
    except OSError:
        return False
    rest = fields[fields.rindex(b")") + 2 :].split()
    return int(rest[19]) == pid_start_time and rest[0] not in (b"Z", b"X")
