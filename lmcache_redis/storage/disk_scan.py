"""What a directory of the disk tier holds when the tier is opened.

The first page and the size of every file are checked; payloads are not read, their checksums
are checked when they are asked for. What does not add up is removed, one log line each: files
cut short, of another version, damaged, under a name that is not theirs, and the older one where
a process died between storing a chunk again and removing what it replaced. Temporary files are
removed too. All of that only where the name is one that the tier gives: anything else is left
alone and said once. So is a file of ours that the system would not let us read.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lmcache_redis.errors import FormatError
from lmcache_redis.keys import ObjectKey
from lmcache_redis.protocol import RemoteMetadata
from lmcache_redis.storage.disk_files import LOCK_NAME, open_file, remove_file
from lmcache_redis.storage.disk_format import (
    FANOUT_NAME,
    FILE_NAME,
    PREAMBLE_BYTES,
    TEMPORARY_NAME,
    describe_preamble,
    file_path,
    key_digest,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file that is whole as far as its first page and its size tell."""

    key: ObjectKey
    sequence: int
    metadata: RemoteMetadata
    used_unix_ns: int


class Scan:
    """One pass over a directory that is locked. Raises OSError if it cannot be listed.

    found: one file for each key, from the least to the most recently used. next_sequence:
    larger than any in use.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._newest: dict[ObjectKey, FoundFile] = {}
        self._metadata: dict[RemoteMetadata, RemoteMetadata] = {}
        self._left_alone: list[str] = []
        self.next_sequence = 0
        for path in self._paths():
            self._look_at(path)
        if self._left_alone:
            logger.warning(
                "%d files in %s are left alone: they are not of the disk tier, or cannot be "
                "read; the first is %s",
                len(self._left_alone),
                directory,
                self._left_alone[0],
            )
        self.found = sorted(
            self._newest.values(), key=lambda each: (each.used_unix_ns, each.sequence)
        )

    def _paths(self) -> Iterator[str]:
        """All that may be ours by its name."""
        for outer in _entries(os.fspath(self._directory)):
            if outer.name == LOCK_NAME:
                continue
            if not FANOUT_NAME.fullmatch(outer.name) or not outer.is_dir(follow_symlinks=False):
                self._left_alone.append(outer.path)
                continue
            for inner in _entries(outer.path):
                known = FILE_NAME.fullmatch(inner.name) or TEMPORARY_NAME.fullmatch(inner.name)
                if (
                    known
                    and inner.name.startswith(outer.name)
                    and inner.is_file(follow_symlinks=False)
                ):
                    yield inner.path
                else:
                    self._left_alone.append(inner.path)

    def _look_at(self, path: str) -> None:
        named = FILE_NAME.fullmatch(os.path.basename(path))
        if named is None:
            self._remove(path, "it was never finished")
            return
        try:
            file = self._described(path, named)
        except FormatError as error:
            self._remove(path, str(error))
            return
        except OSError as error:
            if error.errno == errno.EIO:
                self._remove(path, "it cannot be read")
            else:
                self._left_alone.append(path)
            return
        self.next_sequence = max(self.next_sequence, file.sequence + 1)
        other = self._newest.get(file.key)
        older = None
        if other is not None:
            older, file = sorted((other, file), key=lambda each: each.sequence)
        self._newest[file.key] = file
        if older is not None:
            path = os.path.join(self._directory, file_path(older.key, older.sequence))
            self._remove(path, "its chunk was stored again")

    def _described(self, path: str, named: re.Match[str]) -> FoundFile:
        fd = open_file(path)
        try:
            # Without this the kernel reads ahead, 128 KiB for each file.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            status = os.fstat(fd)
            preamble = os.pread(fd, PREAMBLE_BYTES, 0)
        finally:
            os.close(fd)
        key, metadata = describe_preamble(preamble)
        digest, sequence = named.groups()
        if digest != key_digest(key):
            raise FormatError("its name is that of another chunk")
        if status.st_size != PREAMBLE_BYTES + metadata.length:
            raise FormatError(
                f"it has {status.st_size - PREAMBLE_BYTES} bytes of a payload of {metadata.length}"
            )
        # Chunks of one layout share their metadata, and there may be millions.
        shared = self._metadata.setdefault(metadata, metadata)
        return FoundFile(key, int(sequence, 16), shared, status.st_mtime_ns)

    def _remove(self, path: str, why: str) -> None:
        logger.warning("%s is removed: %s", path, why)
        try:
            remove_file(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", path, error.strerror)


def _entries(path: str) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)
