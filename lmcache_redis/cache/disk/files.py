# SPDX-License-Identifier: Apache-2.0
"""The files of the disk tier: written whole or not at all, and found again after a restart.

A file is written under a temporary name in its final folder, then renamed. Nothing is forced to
disk: after a power failure files may be missing or damaged, and reads detect damage by checksum.

I/O goes through the page cache, from which a chunk that is read again comes (6 to 7 GB/s). Direct
I/O was measured (ext4 on a virtual disk) and is no faster without fsync.

The directory belongs to this user or to root, and only they may write to it. No symbolic link in it
is followed: files are opened, renamed and removed relative to their folder.

Every function raises the OSError of the system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from xxhash import xxh3_64_intdigest

from lmcache_redis.cache.disk.format import (
    FANOUT_NAME,
    FILE_NAME,
    PAGE_BYTES,
    TEMPORARY_SUFFIX,
    OtherVersionError,
    StoredFile,
    StoredShape,
    check_page,
    file_path,
    key_digest,
    pack_page,
    parse_page,
)
from lmcache_redis.chunks.frame import ChunkFrame
from lmcache_redis.config import why_unsafe
from lmcache_redis.errors import ConfigError, FormatError, StartError

logger = logging.getLogger(__name__)

LOCK_NAME = "lmcr.lock"
# What a new file system has.
_NO_ONES = ("lost+found",)

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | _NO_LINK


def lock_directory(directory: Path) -> int:
    """Create the directory if needed and lock it, until the returned descriptor is closed.

    The lock's file marks it as one for chunks. Raises ConfigError if it cannot be used so.
    """
    fd = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        unsafe = why_unsafe(directory)
        if unsafe is not None:
            raise ConfigError(f"the directory for chunks is not safe: {unsafe}, or choose another")
        _refuse_others(directory)
        fd = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if fd is not None:
            os.close(fd)
        if isinstance(error, BlockingIOError):
            raise StartError(
                f"the directory {directory} is in use by another disk tier, of this or another "
                "process: choose another"
            ) from error
        raise ConfigError(
            f"the directory {directory} cannot be used for chunks ({error.strerror}): make it "
            "writable or choose another"
        ) from error
    return fd


def _refuse_others(directory: Path) -> None:
    """Raises ConfigError if the directory was never one for chunks and has other files."""
    names = {entry.name for entry in directory.iterdir()}
    others = [each for each in sorted(names) if not FANOUT_NAME.fullmatch(each)]
    others = [each for each in others if each not in _NO_ONES]
    if others and LOCK_NAME not in names:
        raise ConfigError(
            f"the directory {directory} has files that are not chunks, such as {others[0]}: choose "
            "one that is empty or does not exist"
        )


class ChunkFiles:
    """Files by key and sequence, in one directory. Stateless, so thread-safe."""

    def __init__(self, directory: Path) -> None:
        self.directory = os.fspath(directory)

    def path(self, key: bytes, sequence: int) -> str:
        return f"{self.directory}/{file_path(key, sequence)}"

    def write(self, key: bytes, sequence: int, frame: ChunkFrame, payload: memoryview) -> None:
        """Write a chunk's file; after an OSError the file does not exist."""
        folder_name, name = os.path.split(self.path(key, sequence))
        temporary = name + TEMPORARY_SUFFIX
        page = pack_page(key, frame, xxh3_64_intdigest(payload))
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder_name, 0o700)
        with _opened(folder_name) as folder:
            fd = os.open(temporary, _CREATE, 0o600, dir_fd=folder)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(page)
                    file.write(payload)
                    file.flush()
                    touch(fd)
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise

    def remove(self, key: bytes, sequence: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            remove_file(self.path(key, sequence))


def open_file(path: str) -> int:
    """Open a file of the tier for reading. Neither it nor its folder may be a symbolic link."""
    folder_name, name = os.path.split(path)
    with _opened(folder_name) as folder:
        return os.open(name, os.O_RDONLY | _NO_LINK, dir_fd=folder)


def remove_file(path: str) -> None:
    """Unlink a file of the tier. Its folder may not be a symbolic link."""
    folder_name, name = os.path.split(path)
    with _opened(folder_name) as folder:
        os.unlink(name, dir_fd=folder)


def read_chunk(fd: int, key: bytes, frame: ChunkFrame, payload: memoryview) -> None:
    """Fill the payload. Raises FormatError unless the file is this chunk, whole and undamaged."""
    expected_bytes = PAGE_BYTES + frame.chunk_bytes
    if os.fstat(fd).st_size != expected_bytes:
        raise FormatError(f"its size is not {expected_bytes} bytes")
    page = bytearray(PAGE_BYTES)
    with os.fdopen(fd, "rb", closefd=False) as file:
        if file.readinto(page) + file.readinto(payload) < expected_bytes:
            raise FormatError("it ends early")
    if check_page(page, key, frame) != xxh3_64_intdigest(payload):
        raise FormatError("its payload is damaged")


def touch(fd: int) -> None:
    """Set the time of last use, the file's mtime, finer than the kernel's clock tick would."""
    now_unix_ns = time.time_ns()
    os.utime(fd, ns=(now_unix_ns, now_unix_ns))


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    """A descriptor of a folder that is not a symbolic link; files are named relative to it."""
    fd = os.open(folder, _FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


class Scan:
    """One pass over a locked directory, when the tier is opened: 50 to 80 µs a file.

    The first page and the size of every file are checked; payloads are not read. Invalid and
    unfinished files are removed, with a log line each, and the older of two files of one chunk;
    those of other versions with one for all.
    Files whose names do not have the tier's form, and those that cannot be opened, are left alone
    and logged once. Raises OSError if the directory cannot be listed.

    is_stopped: asked before each file. found: one file per key, the least recently used first.
    """

    def __init__(self, directory: Path, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._directory = os.fspath(directory)
        self._newest: dict[bytes, tuple[int, StoredFile]] = {}  # by key; when it was used
        self._cuts: dict[StoredShape, StoredShape] = {}
        self._left_alone: list[str] = []
        self._outdated: list[str] = []  # what each is
        for path in self._paths():
            if is_stopped():
                break
            self._look_at(path)
        if self._outdated:
            logger.warning(
                "%d files in %s are removed, written by another version of the package; of the "
                "first: %s",
                len(self._outdated),
                directory,
                self._outdated[0],
            )
        if self._left_alone:
            logger.warning(
                "%d files in %s are left alone: they do not belong to the disk tier or cannot be "
                "read; the first is %s",
                len(self._left_alone),
                directory,
                self._left_alone[0],
            )
        newest = sorted(self._newest.values(), key=lambda each: (each[0], each[1].sequence))
        self.found = [file for _, file in newest]

    def _paths(self) -> Iterator[str]:
        """All files whose names have the tier's form."""
        for outer in _entries(self._directory):
            if outer.name == LOCK_NAME:
                continue
            if not FANOUT_NAME.fullmatch(outer.name) or not outer.is_dir(follow_symlinks=False):
                self._left_alone.append(outer.path)
                continue
            for inner in _entries(outer.path):
                is_named = FILE_NAME.fullmatch(inner.name) and inner.name.startswith(outer.name)
                if is_named and inner.is_file(follow_symlinks=False):
                    yield inner.path
                else:
                    self._left_alone.append(inner.path)

    def _look_at(self, path: str) -> None:
        try:
            found = self._described(path)
        except OtherVersionError as error:
            self._outdated.append(str(error))
            _unlink(path)
        except FormatError as error:
            self._remove(path, str(error))
        except OSError as error:
            if error.errno == errno.EIO:
                self._remove(path, "it cannot be read")
            else:
                self._left_alone.append(path)
        else:
            key = found[1].key
            both = self._newest.get(key, found), found
            (_, older), self._newest[key] = sorted(both, key=lambda each: each[1].sequence)
            if both[0] is not found:
                path = os.path.join(self._directory, file_path(key, older.sequence))
                self._remove(path, "its chunk was stored again")

    def _described(self, path: str) -> tuple[int, StoredFile]:
        named = FILE_NAME.fullmatch(os.path.basename(path))
        if named is None or named[3]:
            raise FormatError("it was never finished")
        fd = open_file(path)
        try:
            # Without this the kernel reads ahead, 128 KiB per file.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            status = os.fstat(fd)
            page = os.pread(fd, PAGE_BYTES, 0)
        finally:
            os.close(fd)
        key, cut = parse_page(page)
        if named[1] != key_digest(key):
            raise FormatError("its name is that of another chunk")
        if status.st_size != PAGE_BYTES + cut.chunk_bytes:
            raise FormatError(
                f"it has {status.st_size - PAGE_BYTES} bytes of a payload of {cut.chunk_bytes}"
            )
        # Chunks of one layout share their cut, and there may be millions.
        cut = self._cuts.setdefault(cut, cut)
        return status.st_mtime_ns, StoredFile(key, int(named[2], 16), cut)

    def _remove(self, path: str, why: str) -> None:
        logger.warning("%s is removed: %s", path, why)
        _unlink(path)


def _unlink(path: str) -> None:
    try:
        remove_file(path)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error.strerror)


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)
