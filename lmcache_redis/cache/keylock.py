"""Changes of one key in a tier, one after the other, without a thread that waits."""

from __future__ import annotations

from collections import deque

from lmcache_redis.cache.owner import Action, Owner


class KeyLock:
    """A lock for each key. Owner's thread only. Keys that none holds take no memory."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._waiting: dict[bytes, deque[Action]] = {}  # of each key that is held

    def acquire(self, key: bytes, acquired: Action) -> bool:
        """Whether the lock was free, and is the caller's. Otherwise ``acquired`` is posted then."""
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append(acquired)
            return False
        self._waiting[key] = deque()
        return True

    def release(self, key: bytes) -> None:
        """Hands the lock to the one that has waited longest."""
        waiting = self._waiting[key]
        if waiting:
            # Posted: of many that have nothing to do with it each would release it within the last.
            self._owner.post(waiting.popleft())
        else:
            del self._waiting[key]
