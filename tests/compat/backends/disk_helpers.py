"""Shared by the tests of the disk backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lmcache_redis.compat.backends import LMCLocalDiskBackend
from tests.compat.backends.contract import key_of, tensor_of

OpenTier = Callable[..., LMCLocalDiskBackend]


def fill(tier: LMCLocalDiskBackend, numbers: Iterable[int]) -> None:
    for number in numbers:
        assert tier.put(key_of(number), tensor_of(number, (100,)))


def held(tier: LMCLocalDiskBackend) -> list[int]:
    return sorted(int.from_bytes(key.chunk_hash, "big") for key in tier.list())
