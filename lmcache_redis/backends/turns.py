"""Who may touch a key: several readers, or one writer, in the order in which they came.

A tier lets nobody overwrite or remove a chunk that another thread of it is reading: what the
reader found torn it would clean up, and with it what was just stored. A turn may be given back
by another thread than the one that took it. Keys that nobody touches take no memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_WRITER = -1


class _Waiter:
    """admitted: told once that the turn has come; False gives it back at once."""

    __slots__ = ("admitted", "exclusive")

    def __init__(self, exclusive: bool, admitted: Callable[[], bool]) -> None:
        self.exclusive = exclusive
        self.admitted = admitted


class _Line:
    """Those who hold a key (so many readers, or -1 for a writer), and those who wait for it."""

    __slots__ = ("holders", "waiting")

    def __init__(self) -> None:
        self.holders = 0
        self.waiting: deque[_Waiter] = deque()

    def admit(self) -> list[_Waiter]:
        """Whose turn it is now."""
        admitted: list[_Waiter] = []
        while self.waiting and self.is_free_for(self.waiting[0].exclusive):
            waiter = self.waiting.popleft()
            self.hold(waiter.exclusive)
            admitted.append(waiter)
        return admitted

    def is_free_for(self, exclusive: bool) -> bool:
        return not self.holders if exclusive else self.holders >= 0

    def hold(self, exclusive: bool) -> None:
        self.holders = _WRITER if exclusive else self.holders + 1


class Turns(Generic[KeyT]):
    """Thread-safe. Whoever got a turn calls `leave` once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[KeyT, _Line] = {}

    def try_enter(self, key: KeyT, *, exclusive: bool) -> bool:
        """Take the turn if it is to be had at once."""
        with self._lock:
            line = self._lines.get(key)
            if line is None:
                line = self._lines[key] = _Line()
            elif line.waiting or not line.is_free_for(exclusive):
                return False
            line.hold(exclusive)
            return True

    def enter(self, key: KeyT, deadline: float | None, *, exclusive: bool) -> bool:
        """Wait for the turn until the deadline (monotonic); whether it was got."""
        if self.try_enter(key, exclusive=exclusive):
            return True
        has_come = threading.Event()

        def admitted() -> bool:
            has_come.set()
            return True

        waiter = _Waiter(exclusive, admitted)
        self._wait_in_line(key, waiter)
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return has_come.wait(timeout_s) or not self._step_out(key, waiter)
        except BaseException:
            # Interrupted: a turn that nobody knows of would never be given back.
            if has_come.is_set() or not self._step_out(key, waiter):
                self.leave(key)
            raise

    def enter_later(self, key: KeyT, start: Callable[[], bool]) -> None:
        """Take the turn of a writer when it comes: `start` is called then, here or by `leave`.

        start: False gives the turn back at once. It may only enqueue.
        """
        self._wait_in_line(key, _Waiter(True, start))

    def leave(self, key: KeyT) -> None:
        """Give a turn back."""
        with self._lock:
            line = self._lines[key]
            line.holders = 0 if line.holders == _WRITER else line.holders - 1
        self._admit(key)

    def _wait_in_line(self, key: KeyT, waiter: _Waiter) -> None:
        with self._lock:
            line = self._lines.setdefault(key, _Line())
            line.waiting.append(waiter)
        self._admit(key)

    def _step_out(self, key: KeyT, waiter: _Waiter) -> bool:
        """Wait no longer; False: the turn has just come."""
        with self._lock:
            line = self._lines.get(key)
            if line is None or waiter not in line.waiting:
                return False
            line.waiting.remove(waiter)
        # Readers may have waited behind this writer alone.
        self._admit(key)
        return True

    def _admit(self, key: KeyT) -> None:
        # A loop, not a recursion: a line of many who give their turn back is no deep stack.
        while True:
            with self._lock:
                line = self._lines.get(key)
                if line is None:
                    return
                admitted = line.admit()
                if not line.holders and not line.waiting:
                    del self._lines[key]
            refused = [waiter for waiter in admitted if not waiter.admitted()]
            if not refused:
                return
            with self._lock:
                # Only writers refuse, and a writer is admitted alone.
                self._lines[key].holders = 0
