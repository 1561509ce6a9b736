"""What the connections of a server have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from lmcache_redis.gateway.counting import Counters, QuietLog
from lmcache_redis.gateway.slots import SlotPool
from lmcache_redis.storage.interface import LMCBackendInterface

_Result = TypeVar("_Result")
_DROPPED_BYTES = 256 << 10


class Dropped:
    """Room for bytes that are thrown away: the same memory each time, with anything in it."""

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(_DROPPED_BYTES))

    def try_next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return [self._memory[:rest]]

    async def next(self, rest: int) -> Sequence[memoryview]:
        """See `stream.Room`."""
        return self.try_next(rest)


@dataclass(frozen=True, slots=True)
class Shared:
    """See the module. The loop's thread only."""

    backend: LMCBackendInterface
    slots: SlotPool
    threads: Executor
    counters: Counters
    log: QuietLog
    max_payload_bytes: int
    one_list: asyncio.Lock  # a LIST may take long and much memory: one at a time
    dropped: Dropped

    async def on_thread(self, call: Callable[..., _Result], *args: object) -> _Result:
        """Calls a tier, which may block."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, call, *args)
