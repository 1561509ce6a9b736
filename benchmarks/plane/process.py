# SPDX-License-Identifier: Apache-2.0
"""The benchmark's side of a `worker`: requests, answers with a deadline, and the end."""

from __future__ import annotations

import tempfile

from benchmarks.plane.messages import Measured, Request
from lmcache_redis.errors import LMCacheRedisError
from testkit.child import Child

_ANSWER_WITHIN_S = 60.0


class WorkerFailed(LMCacheRedisError):
    """The worker's client failed or hung; the message says how."""


class WorkerProcess(Child):
    """One client in a process of its own, connected by its first request."""

    failure = WorkerFailed

    def __init__(self, client: str, url: str) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        super().__init__(["benchmarks.plane.worker", client, url], log, {})

    def ask(self, request: Request, within_s: float = _ANSWER_WITHIN_S) -> Measured:
        """The answer. Raises WorkerFailed if the worker ends or is late; close it then."""
        self._send(request)
        measured: Measured = self._receive(Measured, within_s)
        return measured
