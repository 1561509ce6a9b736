# SPDX-License-Identifier: Apache-2.0
"""The disk tier: a `BlockingTier` over the files of a directory, which it locks.

A tier that is closed while a call hangs keeps its directory locked, because the call may still
change it.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

from lmcache_redis.cache.blocking import PATIENCE_S, BlockingTier
from lmcache_redis.cache.disk.files import ChunkFiles, Scan, lock_directory
from lmcache_redis.cache.disk.store import DiskStore
from lmcache_redis.errors import ConfigError
from lmcache_redis.tiers import TierPlace

logger = logging.getLogger(__name__)


class DiskTier(BlockingTier):
    """Chunks in files of a directory, created if needed, that no other tier uses. Thread-safe.

    limit_bytes: see `store`. in_background: the files that are there are read on a thread, and the
    tier is down until that has ended. Others: see `BlockingTier`.

    Raises ConfigError if a value is invalid, or the directory cannot be used or is in use.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        *,
        read_patience_s: float = PATIENCE_S,
        read_threads: int = 2,
        write_threads: int = 1,
        write_nice: int = 10,
        in_background: bool = False,
    ) -> None:
        path = Path(directory)
        self.directory = os.fspath(path)
        self.store = DiskStore(ChunkFiles(path), limit_bytes)
        self._lock_fd = lock_directory(path)
        self._unread = "its files are being read"  # why the index is not complete
        super().__init__(
            "disk",
            self.store,
            read_patience_s=read_patience_s,
            read_threads=read_threads,
            write_threads=write_threads,
            write_nice=write_nice,
        )
        if in_background:
            self._writes.put(partial(self._read_directory, path), dropped=lambda: None)
            return
        self._read_directory(path)
        if self._unread:
            self.close(0.0)
            raise ConfigError(f"{self._unread}: make it readable or choose another")

    @property
    def place(self) -> TierPlace:
        return TierPlace(self.directory, self.store.used_bytes, self.store.limit_bytes)

    def close(self, deadline_s: float) -> bool:
        """See the contract."""
        if self._has_ended is not None:
            return self._has_ended
        if super().close(deadline_s):
            os.close(self._lock_fd)
            return True
        # A file may still be renamed into the directory.
        logger.warning("the disk does not answer: its directory stays locked by this process")
        return False

    @property
    def _why_down(self) -> str:
        return self._unread or self._detector.reason

    def _read_directory(self, path: Path) -> None:
        try:
            scan = Scan(path, is_stopped=lambda: self._has_ended is not None)
        except OSError as error:
            self._unread = f"the directory {path} cannot be read ({error.strerror})"
            logger.error("the disk tier stays down: %s", self._unread)
            return
        if self._has_ended is None:
            self.store.take_over(scan.found)
            logger.info("the disk tier is up: it has %d chunks", len(scan.found))
            self._unread = ""
