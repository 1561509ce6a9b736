"""Key locks: shared by readers, exclusive for a writer, granted in the order of requests.

In Redis, no write or removal may overlap a read of the same chunk by this process: a reader that
found a torn chunk would remove it, and with it what was just stored. A thread may release a lock
that another thread acquired. Unlocked keys use no memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable
from concurrent.futures import Future, TimeoutError
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

# Done when the lock is granted. `cancel` withdraws the request; False: it was granted already.
Grant = Future[None]

_WRITER = -1


class _KeyLock:
    """The lock of one key. holders: the number of readers, or -1 for a writer."""

    __slots__ = ("holders", "waiting")

    def __init__(self) -> None:
        self.holders = 0
        self.waiting: deque[tuple[Grant, bool]] = deque()

    def is_free(self, exclusive: bool) -> bool:
        return not self.holders if exclusive else self.holders != _WRITER

    def hold(self, exclusive: bool) -> None:
        self.holders = _WRITER if exclusive else self.holders + 1

    def release(self) -> None:
        self.holders = 0 if self.holders == _WRITER else self.holders - 1

    def grant(self) -> list[Grant]:
        """Take the requests that can be granted now from the queue."""
        granted: list[Grant] = []
        while self.waiting:
            grant, exclusive = self.waiting[0]
            if not self.is_free(exclusive) and not grant.cancelled():
                break
            self.waiting.popleft()
            if grant.set_running_or_notify_cancel():
                self.hold(exclusive)
                granted.append(grant)
        return granted


class KeyLocks(Generic[KeyT]):
    """Thread-safe. The holder releases each granted lock once."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[KeyT, _KeyLock] = {}

    def request(self, key: KeyT, *, exclusive: bool) -> Grant:
        """Request the lock without waiting for it.

        Callbacks of the grant run on the thread that releases the lock, or on this one.
        """
        grant = Grant()
        with self._mutex:
            self._locks.setdefault(key, _KeyLock()).waiting.append((grant, exclusive))
        # Readers may be waiting behind a writer that withdraws its request.
        grant.add_done_callback(lambda grant: self._grant(key) if grant.cancelled() else None)
        self._grant(key)
        return grant

    def acquire(self, key: KeyT, deadline: float, *, exclusive: bool) -> bool:
        """Wait for the lock until the deadline (monotonic); return whether it was granted."""
        with self._mutex:
            lock = self._locks.setdefault(key, _KeyLock())
            if not lock.waiting and lock.is_free(exclusive):
                lock.hold(exclusive)
                return True
        grant = self.request(key, exclusive=exclusive)
        try:
            grant.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            return not grant.cancel()
        except BaseException:
            # Interrupted: a lock granted without its caller's knowledge would never be released.
            if not grant.cancel():
                self.release(key)
            raise
        return True

    def release(self, key: KeyT) -> None:
        with self._mutex:
            self._locks[key].release()
        self._grant(key)

    def _grant(self, key: KeyT) -> None:
        with self._mutex:
            lock = self._locks.get(key)
            if lock is None:
                return
            granted = lock.grant()
            if not lock.holders and not lock.waiting:
                del self._locks[key]
        for grant in granted:
            grant.set_result(None)
