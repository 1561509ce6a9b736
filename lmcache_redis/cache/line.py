"""The line of lookups that wait for room in the host pool: first come, first served.

Who waits holds no pins, so no two lookups wait for each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from lmcache_redis.cache.owner import Owner


class Line:
    """Owned by the owner's thread. `wake` is for the pool: it has more room."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._waiting: dict[Hashable, tuple[Callable[[], None], int]] = {}  # in order of arrival
        self._is_posted = False

    def __len__(self) -> int:
        return len(self._waiting)

    def is_turn_of(self, who: Hashable) -> bool:
        """Whether nobody waits who came before."""
        return next(iter(self._waiting), who) == who

    def bytes_before(self, who: Hashable) -> int:
        """What those who came before want to load."""
        total = 0
        for each, (_, nbytes) in self._waiting.items():
            if each == who:
                break
            total += nbytes
        return total

    def wait(self, who: Hashable, nbytes: int, again: Callable[[], None]) -> None:
        """Has ``again`` called whenever there is more room and nobody waits before.

        Until `leave`. Who waits already keeps the place.
        """
        self._waiting[who] = (again, nbytes)

    def leave(self, who: Hashable) -> None:
        """Does nothing if it does not wait."""
        if self._waiting.pop(who, None) is not None:
            self.wake()

    def wake(self) -> None:
        if self._waiting and not self._is_posted:
            self._is_posted = True
            self._owner.post(self._serve)

    def _serve(self) -> None:
        self._is_posted = False
        first = next(iter(self._waiting), None)
        if first is not None:
            self._waiting[first][0]()  # if it leaves, the next is served
