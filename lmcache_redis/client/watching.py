"""A scheduler's watch on its agent: which chunks come and go in the agent's tiers."""

from __future__ import annotations

import logging

from lmcache_redis import messages as m
from lmcache_redis.client.calls import AgentCall
from lmcache_redis.client.link import AgentLink
from lmcache_redis.client.scheduler import Ranks

logger = logging.getLogger(__name__)

_LOST = m.Changes(0, (), lost=True)


class ChunkWatch:
    """Asks for changes as long as all workers of the engine are registered with one agent.

    Of an engine whose workers are registered with several agents nothing is known: each agent sees
    only its own parts.

    Attributes:
        groups: of each part that a chunk has, the number of its group. `Change.part` is an index.
    """

    def __init__(self, link: AgentLink, ranks: Ranks) -> None:
        self.groups: tuple[int, ...] = ()
        self._link = link
        self._ranks = ranks
        self._welcome: m.Welcome | None = None
        self._parts: tuple[m.RemoteParts, ...] = ()
        self._call: AgentCall | None = None
        self._refused_by: m.Welcome | None = None

    @property
    def has_news(self) -> bool:
        return self._call is not None and self._call.done

    def take(self) -> m.Changes | None:
        """The changes since the last call; None if there are none. Never waits.

        ``lost``: what was known before may be wrong, and is void.
        """
        welcome = self._link.welcome if self._link.online else None
        parts = {} if welcome is None else self._ranks.local_parts()
        if welcome is not self._welcome or tuple(parts) != self._parts:
            self._welcome, self._parts = welcome, tuple(parts)
            self.groups = tuple(parts.values())
            self._ask()
            return _LOST
        if self._call is None or not self._call.done:
            return None
        answer = self._call.answer
        if not isinstance(answer, m.Changes):
            if isinstance(answer, m.Failure):
                logger.warning("the agent reports no changes of chunks: %s", answer.reason)
                self._refused_by = welcome
            self._welcome = None  # asks again in the next call
            return _LOST
        self._ask()
        return answer

    def _ask(self) -> None:
        self._call = None
        if self._parts and self._refused_by is not self._welcome:
            self._call = self._link.submit(m.Watch, parts=self._parts)
