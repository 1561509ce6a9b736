"""Calls into something that may hang: whether one of them has been under way for too long.

A thread in a system call cannot be called back, so whoever is in one stays there. All that can be
done is to send nobody after it, until it returns.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)


class Patience:
    """Thread-safe. what: in the log lines, one where it is found lost and one where it is not.

    limit_s: how long a call may be under way.
    """

    def __init__(self, what: str, limit_s: float) -> None:
        self._what = what
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._began_s: dict[object, float] = {}  # of the calls under way, the oldest first
        self._was_lost = False

    @property
    def is_lost(self) -> bool:
        """Whether a call has not returned in time, and has not returned since."""
        with self._lock:
            oldest_s = next(iter(self._began_s.values()), None)
            is_lost = oldest_s is not None and time.monotonic() - oldest_s > self._limit_s
            has_changed = is_lost is not self._was_lost
            self._was_lost = is_lost
        if has_changed and is_lost:
            logger.warning(
                "%s has not answered for %g s: it is left alone until it does",
                self._what,
                self._limit_s,
            )
        elif has_changed:
            logger.warning("%s answers again", self._what)
        return is_lost

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call that is under way."""
        me = object()
        with self._lock:
            self._began_s[me] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                del self._began_s[me]
