"""A mapping of another process's memory, which that process may still truncate.

Before it is opened: it must be memory and no file (tmpfs: /dev/shm or a memfd), this user's, the
one that was registered, and as large. It is sealed against shrinking where its maker allows that;
torch does not (it makes no memfd). So its size is looked at again before and after each copy, and
an access in between to what is no longer there does not end this process
(`lmcache_redis.native.guard`; where that was not built, it does).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat

from lmcache_redis import native
from lmcache_redis.device.handles import SharedMemoryHandle, process_start_time
from lmcache_redis.errors import DeviceError
from lmcache_redis.madvise import address_of, fault_in

_TMPFS_MAGIC = 0x01021994  # statfs(2)
_STATFS_BYTES = 256  # more than any platform's struct statfs; f_type comes first

_libc = ctypes.CDLL(None, use_errno=True)


class SharedMapping:
    """The memory that a handle names, until ``close``; every page of it is present.

    Raises DeviceError where the handle does not lead to it; the sentence says what to change.
    """

    def __init__(self, handle: SharedMemoryHandle) -> None:
        self._size_bytes = handle.size_bytes
        self.memory = _open(handle)
        address = address_of(self.memory)
        self._guard: int | None = None
        try:
            if native.guard is not None:
                self._guard = native.guard.add(address, handle.size_bytes)
            # mmap(2) with MAP_POPULATE would do as well, but Python holds the GIL around it.
            fault_in(address, handle.size_bytes, for_write=False)
            self.check()
        except (DeviceError, MemoryError, OSError) as error:
            self.close()
            raise DeviceError(f"the engine's KV cache cannot be mapped: {error}") from error

    def check(self) -> None:
        """Raise DeviceError where the memory was taken away, now or before: copies are void."""
        lost = native.guard is not None and native.guard.is_lost(self._guard)
        if lost or self.memory.size() < self._size_bytes:  # of the file, now
            raise DeviceError("the engine has truncated its KV cache: it cannot be copied")

    def close(self) -> None:
        """Unmap. No array may be left over it."""
        if native.guard is not None and self._guard is not None:
            native.guard.drop(self._guard)
            self._guard = None
        self.memory.close()


def _open(handle: SharedMemoryHandle) -> mmap.mmap:
    name = f"/proc/{handle.pid}/fd/{handle.fd}"
    process_start_time(handle.pid)  # for its sentence, where there is no such process
    try:
        # O_PATH first: opening a device or a pipe that a forged handle names could do harm.
        peek = os.open(name, os.O_PATH | os.O_CLOEXEC)
        try:
            _verify(handle, peek, name)
            fd = os.open(f"/proc/self/fd/{peek}", os.O_RDWR | os.O_CLOEXEC)
        finally:
            os.close(peek)
        try:
            with contextlib.suppress(OSError):  # EPERM: its maker allows no seals
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
    # After the opening: if that process still runs now, the name led into it then.
    started = process_start_time(handle.pid)
    if started != handle.pid_start_time:
        raise DeviceError(
            f"process {handle.pid} is not the engine that registered: that one has ended "
            "(or runs in another PID namespace)"
        )
    if (found.st_dev, found.st_ino) != (handle.device, handle.inode):
        raise DeviceError(f"{name} is no longer the memory that was registered")
    if not stat.S_ISREG(found.st_mode) or _file_system(peek) != _TMPFS_MAGIC:
        raise DeviceError(f"{name} is no shared memory: only /dev/shm and memfds are mapped")
    if found.st_uid != os.geteuid():
        raise DeviceError(f"{name} belongs to user {found.st_uid}: run engine and agent as one")
    if not 0 < handle.size_bytes <= found.st_size:
        raise DeviceError(
            f"{name} has {found.st_size} bytes, the engine registered {handle.size_bytes}"
        )


def _file_system(fd: int) -> int:
    """The kind of file system that a file lies in. Raises OSError."""
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(fd, found) != 0:
        raise OSError(ctypes.get_errno(), "fstatfs")
    return ctypes.c_long.from_buffer(found).value
