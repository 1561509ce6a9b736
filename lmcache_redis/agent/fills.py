"""Entries of the host pool that are being filled, and who waits for them.

One fill serves everybody: two equal prompts are loaded once, and a lookup may wait for
a chunk that a store is just bringing.
"""

from __future__ import annotations

from collections.abc import Callable

from lmcache_redis.hostpool import Entry, EntryState, HostPool

Watcher = Callable[[bool], None]


class Fills:
    """Begins and ends fills; tells watchers, once each, whether the entry became READY."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._watchers: dict[Entry, list[Watcher]] = {}
        self._cancels: dict[Entry, Callable[[], None]] = {}

    def begin(
        self, key: bytes, slots: int, cancel: Callable[[], None] | None = None
    ) -> Entry | None:
        """A FILLING entry with the filler's pin, or None where the pool has no room."""
        entry = self._pool.reserve(key, slots)
        if entry is not None:
            self._watchers[entry] = []
            if cancel is not None:
                self._cancels[entry] = cancel
        return entry

    def on_abandoned(self, entry: Entry, cancel: Callable[[], None]) -> None:
        """``cancel`` is called when the last watcher of a fill has gone."""
        self._cancels[entry] = cancel

    def watch(self, entry: Entry, watcher: Watcher) -> None:
        """Has ``watcher`` told how the fill of ``entry`` ends."""
        self._watchers[entry].append(watcher)

    def unwatch(self, entry: Entry, watcher: Watcher) -> None:
        """Forgets the watcher; a fill that nobody watches any more may be cancelled."""
        watchers = self._watchers.get(entry)
        if watchers is None or watcher not in watchers:
            return
        watchers.remove(watcher)
        if not watchers and entry in self._cancels:
            self._cancels.pop(entry)()

    def end(self, entry: Entry, *, filled: bool) -> bool:
        """Ends the fill: READY if ``filled`` and not discarded meanwhile, else DISCARDED.

        Gives the filler's pin back, after the watchers had a chance to add theirs.
        Returns whether the entry is READY.
        """
        watchers = self._watchers.pop(entry)
        self._cancels.pop(entry, None)
        ready = filled and self._pool.publish(entry)
        if not ready:
            self._pool.discard(entry)
        try:
            for watcher in watchers:
                watcher(ready)
        finally:
            self._pool.unpin(entry)
        return ready

    @staticmethod
    def filling(entry: Entry) -> bool:
        """Whether the entry is still being filled."""
        return entry.state is EntryState.FILLING
