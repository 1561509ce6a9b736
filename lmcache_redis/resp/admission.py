"""Which jobs are worth queueing: a plane that is closed, or a server that is down, takes none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from lmcache_redis.resp.jobs import Job, JobRegistry, Stop
from lmcache_redis.resp.node import Node
from lmcache_redis.resp.queues import Timekeeper

JobT = TypeVar("JobT", bound=Job[Any])


class Admission:
    """The door of a plane. started, closing, closed: how far it has come in its life."""

    def __init__(self, registry: JobRegistry, timekeeper: Timekeeper) -> None:
        self.started = False
        self.closing = False
        self.closed = False
        self._registry = registry
        self._timekeeper = timekeeper

    def check_usable(self) -> None:
        """Raises RuntimeError unless the plane runs."""
        if not self.started or self.closed:
            raise RuntimeError("the Redis plane is not running")

    def enter(self, jobs: Collection[JobT]) -> Sequence[JobT]:
        """From here on the jobs will be answered. Those that can be tried: queue these."""
        self._registry.add(jobs)
        refused = self.refuse(jobs)
        accepted = [job for job in jobs if job not in refused] if refused else list(jobs)
        if accepted:
            self._timekeeper.watch(min(job.deadline for job in accepted))
        return accepted

    def refuse(self, jobs: Collection[Job[Any]]) -> Collection[Job[Any]]:
        """The jobs that cannot be tried: they are answered, on the timekeeper's thread.

        To be called again once they have been queued: the server may have gone meanwhile.
        """
        if self.closing:
            reason, refused = Stop.CANCELLED, jobs
        else:
            nodes = {node for job in jobs for node in job.nodes}
            down = {node for node in nodes if not isinstance(node, Node) or not node.is_up}
            if not down:
                return ()
            reason = Stop.UNAVAILABLE
            refused = [job for job in jobs if not down.isdisjoint(job.nodes)]
        if refused:
            self._timekeeper.post(partial(_stop, refused, reason))
        return refused


def _stop(jobs: Iterable[Job[Any]], reason: Stop) -> None:
    for job in jobs:
        job.stop(reason)
