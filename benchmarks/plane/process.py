"""A worker as the benchmark sees it: asked, waited for until a deadline, and ended."""

from __future__ import annotations

import os
import sys
import tempfile

from benchmarks.plane.messages import Measured, Request
from lmcache_redis.demo.child import Child
from lmcache_redis.errors import LMCacheRedisError

_ANSWER_WITHIN_S = 60.0


class WorkerFailed(LMCacheRedisError):
    """The worker's client failed or hung; the message says how."""


class WorkerProcess(Child):
    """One client in a process of its own, connected by its first request."""

    failure = WorkerFailed

    def __init__(self, client: str, url: str) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        path = os.pathsep.join(sys.path)
        super().__init__(["benchmarks.plane.worker", client, url], log, {"PYTHONPATH": path})

    def ask(self, request: Request, within_s: float = _ANSWER_WITHIN_S) -> Measured:
        """Raises WorkerFailed if the worker ends or does not answer in time; close it then."""
        self._tell(request)
        measured: Measured = self._hear(Measured, within_s)
        return measured
