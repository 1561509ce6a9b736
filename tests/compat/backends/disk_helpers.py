"""Shared by the tests of the disk backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from lmcache_redis.cache.disk.files import LOCK_NAME
from lmcache_redis.chunks.keys import ObjectKey
from lmcache_redis.compat.backends import LMCLocalDiskBackend
from tests.compat.backends.contract import key_of, tensor_of

# Of a file of `fill`: the first page, and the payload in blocks.
FILE_BYTES = 4096 + 4096

OpenTier = Callable[..., LMCLocalDiskBackend]


def fill(tier: LMCLocalDiskBackend, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert tier.put(key_of(number), tensor_of(number, (100,)))


def number_of(key: ObjectKey) -> int:
    return int.from_bytes(key.chunk_hash, "big")


def held(tier: LMCLocalDiskBackend) -> list[int]:
    return sorted(number_of(key) for key in tier.list())


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
