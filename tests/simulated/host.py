# SPDX-License-Identifier: Apache-2.0
"""An agent in a `World`: the real loop over simulated socket, copies and tiers; its audits."""

from __future__ import annotations

import contextlib
import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import zmq

from lmcache_redis import transport
from lmcache_redis.agent.agent import Agent
from lmcache_redis.agent.service import Service
from lmcache_redis.cache.arena import Arena
from lmcache_redis.cache.cache import Load
from lmcache_redis.cache.pool import Entry, EntryState
from lmcache_redis.chunks.names import DESCRIPTIONS
from lmcache_redis.config import AgentConfig
from lmcache_redis.device.layout import KVLayout
from lmcache_redis.errors import DeviceError
from lmcache_redis.tier_kinds import DISK
from lmcache_redis.tiers import Backing
from tests.cache.auditing import audit
from tests.simulated.copies import Memory, SimulatedCopies, SimulatedDevice
from tests.simulated.engines import CHUNK_TOKENS, memory_number
from tests.simulated.tiers import SimulatedTier
from tests.simulated.world import Violation, World, content

SLOT_BYTES = 4096
_DRAIN_S = 3.0


class Crash(Exception):
    """The agent's process has ended."""


def config_of(world: World) -> AgentConfig:
    choose = world.random.choice
    return AgentConfig(
        endpoint="ipc:///nowhere/agent.sock",
        pool_bytes=choose([14, 24, 48, 96]) * SLOT_BYTES,
        slot_bytes=SLOT_BYTES,
        chunk_size_tokens=CHUNK_TOKENS,
        write_queue_bytes=choose([20_000, 1 << 20]),
        warm_bytes=choose([0, 0, 100_000]),
        lookup_deadline_s=choose([0.5, 2.0]),
        copy_threads=choose([1, 2]),
        store_after=choose([1, 1, 2]),
        canary_every=5,
        tenant_bytes=choose([None, "*=200000"]),
    )


class _Monitor:
    """Nobody connects."""

    def poll(self, timeout_ms: int) -> int:
        return 0

    def close(self, linger: int) -> None: ...


class Host:
    """One agent's process, from its start to its end. Is its socket, and its poller.

    links: by identity, who is told answers. copy_s: of a copy. on_stop: it promises nothing more.
    """

    def __init__(
        self,
        world: World,
        config: AgentConfig,
        tiers: Sequence[SimulatedTier],
        links: Any,
        copy_s: float,
        on_stop: Callable[[], None],
    ) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.has_crashed = False
        self.tiers = tiers
        self._world = world
        self._links = links
        self._on_stop = on_stop
        self.arena = Arena(config.pool_bytes, config.slot_bytes)
        more = [Backing(each, DISK, config.write_queue_limit_bytes) for each in tiers[:-1]]
        for each in tiers:
            each.open()
        redis: Any = tiers[-1]
        redis.probed_at_s = world.now_s + world.soon(0.1)
        agent = Agent.of(config, self.arena, redis, more, world.now)
        self.copies = SimulatedCopies(world, config.copy_threads, copy_s)
        copies: Any = self.copies
        self.agent = replace(agent, copies=copies)
        router: Any = self
        self.service = Service(self.agent, router)
        poller: Any = self
        self.service._poller = poller

    # The socket

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self.inbox:
            raise zmq.Again
        return self.inbox.popleft()

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        identity, *rest = frames
        if (link := self._links.get(identity)) is not None:
            link.answered(transport.decode_answer(rest))

    def get_monitor_socket(self, events: int) -> Any:
        return _Monitor()

    def disable_monitor(self) -> None: ...

    # The poller

    def poll(self, timeout_ms: float) -> list[tuple[object, int]]:
        """The world goes on until something is ready, sometimes a bit longer: the loop is busy."""
        end_s = self._world.now_s + timeout_ms / 1000
        while not (self._is_ready or self.has_crashed) and self._world.run_one(end_s):
            pass
        while self._world.chance(0.3) and self._world.run_one(self._world.now_s + 0.002):
            pass
        if self.has_crashed:
            raise Crash
        ready: list[tuple[object, int]] = [(self.agent.wakeup.fd, zmq.POLLIN)]
        return [*ready, (self, zmq.POLLIN)] if self.inbox else ready

    @property
    def _is_ready(self) -> bool:
        return bool(self.inbox or self.agent.loop._posted)

    # Its life

    def turn(self) -> bool:
        """Lets the loop work once; False: the process has ended."""
        try:
            if self.service._stopping or self.copies.lost is not None:
                self._stop()
                return False
            self.service._turn(math.inf)
        except Crash:
            self.end()
            return False
        return True

    def _stop(self) -> None:
        """As `agent.main` does it: nothing is pinned at the end."""
        agent, world = self.agent, self._world
        world.note("stops")
        self._on_stop()
        self.service.drain(world.now_s + _DRAIN_S)
        self.copies.close()
        while self.copies.running or self.copies.open_closes:
            world.run_one()
            agent.loop.run_posted()
        agent.cache.close(0.1)
        while agent.loop._posted:
            agent.loop.run_posted()
            for tier in self.tiers:
                tier.close(0.1)  # a closed tier takes no jobs
        self.audit()
        if pinned := [entry for entry in _all(agent) if entry.pins]:
            raise Violation(f"the agent has stopped with {pinned}")
        self.end()

    def end(self) -> None:
        for tier in self.tiers:
            tier.forget()
        self.copies.running.clear()
        self.agent.wakeup.close()

    # Its audits

    def audit(self) -> None:
        """Raises `Violation`: what is held is there, and right."""
        agent = self.agent
        audit(agent.cache.pool)
        for entry in agent.cache.pool:
            if entry.state is EntryState.READY:
                found = b"".join(agent.cache.views(entry))
                if found != content(entry.key, entry.form.chunk_bytes):
                    raise Violation(f"other bytes than its own: {entry!r}")
        holders = Counter(
            entry
            for session in agent.sessions
            for parts in session._pins.values()
            for entry in parts.values()
        )
        for queue in agent.cache.queues:
            holders.update([*queue._writes])
        jobs = [job for tier in self.tiers for job in tier.jobs]
        holders.update(job.entry for job in jobs if isinstance(job, Load))
        holders.update(self.copies.entries())
        there = set(_all(agent))
        for entry, count in holders.items():
            if entry.pins < count or entry not in there:
                raise Violation(f"{count} hold {entry!r}")
        counts = [
            *(queue.queued_bytes for queue in agent.cache.queues),
            *(rate.in_flight_bytes for rate in agent.cache.rates),
            *(queue.schedule.rate.in_flight_bytes for queue in agent.cache.queues),
            *(session.busy for session in agent.sessions),
            agent.peers.mapping,
        ]
        if min(counts) < 0:
            raise Violation(f"a count is below zero: {counts}")
        if self._world.violations:
            raise Violation("; ".join(self._world.violations))

    def audit_idle(self) -> None:
        """Raises `Violation`: nobody asks for anything, and time has passed, so all has ended."""
        self.audit()
        agent, cache = self.agent, self.agent.cache
        counts = {
            "pinned units": cache.pool.pinned,
            "sessions": len(agent.sessions),
            "busy sessions": sum(each.busy for each in agent.sessions),
            "lookups that wait": len(cache.waiting),
            "copies": self.copies.backlog + len(self.copies.running),
            "closes": self.copies.open_closes,
            "mappings": agent.peers.mapping,
            "jobs of tiers": sum(
                job.frame.fingerprint != DESCRIPTIONS for tier in self.tiers for job in tier.jobs
            ),
            "removals to try again": cache.failed_removals,
            "writes": cache.backlog,
            "queued bytes": sum(each.queued_bytes for each in cache.queues),
            "writes in flight": sum(len(each.schedule._in_flight) for each in cache.queues),
            "scheduled writes": sum(len(each.schedule) for each in cache.queues),
            "changes": sum(len(each._changes) for each in cache.queues),
            "bytes that are loaded": sum(each.in_flight_bytes for each in cache.rates),
            "bytes that are written": sum(
                each.schedule.rate.in_flight_bytes for each in cache.queues
            ),
            "questions that wait for loads": sum(len(each._waiting) for each in cache.rates),
            "wrong chunks": sum(len(each.doubted.wrong) for each in cache.queues),
            "claims to give back": sum(len(each.schedule.claims._ended) for each in cache.queues),
            "sweeps": sum(each._is_sweeping for each in cache.clears._sweeps),
            "peers": len(agent.peers) - len(self._links),
            "prompts to be computed": sum(len(each.computing._answered) for each in agent.peers),
            "unmapped memory": len(self.service._handlers._registering._closing),
            "what waits for that": len(self.service._handlers._registering._after_closing),
            "timers": sum(1 for *_, timer in agent.loop._heap if timer.action is not None) - 3,
        }
        if left := {what: count for what, count in counts.items() if count}:
            raise Violation(f"left at the end: {left}")


def _all(agent: Agent) -> list[Entry]:
    pool = agent.cache.pool
    return [*pool._index.values(), *pool._outside]


class _Bugs(logging.Handler):
    """What the agent logs as its own bug, it survives. A simulation does not."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._world.violated(f"{record.getMessage()}: {record.exc_info[1]!r}")


@contextlib.contextmanager
def in_this(
    world: World, memories: dict[int, Memory], dead: set[int], current: Any
) -> Iterator[None]:
    """Processes, mapped memory, wall clock and randomness of the package are those of the world.

    Sessions end earlier than an agent's, so that some do.

    current: returns the `Host` that runs.
    """
    log, state = logging.getLogger("lmcache_redis"), random.getstate()
    bugs, level, propagates = _Bugs(world), log.level, log.propagate

    def open_device(layouts: Sequence[KVLayout], storages: Any, *_: object) -> Any:
        if world.chance(0.03):
            raise DeviceError("the simulated device maps nothing")
        return SimulatedDevice(world, current().copies, memories[memory_number(storages[0])])

    def now_ns() -> int:
        return int(world.now_s * 1e9)

    log.addHandler(bugs)
    log.setLevel(logging.ERROR)
    log.propagate = False
    random.seed(world.random.random())
    with (
        mock.patch("lmcache_redis.agent.registering.open_device", open_device),
        mock.patch("lmcache_redis.agent.registering.check_exporter"),
        mock.patch("lmcache_redis.agent.peers.has_ended", lambda pid, started: pid in dead),
        mock.patch("lmcache_redis.agent.sessions.SESSION_TIMEOUT_S", 20.0),
        mock.patch("time.time", world.now),
        mock.patch("time.time_ns", now_ns),
    ):
        try:
            yield
        finally:
            random.setstate(state)
            log.removeHandler(bugs)
            log.setLevel(level)
            log.propagate = propagates
