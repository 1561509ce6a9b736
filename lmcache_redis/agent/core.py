"""What the jobs of the loop share, and how results of other threads come back to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmcache_redis import messages as m
from lmcache_redis.agent.copies import CopyThreads
from lmcache_redis.agent.fills import Fills
from lmcache_redis.agent.registration import ChunkForm
from lmcache_redis.agent.sessions import Session, Sessions
from lmcache_redis.agent.timers import Timers
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.base import DeviceContext
from lmcache_redis.device.opening import PinnedArena, pin_for
from lmcache_redis.hostpool import Arena, Entry, HostPool
from lmcache_redis.metrics import Metrics
from lmcache_redis.resp.outcomes import ChunkIO
from lmcache_redis.resp.plane import RedisPlane
from lmcache_redis.transport import Wakeup

if TYPE_CHECKING:
    from lmcache_redis.agent.disk import Disk

logger = logging.getLogger(__name__)


class Core:
    """Owned by the loop thread, apart from ``post``, ``metrics``, ``plane`` and ``copies``."""

    def __init__(self, config: AgentConfig, arena: Arena, plane: RedisPlane) -> None:
        self.config = config
        self.metrics = Metrics()
        self.arena = arena
        self.pool = HostPool(arena.slot_count)
        self.fills = Fills(self.pool)
        self.sessions = Sessions(self.pool, config.session_timeout_s)
        self.timers = Timers()
        self.plane = plane
        self.copies = CopyThreads(config.copy_threads)
        self.disk: Disk | None = None
        self.wakeup = Wakeup()
        self._pinning = threading.Lock()
        self._pinned: PinnedArena | None = None
        self._posted: deque[Callable[[], None]] = deque()

    def post(self, action: Callable[[], None]) -> None:
        """Has ``action`` done on the loop thread, soon. Any thread may call this."""
        self._posted.append(action)
        self.wakeup.set()

    def run_posted(self) -> None:
        """Does what was posted up to now."""
        self.wakeup.clear()
        for _ in range(len(self._posted)):
            action = self._posted.popleft()
            try:
                action()
            except Exception:
                logger.exception("a job of the agent failed")  # our own bug: that job alone

    def slots_of(self, form: ChunkForm, entry: Entry) -> list[memoryview]:
        """The entry's slots as views of exactly the bytes of each stripe."""
        last = form.chunk_bytes - (len(entry.slots) - 1) * form.stripe_payload_bytes
        views = [self.arena.slot_view(s, form.stripe_payload_bytes) for s in entry.slots[:-1]]
        views.append(self.arena.slot_view(entry.slots[-1], last))
        return views

    def chunk_io(
        self, form: ChunkForm, chunk_hash: bytes, entry: Entry, deadline_s: float
    ) -> ChunkIO:
        """The transfer of an entry to or from Redis."""
        return ChunkIO(
            key=entry.key,
            frame=form.frame(chunk_hash),
            slots=self.slots_of(form, entry),
            deadline=deadline_s,
            tag=entry,
        )

    def pin_pool(self, device: DeviceContext) -> None:
        """Pins the host pool once a device gains by it. Slow, and safe on any thread."""
        with self._pinning:
            if self._pinned is None:
                base, size_bytes = self.arena.base_address, self.arena.size_bytes
                self._pinned = pin_for(device, base, size_bytes)

    def unpin_pool(self) -> None:
        """Before the arena goes."""
        with self._pinning:
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                pinned.close()

    def finish_part(self, session: Session) -> None:
        """One store or retrieve of the session is over."""
        session.busy -= 1
        self.log_line(self.sessions.settle(session))

    @staticmethod
    def log_line(line: str | None) -> None:
        """Logs a request's line, if there is one; `summary` has one for all of them."""
        if line is not None:
            logger.debug("%s", line)


Reply = Callable[[m.Answer], None]
