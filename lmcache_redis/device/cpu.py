# SPDX-License-Identifier: Apache-2.0
"""KV caches in CPU memory: moved into shared memory in place, mapped by the agent, and copied.

The engine moves each storage into POSIX shared memory (torch's file-descriptor strategy: a file in
/dev/shm that is unlinked at once and held open by the storage). The agent opens
``/proc/<pid>/fd/<fd>``, verifies it and maps it (`SharedMapping`). The kernel permits this between
processes of one user that see each other's process ids: containers must share a PID namespace. A
mapping keeps the memory alive after the engine has died.

Memory is opened only if it is in tmpfs (/dev/shm or a memfd), belongs to this user, is the memory
that was registered, and has the registered size. The engine may truncate it during a copy. It is
sealed against shrinking if its creator allows seals; torch does not, because it creates no memfd.
So the size is checked before and after each call. An access to missing pages during a call kills
this process, unless the native extension is built (`lmcache_redis.native.guard`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmcache_redis import native
from lmcache_redis.device.calls import CopyCall, CopyPlanner, DeviceContext, addresses
from lmcache_redis.device.handles import SharedMemoryHandle, check_exporter
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError
from lmcache_redis.native.madvise import address_of, fault_in

if TYPE_CHECKING:
    import torch

_SHM_DIRECTORY = "/dev/shm"
_TMPFS_MAGIC = 0x01021994  # statfs(2)
_STATFS_BYTES = 256  # more than any platform's struct statfs; f_type comes first
# Copied after a check of the lease, in at most 0.2 ms. A copy thread that is stopped after a check
# touches no more bytes when it resumes.
_PIECE_BYTES = 1 << 20
_NEVER_NS = 2**63 - 1

_libc = ctypes.CDLL(None, use_errno=True)


def share_storages(storages: Sequence[torch.UntypedStorage]) -> tuple[SharedMemoryHandle, ...]:
    """Move the storages of an engine's KV cache into shared memory, in place, and export them.

    Every view of the storages stays valid with the same contents; earlier raw addresses do not.
    Storages that are already shared do not move, so a second call (after a restart of the agent)
    changes nothing. The memory lives as long as its storage, so the caller keeps the tensors. A
    storage takes twice its size while it moves. Raises DeviceError if there is too little shared
    memory. Storages before the one that failed have moved.
    """
    to_move = sum(storage.nbytes() for storage in storages if not storage.is_shared())
    _check_room(to_move)
    return tuple(_share(storage) for storage in storages)


def _check_room(nbytes: int) -> None:
    try:
        room = os.statvfs(_SHM_DIRECTORY)
    except OSError:
        return  # not mounted: torch fails with an error that says why
    free = room.f_bavail * room.f_frsize
    if free < nbytes:
        raise DeviceError(
            f"the KV cache takes {nbytes} bytes of shared memory, and {_SHM_DIRECTORY} has {free} "
            "free: enlarge it (docker run --shm-size=..., or --ipc=host), or give the engine a "
            "smaller KV cache (VLLM_CPU_KVCACHE_SPACE)"
        )


def _share(storage: torch.UntypedStorage) -> SharedMemoryHandle:
    try:
        # Unlike share_memory_(), this does not depend on the process's sharing strategy.
        fd, size_bytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise DeviceError(
            f"a KV cache of {storage.nbytes()} bytes could not be moved into shared memory: {error}"
        ) from error
    if fd < 0:
        raise DeviceError(
            "the KV cache is in a mapped file that torch does not hold open: it cannot be shared"
        )
    return SharedMemoryHandle.of(fd, size_bytes)


class SharedMapping:
    """The memory that a handle names, mapped until ``close``, with every page faulted in.

    Raises DeviceError if it cannot be opened or is not the memory that was registered.
    """

    def __init__(self, handle: SharedMemoryHandle) -> None:
        self._size_bytes = handle.size_bytes
        self.memory = _open(handle)
        self.address = address = address_of(self.memory)
        self._guard: int | None = None
        try:
            if native.guard is not None:
                self._guard = native.guard.add(address, handle.size_bytes)
            # Not MAP_POPULATE of mmap(2): Python holds the GIL during mmap.
            fault_in(address, handle.size_bytes, for_write=False)
            self.check()
        except (DeviceError, MemoryError, OSError) as error:
            self.close()
            raise DeviceError(f"the engine's KV cache cannot be mapped: {error}") from error

    def check(self) -> None:
        """Raise DeviceError if the memory is or was truncated: copies are invalid."""
        lost = native.guard is not None and native.guard.is_lost(self._guard)
        if lost or self.memory.size() < self._size_bytes:  # of the file, now
            raise DeviceError("the engine has truncated its KV cache: it cannot be copied")

    def close(self) -> None:
        """Unmap. No call may be in progress."""
        if native.guard is not None and self._guard is not None:
            native.guard.drop(self._guard)
            self._guard = None
        self.memory.close()


def _open(handle: SharedMemoryHandle) -> mmap.mmap:
    name = f"/proc/{handle.pid}/fd/{handle.fd}"
    check_exporter(handle)  # first, for its message: without the process, the name does not exist
    try:
        with contextlib.ExitStack() as opened:
            # O_PATH first: opening a device or a pipe that a forged handle names has side effects.
            peek = os.open(name, os.O_PATH | os.O_CLOEXEC)
            opened.callback(os.close, peek)
            _verify(handle, peek, name)
            fd = os.open(f"/proc/self/fd/{peek}", os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            with contextlib.suppress(OSError):  # EPERM: its creator allows no seals
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return mmap.mmap(fd, handle.size_bytes)
    except (OSError, ValueError) as error:
        raise DeviceError(
            f"the engine's KV cache cannot be opened as {name} ({error}): engine and agent must "
            "run as one user, and containers must share one PID namespace "
            "(docker run --pid=container:NAME, shareProcessNamespace in Kubernetes)"
        ) from error


def _verify(handle: SharedMemoryHandle, peek: int, name: str) -> None:
    found = os.fstat(peek)
    check_exporter(handle)  # after opening: it still runs, so the name was that of its file
    if (found.st_dev, found.st_ino) != (handle.device, handle.inode):
        raise DeviceError(f"{name} is no longer the memory that was registered")
    if not stat.S_ISREG(found.st_mode) or _file_system(peek) != _TMPFS_MAGIC:
        raise DeviceError(f"{name} is not shared memory: only /dev/shm and memfds are mapped")
    if found.st_uid != os.geteuid():
        raise DeviceError(
            f"{name} belongs to user {found.st_uid}: run engine and agent as one user"
        )
    if not 0 < handle.size_bytes <= found.st_size:
        raise DeviceError(
            f"{name} has {found.st_size} bytes, but the engine registered {handle.size_bytes}"
        )


def _file_system(fd: int) -> int:
    """The type of a file's file system, as in statfs(2). Raises OSError."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, found) != 0:
        raise OSError(ctypes.get_errno(), "fstatfs")
    return ctypes.c_long.from_buffer(found).value


class CpuDevice(DeviceContext):
    """The agent's mapping of one worker's KV cache in CPU memory.

    layouts: of the groups, as received; checked here against the sizes of the handles. handles: one
    for each storage that the layouts' segments name. Raises DeviceError if the memory of a handle
    cannot be mapped, or a layout exceeds its storages. Then nothing stays mapped.
    """

    call_bytes = 0
    on_host_cores = True

    def __init__(self, layouts: Sequence[KVLayout], handles: Sequence[SharedMemoryHandle]) -> None:
        for layout in layouts:
            layout.check([handle.size_bytes for handle in handles])
        super().__init__(layouts)
        self._planners = [CopyPlanner(layout) for layout in layouts]
        self._maps: list[SharedMapping] = []
        try:
            self._maps.extend(map(SharedMapping, handles))
        except BaseException:
            self.close()
            raise

    def gather(self, call: CopyCall, on_blocks_read: Callable[[], None] | None = None) -> None:
        self._move(call, inward=False)

    def scatter(self, call: CopyCall) -> None:
        self._move(call, inward=True)

    def _unmap(self) -> None:
        while self._maps:
            self._maps.pop().close()

    def _move(self, call: CopyCall, *, inward: bool) -> None:
        """inward: from slots to blocks. All bounds are checked before the first copy."""
        if call.after is not None:
            raise DeviceError("a KV cache in CPU memory takes no signal of a GPU")
        until_ns = min(_NEVER_NS, _NEVER_NS if call.until_ns is None else call.until_ns)
        planner = self._planners[call.group]
        with self._mapped(call):
            bases = np.array([each.address for each in self._maps], dtype=np.int64)
            copies = []
            for chunk in call.chunks:
                sizes = [slot.nbytes for slot in chunk.slots]
                storage, offset, slot, slot_offset, nbytes = planner.arrays(
                    chunk.block_ids, sizes, chunk.skip_blocks
                )
                blocks = bases[storage] + offset
                places = addresses(chunk.slots)[slot] + slot_offset
                copies.append((blocks, places, nbytes) if inward else (places, blocks, nbytes))
            for each in self._maps:
                each.check()
            for to, source, nbytes in copies:
                if _copy(to, source, nbytes, _PIECE_BYTES, until_ns) < nbytes.sum():
                    raise DeviceError("the lease on the blocks has expired before the copy")
            for each in self._maps:
                each.check()


def _copy_in_python(
    to: np.ndarray, source: np.ndarray, nbytes: np.ndarray, most: int, until_ns: int
) -> int:
    """As `native.copies.copy`, but the time is looked at for each copy too."""
    copied = 0
    for into, start, size in zip(to.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        for at in range(0, size, most):
            if time.monotonic_ns() > until_ns:
                return copied
            ctypes.memmove(into + at, start + at, min(most, size - at))
            copied += min(most, size - at)
    return copied


_copy = _copy_in_python if native.copies is None else native.copies.copy
