"""Redis as a tier of the cache: the data plane behind the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.outcomes import (
    ChunkIO,
    ExistsResult,
    PlaneState,
    ReadOutcome,
    ScanResult,
    WriteOutcome,
)
from lmcache_redis.resp.plane import RedisPlane

_FIRST_STRIPE = stripe_key(b"", 0)


class RedisTier:
    """A `Tier`. A chunk is there when its stripe 0 is: that one is written last.

    Every job of the plane ends by its deadline, so none is ever stuck. `clear` raises ValueError
    for a prefix without the magic of our keys.
    """

    name = "Redis"

    def __init__(self, plane: RedisPlane) -> None:
        self._plane = plane
        self.cancel = plane.cancel
        self.clear = plane.clear
        self.close = plane.close

    @property
    def state(self) -> PlaneState:
        return self._plane.state

    def lookup(self, key: bytes) -> bool | None:
        return None

    def scan(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ScanResult], None]
    ) -> None:
        self._plane.scan([key + _FIRST_STRIPE for key in keys], deadline, done)

    def exists(
        self, keys: Sequence[bytes], deadline: float, done: Callable[[ExistsResult], None]
    ) -> None:
        self._plane.exists([key + _FIRST_STRIPE for key in keys], deadline, done)

    def read_all(
        self,
        jobs: Sequence[ChunkIO],
        done: Callable[[ChunkIO, ReadOutcome], None],
        stuck: Callable[[ChunkIO], None],
    ) -> None:
        self._plane.read_all(jobs, done)

    def write_all(
        self,
        jobs: Sequence[ChunkIO],
        done: Callable[[ChunkIO, WriteOutcome], None],
        stuck: Callable[[ChunkIO], None],
    ) -> None:
        self._plane.write_all(jobs, done)
