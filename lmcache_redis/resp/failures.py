# SPDX-License-Identifier: Apache-2.0
"""What the operations of a server fail with now, by kind: why a server that is up is of no use.

A PING may be answered while every GET is refused, and stores may work while lookups fail. So each
kind of operation has its last error until one of that kind works.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from lmcache_redis.errors import ConfigError, RedisError, RedisTimeout
from lmcache_redis.resp.net.advice import SILENT, advised
from lmcache_redis.tiers import LastError, Operation


class Failures:
    """Of one server, whose address `where` is. Thread-safe."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._by_kind: dict[Operation, LastError] = {}
        self._replies: set[Operation] = set()  # those whose last error is a reply

    @property
    def errors(self) -> tuple[LastError, ...]:
        if not self._by_kind:
            return ()
        with self._lock:
            return newest_first(self._by_kind.values())

    def failed(self, operation: Operation, error: RedisError | ConfigError) -> None:
        is_silence = isinstance(error, RedisTimeout)
        is_reply = isinstance(error, RedisError) and error.refusal
        with self._lock:
            before = self._by_kind.get(operation)
            count = 1 if before is None else before.count + 1
            self._by_kind[operation] = LastError(
                operation, str(error), count, time.monotonic(), is_silence
            )
            (self._replies.add if is_reply else self._replies.discard)(operation)

    def late(self, operation: Operation) -> None:
        """The deadline has passed before it was tried: others of its kind took the time."""
        if operation not in self._by_kind:
            text = advised(f"Redis at {self._where} did not answer in time", SILENT)
            self.failed(operation, RedisTimeout(text))

    def worked(self, operation: Operation) -> None:
        if self._by_kind:  # without the lock: it is called for each chunk
            with self._lock:
                self._by_kind.pop(operation, None)

    def outage_is_over(self) -> None:
        """What was lost in it says nothing of the server that is up again; what it replied does."""
        with self._lock:
            kept = self._replies - {Operation.PROBE}
            self._by_kind = {each: self._by_kind[each] for each in kept & self._by_kind.keys()}


def newest_first(errors: Iterable[LastError]) -> tuple[LastError, ...]:
    return tuple(sorted(errors, key=lambda each: -each.at_s))
