# SPDX-License-Identifier: Apache-2.0
"""A third tier: chunks as objects of any store that fsspec knows. Only the tests have it.

An object is the header of the chunk's stripe 0, whose checksum covers the whole payload, then the
payload; its name is the key in hexadecimal digits. The index has what was there at the start, and
what this process has stored since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import fsspec
from xxhash import xxh3_64_intdigest

from lmcache_redis.cache.blocking import BlockingTier
from lmcache_redis.chunks.frame import HEADER_BYTES, STORE_ID_BYTES, ChunkFrame, describe_header
from lmcache_redis.tier_kinds import Medium, TierKind
from lmcache_redis.tiers import CallOutcome, ReadOutcome, RemoveResult, TierPlace, WriteOutcome

OBJECTS = TierKind("objects", "o", "objects", "in the object store", Medium.STORAGE, True)


class StoredObject(NamedTuple):
    frame: ChunkFrame


class ObjectStore:
    """url: of a folder, as fsspec knows it. Raises what the store raises if it cannot be listed."""

    def __init__(self, url: str) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(url)
        self._fs.makedirs(self._root, exist_ok=True)
        self._lock = threading.Lock()  # of what becomes visible
        self._next = 0
        self._index: dict[bytes, StoredObject] = {}
        for path in self._fs.ls(self._root, detail=False):
            name = path.rpartition("/")[2]
            if "." not in name:
                header = describe_header(self._fs.cat_file(path, start=0, end=HEADER_BYTES))
                frame = ChunkFrame(
                    header.fingerprint, header.chunk_hash, header.chunk_bytes,
                    header.payload_bytes, header.metadata.serialize(),
                )  # fmt: skip
                self._index[bytes.fromhex(name)] = StoredObject(frame)

    def find(self, key: bytes) -> StoredObject | None:
        return self._index.get(key)

    def keys(self, prefixes: bytes | tuple[bytes, ...] = b"") -> list[bytes]:
        return [key for key in [*self._index] if key.startswith(prefixes)]

    def keep(self, key: bytes) -> None:
        """Nothing is evicted here."""

    def load(self, key: bytes, frame: ChunkFrame, payload: memoryview) -> ReadOutcome:
        if key not in self._index:
            return ReadOutcome.MISSING
        try:
            found = memoryview(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            self._index.pop(key, None)
            return ReadOutcome.MISSING
        except OSError:
            return ReadOutcome.UNAVAILABLE
        header, stored = frame.check_header(found, 0), found[HEADER_BYTES:]
        if not header.ok or len(stored) != len(payload):
            return ReadOutcome.FOREIGN
        if xxh3_64_intdigest(stored) != header.checksum:
            return ReadOutcome.CORRUPT
        payload[:] = stored
        return ReadOutcome.LOADED

    def write(
        self,
        key: bytes,
        frame: ChunkFrame,
        payload: memoryview,
        is_cancelled: Callable[[], bool],
    ) -> WriteOutcome:
        header = frame.header(
            0, bytes(STORE_ID_BYTES), xxh3_64_intdigest(payload), time.time_ns() // 1_000_000
        )
        with self._lock:
            self._next += 1
            aside = f"{self._path(key)}.{self._next}"
        try:
            self._fs.pipe_file(aside, bytes(header) + payload)
            with self._lock:
                if is_cancelled():
                    self._fs.rm_file(aside)
                    return WriteOutcome.CANCELLED
                self._fs.mv(aside, self._path(key))
                self._index[key] = StoredObject(frame)
        except OSError:
            return WriteOutcome.UNAVAILABLE
        return WriteOutcome.STORED

    def remove(self, key: bytes) -> bool:
        return bool(self.remove_or_keep(key).removed)

    def remove_or_keep(self, key: bytes) -> RemoveResult:
        with self._lock:
            if key not in self._index:
                return RemoveResult(CallOutcome.DONE)
            try:
                self._fs.rm_file(self._path(key))
            except FileNotFoundError:
                pass
            except OSError:
                return RemoveResult(CallOutcome.UNAVAILABLE)
            del self._index[key]
        return RemoveResult(CallOutcome.DONE, 1)

    def _path(self, key: bytes) -> str:
        return f"{self._root}/{key.hex()}"


class ObjectTier(BlockingTier):
    def __init__(self, url: str, read_patience_s: float = 5.0) -> None:
        self._url = url
        super().__init__("objects", ObjectStore(url), read_patience_s=read_patience_s)

    @property
    def place(self) -> TierPlace:
        return TierPlace(self._url)
