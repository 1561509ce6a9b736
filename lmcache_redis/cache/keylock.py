"""Changes of one key in a tier, one after the other, without a thread that waits."""

from __future__ import annotations

from collections import deque

from lmcache_redis.cache.owner import Action, Owner


class KeyLock:
    """A lock for each key. Owner's thread only. Keys that none holds take no memory."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._held: dict[bytes, deque[Action] | None] = {}  # who waits for each, None: none does

    def try_acquire(self, key: bytes) -> bool:
        """Takes the lock if it is free."""
        if key in self._held:
            return False
        self._held[key] = None
        return True

    def wait(self, key: bytes, acquired: Action) -> None:
        """Posts ``acquired`` when the lock, which is held, is the caller's."""
        waiting = self._held[key]
        if waiting is None:
            waiting = self._held[key] = deque()
        waiting.append(acquired)

    def release(self, key: bytes) -> None:
        """Hands the lock to the one that has waited longest."""
        waiting = self._held[key]
        if waiting:
            # Posted: of many that have nothing to do with it each would release it within the last.
            self._owner.post(waiting.popleft())
        else:
            del self._held[key]
