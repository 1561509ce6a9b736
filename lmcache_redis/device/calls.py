"""Calls in progress on a mapping, so that it is not taken away under them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_redis.errors import DeviceError


class Calls:
    """Counts calls; once closed, lets no more in and waits for those inside."""

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def inside(self) -> Iterator[None]:
        """One call. Raises DeviceError after `close`."""
        with self._idle:
            if self._closed:
                raise DeviceError("the worker's KV cache is no longer mapped")
            self._inside += 1
        try:
            yield
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()

    def close(self) -> bool:
        """Waits until nobody is inside. True for the first to close: it takes the mapping down."""
        with self._idle:
            first = not self._closed
            self._closed = True
            self._idle.wait_for(lambda: self._inside == 0)
            return first
