# SPDX-License-Identifier: Apache-2.0
"""Looks at the files of adapters that vLLM may read, for a thread that must not wait for files.

One thread looks for all adapters, and ends when there is nothing to look at. The first look for a
request is waited for, briefly. Its result counts for the request until a later look has another;
that is begun in time, and never waited for. A result that nothing has renewed for long does not
count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from lmcache_redis.processes import NamedThread

logger = logging.getLogger("vllm.lmcache_redis")

# Path of an adapter, and whether its format is "3D".
Place = tuple[str, bool]
# Of a path, its format, and digests by state: a state and its digest, b"" for none.
LookAt = Callable[[str, bool, Mapping[Any, bytes]], tuple[Any, bytes]]

_MOST_KNOWN = 1024  # states of files and their digests
_MOST_LOOKS = 256


class _Look:
    """One look at an adapter's files. asker: the last for whom. digest: once it is done."""

    def __init__(self, place: Place, asker: object) -> None:
        self.place = place
        self.asker = asker
        self.since_s = time.monotonic()
        self.done = threading.Event()
        self.digest = b""


class AdapterLooks:
    """Looks by the ids of adapters. Not thread-safe.

    deadline_s: the longest wait, once while files do not answer. renewed_s: the age of a result at
    which another look begins, and at which it does not count for another asker. counts_s: the age
    at which it no longer counts for anyone.
    """

    deadline_s = 0.2
    renewed_s = 0.05
    counts_s = 1.0

    def __init__(self, look_at: LookAt) -> None:
        self._look_at = look_at
        self._seen: dict[int, _Look] = {}
        self._begun: dict[int, _Look] = {}
        self._thread = _LookingThread(self._look)
        self._known: dict[Any, bytes] = {}  # digests by state, of that thread alone

    def digest(self, number: int, place: Place, asker: object) -> bytes | None:
        """What was seen of an adapter's files: b"" if they have no digest; None: no answer."""
        now_s = time.monotonic()
        self._take_done()
        seen, begun = self._seen.get(number), self._begun.get(number)
        if any(each is not None and each.place != place for each in (seen, begun)):
            self.forget(number)
            seen = begun = None
        if begun is None and (seen is None or seen.since_s < now_s - self.renewed_s):
            if len(self._begun) >= _MOST_LOOKS:
                return None
            begun = self._begun[number] = _Look(place, asker)
            self._thread.add(begun)
        if seen is not None:
            within_s = self.counts_s if seen.asker is asker else self.renewed_s
            if seen.since_s >= now_s - within_s:
                seen.asker = asker
                return seen.digest
        assert begun is not None
        # The thread may have begun another look before, which hangs.
        since_s = min(begun.since_s, self._thread.busy_since_s or begun.since_s)
        begun.done.wait(max(0.0, since_s + self.deadline_s - now_s))
        return begun.digest if begun.done.is_set() else None

    def forget(self, number: int) -> None:
        """What was seen of its files, or is being seen, says nothing of those read next."""
        self._seen.pop(number, None)
        self._begun.pop(number, None)

    def _take_done(self) -> None:
        for number in [number for number, look in self._begun.items() if look.done.is_set()]:
            self._seen.pop(number, None)
            self._seen[number] = self._begun.pop(number)
        while len(self._seen) > _MOST_LOOKS:
            del self._seen[next(iter(self._seen))]

    def _look(self, look: _Look) -> None:
        """On the thread."""
        path, is_3d = look.place
        try:
            state, look.digest = self._look_at(path, is_3d, self._known)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[state] = look.digest
        except Exception:
            logger.exception(
                "requests with the adapter %s are not cached; please report this", path
            )
        look.done.set()


class _LookingThread:
    """Does one after another. busy_since_s: when it began what it is doing; None: nothing."""

    def __init__(self, do: Callable[[_Look], None]) -> None:
        self._do = do
        self._lock = threading.Lock()
        self._todo: deque[_Look] = deque()
        self._runs = False
        self.busy_since_s: float | None = None

    def add(self, look: _Look) -> None:
        with self._lock:
            self._todo.append(look)
            if self._runs:
                return
            self._runs = True
        NamedThread("adapter files", self._run).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._runs, self.busy_since_s = False, None
                    return
                look = self._todo.popleft()
                self.busy_since_s = time.monotonic()
            self._do(look)
