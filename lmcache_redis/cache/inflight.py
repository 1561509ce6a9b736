"""Entries of the host pool that are being filled, and their watchers.

One load serves all requests for a chunk: two equal prompts load it once, and a lookup may wait for
a chunk that a store is gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from lmcache_redis.cache.pool import Entry, HostPool


class Filled(Enum):
    """How the filling of an entry ended."""

    READY = "ready"
    FAILED = "failed"
    STUCK = "stuck"  # a hung tier keeps its slots; the next tier may have the chunk


Watcher = Callable[[Filled], None]


class InflightLoads:
    """Begins and ends fills. Tells each watcher once how its fill ended."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._watchers: dict[Entry, list[Watcher]] = {}
        self._cancels: dict[Entry, Callable[[], None]] = {}

    def begin(self, key: bytes, units: int) -> Entry | None:
        """A FILLING entry with the filler's pin; None if the pool has no room."""
        entry = self._pool.reserve(key, units)
        if entry is not None:
            self._watchers[entry] = []
        return entry

    def on_abandoned(self, entry: Entry, cancel: Callable[[], None]) -> None:
        """Has ``cancel`` called when the last watcher of the fill stops watching."""
        self._cancels[entry] = cancel

    def watch(self, entry: Entry, watcher: Watcher) -> None:
        """Has ``watcher`` called when the fill of ``entry`` ends."""
        self._watchers[entry].append(watcher)

    def unwatch(self, entry: Entry, watcher: Watcher) -> None:
        """Forgets the watcher. Cancels the fill if it was the last one, and can be cancelled.

        The entry then leaves the index at once: whoever wants the chunk meanwhile loads it anew.
        """
        watchers = self._watchers.get(entry)
        if watchers is None or watcher not in watchers:
            return
        watchers.remove(watcher)
        if not watchers and entry in self._cancels:
            self.cancel(entry)
            self._pool.discard(entry)

    def when_ended(self, entry: Entry, action: Callable[[], None]) -> None:
        """Calls ``action`` when the fill of ``entry`` has ended, at once if it already has."""
        if self.ended(entry):
            action()
        else:
            self.watch(entry, lambda filled: action())

    def cancel(self, entry: Entry) -> None:
        """Cancels the fill of an entry if it can be; its watchers are told when it ends."""
        cancel = self._cancels.pop(entry, None)
        if cancel is not None:
            cancel()

    def end(self, entry: Entry, filled: Filled) -> bool:
        """Ends the fill: the entry is READY, or DISCARDED if the fill failed or it was discarded.

        Releases the filler's pin after the watchers ran, which may add theirs. Returns whether the
        entry is READY.
        """
        watchers = self._watchers.pop(entry)
        self._cancels.pop(entry, None)
        ready = filled is Filled.READY and self._pool.publish(entry)
        if not ready:
            self._pool.discard(entry)
            filled = Filled.FAILED if filled is Filled.READY else filled
        try:
            for watcher in watchers:
                watcher(filled)
        finally:
            self._pool.unpin(entry)
        return ready

    def ended(self, entry: Entry) -> bool:
        """Whether `end` was called for the entry."""
        return entry not in self._watchers
