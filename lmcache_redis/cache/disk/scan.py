"""Reads the directory of a disk tier when the tier is opened: 50 to 80 µs a file.

The first page and the size of every file are checked. Payloads are not read: their checksums are
verified when they are loaded. Invalid files are removed, with one log line each: truncated, of
another version, damaged, or under another chunk's name; and the older of two files of one chunk, if
a process ended between writing the new file and removing the old one. Temporary files are removed
too. Only files whose names have the tier's form are removed. All others are left alone and logged
once, as are files of the tier that cannot be opened.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lmcache_redis.cache.disk.files import LOCK_NAME, open_file, remove_file
from lmcache_redis.cache.disk.format import (
    FANOUT_NAME,
    FILE_NAME,
    PAGE_BYTES,
    StoredFile,
    StoredShape,
    file_path,
    key_digest,
    parse_page,
)
from lmcache_redis.errors import FormatError

logger = logging.getLogger(__name__)


class Scan:
    """One pass over a locked directory. Raises OSError if it cannot be listed.

    is_stopped: asked before each file; if it says so, the rest is not looked at. found: one file
    per key, from the least to the most recently used.
    """

    def __init__(self, directory: Path, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self._directory = os.fspath(directory)
        self._newest: dict[bytes, tuple[int, StoredFile]] = {}  # by key; when it was used
        self._cuts: dict[StoredShape, StoredShape] = {}
        self._left_alone: list[str] = []
        for path in self._paths():
            if is_stopped():
                break
            self._look_at(path)
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
        try:
            remove_file(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error.strerror)


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)
