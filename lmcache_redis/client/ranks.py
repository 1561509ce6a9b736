"""Where the workers of one engine are registered: what their scheduler knows of other nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_redis.messages import RemoteParts

# An engine that steps reports every worker within this time.
_REPORTED_WITHIN_S = 2.0


@dataclass(frozen=True)
class RankPlace:
    """An agent that has mapped a worker's memory, and how the worker names its parts.

    Workers send it to their scheduler through the engine.
    """

    agent_id: str
    parts: tuple[RemoteParts, ...]


class Ranks:
    """The last place that each worker has reported. Until then, a worker counts as local."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._places: dict[int, RankPlace | None] = {}
        self._own_agents: set[str] = set()
        self._asked_s: float | None = None

    def reported(self, places: Mapping[int, RankPlace | None]) -> None:
        """Workers that are registered there now; None: with no agent."""
        self._places.update(places)

    def own_agent(self, agent_id: str) -> None:
        """The scheduler's own agent, now or before it was restarted."""
        self._own_agents.add(agent_id)

    def known(self) -> bool:
        """Whether all workers have reported, or will not: they may be on other nodes."""
        if self._world_size == 1 or len(self._places) >= self._world_size:
            return True
        if self._asked_s is None:
            self._asked_s = time.monotonic()
        return time.monotonic() - self._asked_s > _REPORTED_WITHIN_S

    def local_parts(self) -> dict[RemoteParts, int]:
        """The different parts of a chunk, with the groups that they belong to.

        Empty unless every worker is registered with the scheduler's own agent.
        """
        places = [self._places.get(rank) for rank in range(self._world_size)]
        parts: dict[tuple[bytes, int], tuple[RemoteParts, int]] = {}
        for place in places:
            if place is None or place.agent_id not in self._own_agents:
                return {}
            for group, part in enumerate(place.parts):
                # Ranks that hold equal bytes share a part.
                parts.setdefault((part.fingerprint, part.kv_rank), (part, group))
        return dict(parts.values())

    def remote(self) -> tuple[RemoteParts, ...]:
        """The parts of the workers that are registered with other agents."""
        return tuple(
            part
            for place in self._places.values()
            if place is not None and place.agent_id not in self._own_agents
            for part in place.parts
        )
