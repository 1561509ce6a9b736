"""Lookups over simulated links and engines, on a clock of their own, against computing alone.

Prompts of 2,048 tokens, 16 MiB of KV in eight chunks, that an engine computes in 0.25 s.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Computing
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.tiers import (
    REDIS_COUNTERS,
    CallOutcome,
    ChunkIO,
    Done,
    ReadDone,
    ReadOutcome,
    ScanResult,
)
from tests.cache.played import FORM, PlayedTier, World
from tests.harness import block_hashes

CHUNKS, CHUNK_TOKENS = 8, 256
COMPUTE_S = 0.25
CHUNK_BYTES = 2 << 20  # in the simulation; the bytes that really move are fewer
COPY_S = 0.002  # of a hit into the engine's blocks
QUEUE_S = 0.05  # what waits in a link at most


class Clock:
    """A simulated `time.monotonic`, and what happens when."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def at(self, due_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (due_s, next(self._order), action))

    def run(self, world: World, until: Callable[[], bool]) -> None:
        end_s = self.now_s + 600
        while not until():
            assert self.now_s < end_s
            while world.loop._posted:
                world.loop.run_posted()
            due_s = self.now_s + world.loop.run_due()
            if world.loop._posted:
                continue
            if self._events and self._events[0][0] <= due_s:
                due_s, _, action = heapq.heappop(self._events)
                self.now_s = max(self.now_s, due_s)
                action()
            else:
                self.now_s = due_s + 1e-9


class Link(PlayedTier):
    """A server that has everything, behind a link.

    bytes_per_s: of chunks of ``CHUNK_BYTES``, although fewer bytes are copied. latency_s: of a
    round trip. burst_bytes: that pass at once after a pause.
    """

    def __init__(
        self, clock: Clock, bytes_per_s: float, latency_s: float, burst_bytes: float = 0.0
    ) -> None:
        super().__init__("Redis")
        self.clock = clock
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.burst_bytes = burst_bytes
        self.loaded = 0
        self._jobs: deque[tuple[ChunkIO, ReadDone]] = deque()
        self._is_busy = False
        self._saved_bytes, self._saved_at_s = burst_bytes, 0.0

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        queue_s = min(QUEUE_S, len(self._jobs) * CHUNK_BYTES / self.bytes_per_s)
        answer = ScanResult(CallOutcome.DONE, len(keys))
        self.clock.at(self.clock.now_s + self.latency_s + queue_s, lambda: done(answer))

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        self._jobs += [(job, done) for job in jobs]
        if not self._is_busy:
            self._is_busy = True
            self.clock.at(self.clock.now_s + self.latency_s, self._send)

    def cancel(self, job: ChunkIO) -> None:
        for waiting, done in [*self._jobs]:
            if waiting is job and self._jobs[0][0] is not job:
                self._jobs.remove((waiting, done))
                done(job, ReadOutcome.CANCELLED)

    def _send(self) -> None:
        now_s = self.clock.now_s
        gained = (now_s - self._saved_at_s) * self.bytes_per_s
        saved = min(self.burst_bytes, self._saved_bytes + gained)
        took_s = max(0.0, CHUNK_BYTES - saved) / self.bytes_per_s
        self._saved_bytes = max(0.0, saved - CHUNK_BYTES)
        self._saved_at_s = now_s + took_s
        self.clock.at(now_s + took_s, self._sent)

    def _sent(self) -> None:
        job, done = self._jobs.popleft()
        self.loaded += 1
        done(job, ReadOutcome.LOADED)
        self._is_busy = bool(self._jobs)
        if self._is_busy:
            self._send()


@dataclass
class Request:
    """begun_s, first_token_s: on the clock. loaded: chunks."""

    begun_s: float
    first_token_s: float = 0.0
    loaded: int = 0

    @property
    def took_s(self) -> float:
        return self.first_token_s - self.begun_s


class Serving:
    """An engine that computes one prompt after the other, with a cache over a link or without."""

    def __init__(self, clock: Clock, link: Link | None) -> None:
        self.clock = clock
        self.world = World([] if link is None else [(link, REDIS_COUNTERS)], slots=4096)
        self.link = link
        self.engine = Computing()
        self.engine.token_s = COMPUTE_S / CHUNKS / CHUNK_TOKENS
        self.requests: list[Request] = []
        self._free_s = 0.0

    def ask(self) -> Request:
        request = Request(self.clock.now_s)
        self.requests.append(request)
        if self.link is None:
            self._compute(request, 0.0)
            return request
        hashes = block_hashes(f"prompt {len(self.requests)}", CHUNKS)

        def done(found: PrefixLookup) -> None:
            request.loaded = found.bound
            for entry in found.parts.take().values():
                self.world.cache.pool.unpin(entry)
            self._compute(request, COPY_S if found.bound else 0.0)

        asked = LookupRequest(
            [FORM], hashes, self.clock.now_s + 10.0, 0, CHUNK_TOKENS, computing=self.engine
        )
        PrefixLookup(self.world.cache, asked, done).start()
        return request

    def _compute(self, request: Request, copy_s: float) -> None:
        begun_s = max(self._free_s, self.clock.now_s + copy_s)
        self._free_s = begun_s + (CHUNKS - request.loaded) * COMPUTE_S / CHUNKS
        request.first_token_s = self._free_s

    def wait(self) -> None:
        """Until every request so far has its first token, and a moment more."""
        self.clock.run(self.world, lambda: all(r.first_token_s for r in self.requests))
        self.pause(max(r.first_token_s for r in self.requests) - self.clock.now_s + 0.05)

    def pause(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        self.clock.at(until_s, lambda: None)
        self.clock.run(self.world, lambda: self.clock.now_s >= until_s)


Make = Callable[..., Serving]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)

    def make(mbit_per_s: float | None, latency_s: float = 0.0002, burst_s: float = 0.0) -> Serving:
        if mbit_per_s is None:
            return Serving(clock, None)
        bytes_per_s = mbit_per_s * 1e6 / 8
        return Serving(clock, Link(clock, bytes_per_s, latency_s, burst_s * bytes_per_s))

    return make


def one_after_the_other(serving: Serving, count: int) -> list[float]:
    """The time of each to its first token, as a share of that of computing."""
    for _ in range(count):
        serving.ask()
        serving.wait()
    return [request.took_s / COMPUTE_S for request in serving.requests[-count:]]


def in_a_crowd(serving: Serving, count: int, every_s: float) -> float:
    """The sum of their times."""
    for _ in range(count):
        serving.ask()
        serving.pause(every_s)
    serving.wait()
    return sum(request.took_s for request in serving.requests[-count:])


@pytest.mark.parametrize("latency_s", [0.0002, 0.005, 0.02, 0.1])
@pytest.mark.parametrize("mbit_per_s", [20, 100, 300])
def test_no_request_loses_behind_a_slow_link(
    make: Make, mbit_per_s: float, latency_s: float
) -> None:
    """Also not when the link is measured again."""
    for burst_s in (0.0, 0.01):
        serving = make(mbit_per_s, latency_s, burst_s)
        shares = one_after_the_other(serving, 5)
        assert max(shares) < 1.1
        later = one_after_the_other(serving, 60)
        assert max(later) < 1.05
        assert serving.link is not None
        assert 2 <= serving.link.loaded <= 4, "one chunk in ten seconds"
        assert all(request.loaded == 0 for request in serving.requests), "all or nothing"


@pytest.mark.parametrize("latency_s", [0.0002, 0.005])
def test_a_fast_link_loses_nothing(make: Make, latency_s: float) -> None:
    serving = make(10_000, latency_s)
    first, *others = one_after_the_other(serving, 20)
    assert [request.loaded for request in serving.requests] == [CHUNKS] * 20
    assert first < max(others) + 0.03, "the first chunk is loaded alone"
    assert max(others) < 0.15


@pytest.mark.parametrize(
    ("mbit_per_s", "latency_s", "share"),
    [(1000, 0.0002, 0.56), (1000, 0.02, 0.75), (10_000, 0.02, 0.25)],
)
def test_the_first_request_of_a_link_in_between_buys_its_rate(
    make: Make, mbit_per_s: float, latency_s: float, share: float
) -> None:
    first, *others = one_after_the_other(make(mbit_per_s, latency_s), 20)
    assert first < 1.1
    assert max(others) < share


@pytest.mark.parametrize("every_s", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("mbit_per_s", [20, 100, 300, 1000, 10_000])
def test_a_crowd_is_served_no_later(make: Make, mbit_per_s: float, every_s: float) -> None:
    serving, plain = make(mbit_per_s), make(None)
    for _ in range(3):
        assert in_a_crowd(serving, 10, every_s) < 1.05 * in_a_crowd(plain, 10, every_s)


def test_what_fits_beside_the_prompts_of_others_is_loaded(make: Make) -> None:
    """The engine is busy for longer than a few chunks take."""
    serving, plain = make(300), make(None)
    one_after_the_other(serving, 2)
    assert in_a_crowd(serving, 10, 0.1) < 0.8 * in_a_crowd(plain, 10, 0.1)
    assert any(0 < request.loaded < CHUNKS for request in serving.requests)


def test_a_link_that_becomes_slow_costs_one_request(make: Make) -> None:
    serving = make(10_000)
    one_after_the_other(serving, 5)
    assert serving.link is not None
    serving.link.bytes_per_s /= 500
    first, *others = one_after_the_other(serving, 5)
    assert first < 2.2, "it waits for no longer than computing takes"
    assert max(others) < 1.05


def test_a_link_that_becomes_fast_is_found(make: Make) -> None:
    serving = make(20)
    one_after_the_other(serving, 5)
    assert serving.link is not None
    serving.link.bytes_per_s *= 500
    serving.pause(10.0)
    first, *others = one_after_the_other(serving, 5)
    assert first < 1.05
    assert max(others) < 0.15


def test_a_server_that_stops_costs_one_computing_time(make: Make) -> None:
    serving = make(10_000)
    one_after_the_other(serving, 2)
    assert serving.link is not None
    serving.link.latency_s = 1e9
    first, *others = one_after_the_other(serving, 5)
    assert first < 2.1
    assert max(others) < 1.1
