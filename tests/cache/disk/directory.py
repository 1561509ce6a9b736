# SPDX-License-Identifier: Apache-2.0
"""Blocking calls to a disk tier, and what its directory has."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lmcache_redis.cache.disk.files import LOCK_NAME
from lmcache_redis.cache.disk.tier import DiskTier
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.chunks.metadata import MemoryFormat, RemoteMetadata
from lmcache_redis.chunks.names import ChunkNames
from lmcache_redis.tiers import ChunkIO, ReadOutcome, WriteOutcome

NAMES = ChunkNames()
WAIT_S = 30.0
# Of a file of `fill`: the first page, and the payload in blocks.
FILE_BYTES = 4096 + 4096


def key_of(number: int, model_name: str = "org/model") -> ObjectKey:
    return ObjectKey(number.to_bytes(8, "big"), model_name, 0x0100_0100)


def payload_of(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def metadata_of(length: int) -> RemoteMetadata:
    return RemoteMetadata(length, [(length,)], ["uint8"], MemoryFormat.UNDEFINED)


class Disk:
    """A tier in a directory. Thread-safe; close it."""

    def __init__(self, directory: Path, limit_bytes: int = 1 << 20, **settings: Any) -> None:
        self.tier = DiskTier(directory, limit_bytes, write_nice=0, **settings)
        self.close = lambda: self.tier.close(10.0)

    @property
    def used_bytes(self) -> int:
        return self.tier.store.used_bytes

    def put(self, key: ObjectKey, payload: bytes) -> bool:
        frame = NAMES.frame(key, metadata_of(len(payload)), max(1, len(payload)))
        job = ChunkIO(NAMES.chunk_key(key), frame, [memoryview(payload)], math.inf)
        outcome = _answer(lambda done: self.tier.store_all([job], lambda _, each: done(each)))
        return outcome is WriteOutcome.STORED

    def get(self, key: ObjectKey) -> bytes | None:
        chunk_key = NAMES.chunk_key(key)
        described = _answer(lambda done: self.tier.describe((chunk_key,), math.inf, done))
        frame = described.frames[0] if described.frames else None
        if frame is None:
            return None
        payload = bytearray(frame.chunk_bytes)
        views = [memoryview(payload)]
        frame = NAMES.frame(key, RemoteMetadata.deserialize(frame.metadata), frame.chunk_bytes)
        job = ChunkIO(chunk_key, frame, views, math.inf)
        outcome = _answer(lambda done: self.tier.load_all([job], lambda _, each: done(each)))
        return bytes(payload) if outcome is ReadOutcome.LOADED else None

    def contains(self, key: ObjectKey) -> bool:
        return self.tier.lookup(NAMES.chunk_key(key))

    def remove(self, key: ObjectKey) -> bool:
        chunk_key = NAMES.chunk_key(key)
        return bool(_answer(lambda done: self.tier.remove(chunk_key, math.inf, done)).removed)

    def list(self) -> list[ObjectKey]:
        found = map(NAMES.parse, self.tier.keys(b"", math.inf, 1 << 30).keys)
        return [key for key in found if key is not None]


def _answer(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    answered, answers = threading.Event(), []

    def done(answer: Any) -> None:
        answers.append(answer)
        answered.set()

    ask(done)
    assert answered.wait(WAIT_S)
    return answers[0]


def fill(disk: Disk, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert disk.put(key_of(number), payload_of(number, 100))


def number_of(key: ObjectKey) -> int:
    return int.from_bytes(key.chunk_hash, "big")


def held(disk: Disk) -> list[int]:
    return sorted(number_of(key) for key in disk.list())


def files_in(directory: Path) -> list[Path]:
    """All but the lock."""
    return sorted(
        path for path in directory.rglob("*") if path.is_file() and path.name != LOCK_NAME
    )


def disk_use(directory: Path) -> int:
    """In blocks of 4 KiB, as they are this moment."""
    return sum(-(-_size_of(path) // 4096) * 4096 for path in files_in(directory))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # evicted since it was listed
