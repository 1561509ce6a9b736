"""Redis as a tier of the cache: the data plane behind the contract."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from queue import SimpleQueue

from lmcache_redis.cache.tier import FramesResult, Stuck
from lmcache_redis.keys import stripe_key
from lmcache_redis.resp.net.wire import escape_pattern
from lmcache_redis.resp.outcomes import (
    CallOutcome,
    ChunkIO,
    DescribeResult,
    Done,
    ExistsResult,
    KeysResult,
    PlaneState,
    ReadDone,
    RemoveResult,
    ScanResult,
    WriteDone,
)
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.stripe import ChunkFrame, StripeHeader

logger = logging.getLogger(__name__)

_FIRST_STRIPE = stripe_key(b"", 0)


class RedisTier:
    """A `Tier`. A chunk exists if its stripe 0 does, which is written last.

    Every job of the plane ends by its deadline, so none is ever stuck. `clear` raises ValueError
    for a prefix without the magic of our keys. In addition to the plane's commands, `keys` uses
    SCAN, and `describe` and `remove` use GETRANGE.
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

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        self._plane.scan([key + _FIRST_STRIPE for key in keys], deadline, done)

    def exists(self, keys: Sequence[bytes], deadline: float, done: Done[ExistsResult]) -> None:
        self._plane.exists([key + _FIRST_STRIPE for key in keys], deadline, done)

    def describe(self, keys: Sequence[bytes], deadline: float, done: Done[FramesResult]) -> None:
        def answer(result: DescribeResult) -> None:
            done(FramesResult(result.outcome, [_frame(header) for header in result.headers]))

        self._plane.describe([key + _FIRST_STRIPE for key in keys], deadline, answer)

    def keys(self, prefix: bytes, deadline: float) -> list[bytes]:
        """See the contract. SCANs the whole database, at a lower priority than lookups."""
        pattern = escape_pattern(prefix) + b"*" + _FIRST_STRIPE
        results: SimpleQueue[KeysResult] = SimpleQueue()
        self._plane.keys(pattern, deadline, results.put)
        result = results.get()
        if result.outcome is not CallOutcome.DONE:
            logger.warning("the list of chunks is not complete: %s", result.outcome.value)
        # Checked here too, because the server may match other names.
        found = [
            name.removesuffix(_FIRST_STRIPE)
            for name in result.names
            if name.startswith(prefix) and name.endswith(_FIRST_STRIPE)
        ]
        return [*dict.fromkeys(found)]

    def read_all(self, jobs: Sequence[ChunkIO], done: ReadDone, stuck: Stuck) -> None:
        self._plane.read_all(jobs, done)

    def write_all(self, jobs: Sequence[ChunkIO], done: WriteDone, stuck: Stuck) -> None:
        self._plane.write_all(jobs, done)

    def remove(self, key: bytes, deadline: float, done: Done[RemoveResult]) -> None:
        def described(result: DescribeResult) -> None:
            if result.outcome is CallOutcome.DONE:
                (header,) = result.headers
                count = header.stripe_count if header is not None else 1
                self._plane.remove(key, count, deadline, done)
            else:
                done(RemoveResult(result.outcome))

        self._plane.describe([key + _FIRST_STRIPE], deadline, described)


def _frame(header: StripeHeader | None) -> ChunkFrame | None:
    """The chunk whose stripe 0 has this header."""
    if header is None or header.stripe_index != 0:
        return None
    return ChunkFrame(
        header.fingerprint,
        header.chunk_hash,
        header.chunk_bytes,
        header.payload_bytes,  # no stripe is larger than stripe 0
        header.metadata.serialize(),
    )
