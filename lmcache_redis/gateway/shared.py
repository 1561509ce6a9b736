"""What the connections of a gateway share: counters, log lines, threads, memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lmcache_redis.backends.interface import LMCBackendInterface
from lmcache_redis.gateway.slots import SlotPool

SILENCE_S = 10.0
_DROPPED_BYTES = 256 << 10
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Counters:
    """Counters only grow, from the start of the server; the loop's thread writes them."""

    connections: int = 0  # accepted, also those that were refused then
    refused_connections: int = 0  # not on the allow-list, or one too many
    failed_handshakes: int = 0
    puts: int = 0
    gets: int = 0
    exists: int = 0
    lists: int = 0
    healths: int = 0
    stored: int = 0
    not_stored: int = 0  # a tier could not, for lack of room or of a server
    hits: int = 0
    misses: int = 0
    payload_bytes_in: int = 0
    payload_bytes_out: int = 0
    malformed: int = 0  # requests that had to fail, or whose connection had to be closed
    stalled: int = 0  # connections closed because a message did not go on
    idle: int = 0  # connections closed because no request came
    abandoned: int = 0  # connections that their client ended in the middle of a request
    errors: int = 0  # connections closed because of a fault of our own

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return dataclasses.asdict(self)


class QuietLog:
    """Logs at most one warning of a kind in `SILENCE_S`, with the number of those left out."""

    def __init__(self, logger: logging.Logger, silence_s: float = SILENCE_S) -> None:
        self._logger = logger
        self._silence_s = silence_s
        self._kinds: dict[str, tuple[float, int]] = {}

    def warning(self, kind: str, message: str, *args: object) -> None:
        """kind: one of few words of the program, never of a client."""
        now_s = time.monotonic()
        until_s, left_out = self._kinds.get(kind, (0.0, 0))
        if now_s < until_s:
            self._kinds[kind] = (until_s, left_out + 1)
            return
        self._kinds[kind] = (now_s + self._silence_s, 0)
        more = f" ({left_out} more like it since the last such line)" if left_out else ""
        self._logger.warning(message + more, *args)


class CallThreads:
    """Daemon threads for calls to tiers, which may hang: the end of the process does not wait.

    The threads of `concurrent.futures` are joined when the process ends; these are not. The
    loop's thread only.
    """

    def __init__(self, count: int, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._count = count
        self._ended = False
        for number in range(count):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    async def call(self, function: Callable[..., _Result], *args: object) -> _Result:
        """Calls it on a thread. Raises what it raises, and RuntimeError after `end`."""
        if self._ended:
            raise RuntimeError("a call after the threads were ended")
        future: Future[_Result] = Future()
        self._queue.put((future, partial(function, *args)))
        return await asyncio.wrap_future(future)

    def end(self) -> None:
        """Cancels calls that have not begun; those in flight are left to themselves."""
        self._ended = True
        with contextlib.suppress(Empty):
            while (work := self._queue.get_nowait()) is not None:
                work[0].cancel()
        for _ in range(self._count):
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            future, call = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)  # the caller has it
            del work, future, call  # they hold views of slots


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
    threads: CallThreads
    counters: Counters
    log: QuietLog
    max_payload_bytes: int
    one_list: asyncio.Lock  # a LIST may take long and much memory: one at a time
    dropped: Dropped
