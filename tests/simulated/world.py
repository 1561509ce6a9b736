# SPDX-License-Identifier: Apache-2.0
"""A simulated time in which things happen one after the other, all of them decided by one seed."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
import random
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import Any

import numpy as np

Action = Callable[[], None]
Resume = Callable[[Any], None]
# What a story waits for: it is called with what goes on.
Wait = Callable[[Resume], None]
Story = Generator[Wait, Any, None]


class Violation(AssertionError):
    """An invariant does not hold."""


class Event:
    __slots__ = ("action",)

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class World:
    """Whatever is random is decided by ``random``; whatever is told of (`note`) is in the trace."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 1000.0
        self.events = 0
        self.violations: list[str] = []
        self._trace = hashlib.blake2b(digest_size=16)
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.now_s

    @property
    def digest(self) -> str:
        return self._trace.hexdigest()

    def note(self, *what: object) -> None:
        self._trace.update(repr((self.now_s, *what)).encode())

    def violated(self, what: str) -> None:
        """The next audit raises it: whoever calls may be called by code that survives errors."""
        self.violations.append(f"at {self.now_s:.6f}: {what}")

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def soon(self, mean_s: float) -> float:
        return self.random.expovariate(1 / mean_s)

    def at(self, due_s: float, action: Action) -> Event:
        event = Event(action)
        heapq.heappush(self._events, (due_s, next(self._order), event))
        return event

    def after(self, delay_s: float, action: Action) -> Event:
        return self.at(self.now_s + delay_s, action)

    def run_one(self, until_s: float = math.inf) -> bool:
        """The next event until then; False: there was none, and it is then."""
        while self._events and self._events[0][0] <= until_s:
            due_s, _, event = heapq.heappop(self._events)
            if event.action is not None:
                self.now_s = max(self.now_s, due_s)
                self.events += 1
                event.action()
                return True
        self.now_s = max(self.now_s, until_s)
        return False

    def pause(self, seconds: float) -> Wait:
        return lambda resume: self.after(seconds, lambda: resume(None)) and None


@lru_cache(1 << 14)
def content(key: bytes, nbytes: int) -> bytes:
    """What a chunk consists of, numbers of two bytes: its key decides it."""
    found = np.frombuffer(random.Random(key).randbytes(nbytes), np.uint8).copy()
    found[1::2] &= 0x3F  # finite
    return found.tobytes()


def scribble(memory: memoryview | bytearray) -> None:
    """Nobody relies on these bytes."""
    memory[:] = b"\x5a" * len(memory)
