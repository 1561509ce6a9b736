"""Key locks that serialise the changes of a key in a tier without blocking a thread."""

from __future__ import annotations

from collections import deque

from lmcache_redis.cache.owner import Action, Owner


class KeyLock:
    """A lock per key. Owned by the owner's thread. Unlocked keys use no memory."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._held: dict[bytes, deque[Action] | None] = {}  # waiters of each; None: no waiters yet

    def try_acquire(self, key: bytes) -> bool:
        """Takes the lock if it is free."""
        if key in self._held:
            return False
        self._held[key] = None
        return True

    def wait(self, key: bytes, acquired: Action) -> None:
        """Waits for a lock that is held: posts ``acquired`` when the caller has it."""
        waiting = self._held[key]
        if waiting is None:
            waiting = self._held[key] = deque()
        waiting.append(acquired)

    def release(self, key: bytes) -> None:
        """Passes the lock to the longest waiter, or frees it."""
        waiting = self._held[key]
        if waiting:
            # Posted: if many waiters release at once, calling each from here would nest them.
            self._owner.post(waiting.popleft())
        else:
            del self._held[key]
