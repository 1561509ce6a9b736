"""Calls to a disk that may hang: a thread in one comes back when the kernel lets it, or never.

    waiting    for a thread
    under way  on a thread, which touches the call's buffers
    returned   the loop thread is told how it ended, once

A call that is under way for longer than its patience takes the disk down. Then nothing waits for
it any more: the calls that wait are CANCELLED, and the ones under way are `kept`, which says that
their buffers are the disk's until they return. No call is taken while the disk is down. It is
back when all that it kept have returned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from lmcache_redis.agent.copies import CopyOutcome, ThreadLane

if TYPE_CHECKING:
    from lmcache_redis.agent.core import Core

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DiskCall:
    """One call. run: on a thread. kept, ended: on the loop thread, `ended` exactly once.

    what: in a log line. patience_s: how long it may be under way.
    """

    what: str
    patience_s: float
    run: Callable[[], CopyOutcome]
    ended: Callable[[CopyOutcome], None]
    kept: Callable[[], None]
    began_s: float | None = None
    given_up: bool = False


class DiskCalls:
    """Owned by the loop thread, which alone calls its methods.

    least_patience_s: no call has less. came_back: called when the disk is back; calls that it
    puts are made first.
    """

    def __init__(self, core: Core, least_patience_s: float, came_back: Callable[[], None]) -> None:
        self._core = core
        self._least_patience_s = least_patience_s
        self._came_back = came_back
        self._begin = threading.Lock()
        self._calls: dict[DiskCall, None] = {}  # waiting or under way, in their order
        self._is_watched = False
        self._down_since_s: float | None = None
        self.reason = ""

    @property
    def is_down(self) -> bool:
        return self._down_since_s is not None

    @property
    def is_overdue(self) -> bool:
        """Whether the disk is down, or would be found to be."""
        return self.is_down or self._overdue(time.monotonic()) is not None

    def under_way_s(self) -> float:
        """Seconds that the oldest call has been under way; 0 where none is."""
        now_s = time.monotonic()
        return max(
            (now_s - call.began_s for call in self._calls if call.began_s is not None), default=0.0
        )

    def put(self, lane: ThreadLane, call: DiskCall) -> None:
        """Has the call made by a thread of the lane."""
        self._calls[call] = None
        lane.put(
            partial(self._run, call),
            lambda outcome: self._core.post(partial(self._returned, call, outcome)),
        )
        self._watch()

    def _run(self, call: DiskCall) -> CopyOutcome:
        """On a thread."""
        with self._begin:
            if call.given_up:
                return CopyOutcome.CANCELLED
            call.began_s = time.monotonic()
        return call.run()

    def _returned(self, call: DiskCall, outcome: CopyOutcome) -> None:
        if call.given_up:
            return  # it has been told
        del self._calls[call]
        try:
            call.ended(outcome)
        finally:
            if self.is_down and not self._calls:
                self._come_back()

    def _watch(self) -> None:
        if not self._is_watched and not self.is_down:
            self._is_watched = True
            self._core.timers.after(self._least_patience_s, self._look)

    def _look(self) -> None:
        self._is_watched = False
        now_s = time.monotonic()
        overdue = self._overdue(now_s)
        if overdue is not None:
            self._go_down(overdue, now_s)
        elif self._calls and not self.is_down:
            # What begins after this moment is not overdue before the least patience has passed.
            due_s = [call.began_s + call.patience_s for call in self._calls if call.began_s]
            self._is_watched = True
            self._core.timers.at(min([now_s + self._least_patience_s, *due_s]), self._look)

    def _overdue(self, now_s: float) -> DiskCall | None:
        for call in self._calls:
            if call.began_s is not None and now_s - call.began_s >= call.patience_s:
                return call
        return None

    def _go_down(self, overdue: DiskCall, now_s: float) -> None:
        self._down_since_s = now_s
        self.reason = f"{overdue.what} has not returned within {overdue.patience_s:g} s"
        logger.warning("the disk tier is down: %s; chunks come from Redis meanwhile", self.reason)
        with self._begin:
            for call in self._calls:
                call.given_up = call.began_s is None
        calls = list(self._calls)
        self._calls = dict.fromkeys(call for call in calls if not call.given_up)
        for call in calls:
            if call.given_up:
                call.ended(CopyOutcome.CANCELLED)
            else:
                call.kept()

    def _come_back(self) -> None:
        self._came_back()
        if self._calls or self._down_since_s is None:
            return
        down_s = time.monotonic() - self._down_since_s
        self._down_since_s, self.reason = None, ""
        logger.warning("the disk tier is back after %.1f s", down_s)
