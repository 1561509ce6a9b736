"""Mappings of another process's memory, which that process may truncate during a copy.

Memory is opened only if it is in tmpfs (/dev/shm or a memfd), belongs to this user, is the memory
that was registered, and has the registered size. It is sealed against shrinking if its creator
allows seals; torch does not, because it creates no memfd. So the size is checked before and after
each call. An access to missing pages during a call kills this process, unless the native extension
is built (`lmcache_redis.native.guard`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Iterator

from lmcache_redis import native
from lmcache_redis.device.handles import SharedMemoryHandle, check_exporter
from lmcache_redis.errors import DeviceError
from lmcache_redis.native.madvise import address_of, fault_in

_TMPFS_MAGIC = 0x01021994  # statfs(2)
_STATFS_BYTES = 256  # more than any platform's struct statfs; f_type comes first

_libc = ctypes.CDLL(None, use_errno=True)


class UseCount:
    """Counts the calls in progress on a mapping, so that `close` can wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_progress = 0
        self._closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """One call. Raises DeviceError after `close`."""
        with self._changed:
            if self._closed:
                raise DeviceError("the worker's KV cache is no longer mapped")
            self._in_progress += 1
        try:
            yield
        finally:
            with self._changed:
                self._in_progress -= 1
                self._changed.notify_all()

    def close(self) -> bool:
        """Wait for the calls in progress. True for the first caller, which unmaps."""
        with self._changed:
            first = not self._closed
            self._closed = True
            self._changed.wait_for(lambda: self._in_progress == 0)
            return first


class SharedMapping:
    """The memory that a handle names, mapped until ``close``, with every page faulted in.

    Raises DeviceError if it cannot be opened or is not the memory that was registered.
    """

    def __init__(self, handle: SharedMemoryHandle) -> None:
        self._size_bytes = handle.size_bytes
        self.memory = _open(handle)
        address = address_of(self.memory)
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
        """Unmap. No array over the memory may exist."""
        if native.guard is not None and self._guard is not None:
            native.guard.drop(self._guard)
            self._guard = None
        self.memory.close()


def _open(handle: SharedMemoryHandle) -> mmap.mmap:
    name = f"/proc/{handle.pid}/fd/{handle.fd}"
    check_exporter(handle)  # first, for its message: without the process, the name does not exist
    try:
        # O_PATH first: opening a device or a pipe that a forged handle names has side effects.
        peek = os.open(name, os.O_PATH | os.O_CLOEXEC)
        try:
            _verify(handle, peek, name)
            fd = os.open(f"/proc/self/fd/{peek}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(peek)
        try:
            with contextlib.suppress(OSError):  # EPERM: its creator allows no seals
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            return mmap.mmap(fd, handle.size_bytes)
        finally:
            os.close(fd)
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
