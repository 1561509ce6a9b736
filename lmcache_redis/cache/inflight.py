"""Entries of the host pool that are being filled, and who waits for them.

One load serves all who ask for the chunk: two equal prompts are loaded once, and a lookup may wait
for a chunk that a store is gathering.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from lmcache_redis.cache.pool import Entry, EntryState, HostPool


class Filled(Enum):
    """How the filling of an entry ended."""

    READY = "ready"
    FAILED = "failed"
    STUCK = "stuck"  # its slots are a hung tier's: the chunk can come from the next tier


Watcher = Callable[[Filled], None]


class InflightLoads:
    """Begins and ends fillings; tells watchers, once each, how they ended."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._watchers: dict[Entry, list[Watcher]] = {}
        self._cancels: dict[Entry, Callable[[], None]] = {}

    def begin(self, key: bytes, units: int) -> Entry | None:
        """A FILLING entry with the filler's pin, or None where the pool has no room."""
        entry = self._pool.reserve(key, units)
        if entry is not None:
            self._watchers[entry] = []
        return entry

    def on_abandoned(self, entry: Entry, cancel: Callable[[], None]) -> None:
        """``cancel`` is called when the last watcher of a filling has gone."""
        self._cancels[entry] = cancel

    def watch(self, entry: Entry, watcher: Watcher) -> None:
        """Has ``watcher`` told how the filling of ``entry`` ends."""
        self._watchers[entry].append(watcher)

    def unwatch(self, entry: Entry, watcher: Watcher) -> None:
        """Forgets the watcher; a filling without watchers may be cancelled."""
        watchers = self._watchers.get(entry)
        if watchers is None or watcher not in watchers:
            return
        watchers.remove(watcher)
        if not watchers:
            self.cancel(entry)

    def when_ended(self, entry: Entry, action: Callable[[], None]) -> None:
        """Calls ``action`` when the filling of ``entry`` has ended: now, if it has."""
        if self.ended(entry):
            action()
        else:
            self.watch(entry, lambda filled: action())

    def cancel(self, entry: Entry) -> None:
        """Ends the filling of an entry early, if that is known how; its watchers are told."""
        cancel = self._cancels.pop(entry, None)
        if cancel is not None:
            cancel()

    def end(self, entry: Entry, filled: Filled) -> bool:
        """Ends the filling: the entry is READY, or DISCARDED where it failed or was discarded.

        Gives the filler's pin back, after the watchers had a chance to add theirs.
        Returns whether the entry is READY.
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

    @staticmethod
    def filling(entry: Entry) -> bool:
        """Whether the entry's slots do not have their bytes yet."""
        return entry.state is EntryState.FILLING
