# SPDX-License-Identifier: Apache-2.0
"""A simulated clock, a server behind a link, and an engine that asks for its prompts' prefixes.

What decides is the product's: `PrefillRate` in the engine, `Computing`,
`PrefixLookup` and a cache in the agent. What takes time is simulated.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lmcache_redis.cache.lookup import PrefixLookup
from lmcache_redis.cache.pacing import Computing
from lmcache_redis.cache.parts import LookupRequest
from lmcache_redis.integrations.vllm.prefill import PrefillRate
from lmcache_redis.tier_kinds import REDIS
from lmcache_redis.tiers import CallOutcome, ChunkIO, Done, ReadDone, ReadOutcome, ScanResult
from tests.cache.played import FORM, PlayedTier, World
from tests.harness import block_hashes
from tests.simulated import world as simulation

CHUNK_TOKENS = 256
COPY_S = 0.002  # of a hit into the engine's blocks
QUEUE_S = 0.05  # what waits in a link at most
MESSAGE_S = 0.0002
STEP_S = 0.001  # of a step beside its tokens
BUDGET_TOKENS = 2048  # of a step


class Clock(simulation.World):
    """The time of an owner and of what happens."""

    def __init__(self) -> None:
        super().__init__(seed=1)

    def run(self, world: World, until: Callable[[], bool]) -> None:
        end_s = self.now_s + 600
        while not until():
            assert self.now_s < end_s
            while world.loop._posted:
                world.loop.run_posted()
            due_s = self.now_s + world.loop.run_due()
            if not (world.loop._posted or self.run_one(due_s)):
                self.now_s += 1e-9


class Link(PlayedTier):
    """A server that has everything, behind a link.

    bytes_per_s: of chunks of ``chunk_bytes``, although fewer bytes are copied. latency_s: of a
    round trip. burst_bytes: that pass at once after a pause.
    """

    def __init__(
        self,
        clock: Clock,
        bytes_per_s: float,
        latency_s: float = 0.0002,
        burst_bytes: float = 0.0,
        chunk_bytes: int = 2 << 20,
    ) -> None:
        super().__init__("Redis")
        self.clock, self.now = clock, clock.now
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.burst_bytes = burst_bytes
        self.chunk_bytes = chunk_bytes
        self.noise: Callable[[], float] = lambda: 1.0  # of the time of a chunk
        self.loaded = 0
        self._jobs: deque[tuple[ChunkIO, ReadDone]] = deque()
        self._is_busy = False
        self._saved_bytes, self._saved_at_s = burst_bytes, 0.0

    def scan(self, keys: Sequence[bytes], deadline: float, done: Done[ScanResult]) -> None:
        queue_s = min(QUEUE_S, len(self._jobs) * self.chunk_bytes / self.bytes_per_s)
        answer = ScanResult(CallOutcome.DONE, len(keys))
        self.clock.after(self.latency_s + queue_s, lambda: done(answer))

    def load_all(self, jobs: Sequence[ChunkIO], done: ReadDone) -> None:
        self._jobs += [(job, done) for job in jobs]
        if not self._is_busy:
            self._is_busy = True
            self.clock.after(self.latency_s, self._send)

    def cancel(self, job: ChunkIO) -> None:
        for waiting, done in [*self._jobs]:
            if waiting is job and self._jobs[0][0] is not job:
                self._jobs.remove((waiting, done))
                done(job, ReadOutcome.CANCELLED)

    def _send(self) -> None:
        now_s = self.clock.now_s
        gained = (now_s - self._saved_at_s) * self.bytes_per_s
        saved = min(self.burst_bytes, self._saved_bytes + gained)
        took_s = max(0.0, self.chunk_bytes - saved) / self.bytes_per_s * self.noise()
        self._saved_bytes = max(0.0, saved - self.chunk_bytes)
        self._saved_at_s = now_s + took_s
        self.clock.at(now_s + took_s, self._sent)

    def _sent(self) -> None:
        job, done = self._jobs.popleft()
        self.loaded += 1
        done(job, ReadOutcome.LOADED)
        self._is_busy = bool(self._jobs)
        if self._is_busy:
            self._send()


@dataclass(eq=False)
class Request:
    """asked_s, first_token_s: on the clock. loaded: chunks; None: not answered yet."""

    request_id: str
    num_prompt_tokens: int
    asked_s: float
    more_tokens: int = 0  # behind the first token
    first_token_s: float = 0.0
    loaded: int | None = None
    num_computed_tokens: int = 0
    is_asked: bool = False
    is_ended: bool = False

    @property
    def took_s(self) -> float:
        return self.first_token_s - self.asked_s


class SimulatedEngine:
    """Schedules as vLLM does, in steps; asks an agent over a link, or computes everything.

    token_s: in which it computes a prompt token. noise: factors of the time of steps.
    """

    def __init__(
        self,
        clock: Clock,
        link: Link | None,
        token_s: float,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.clock = clock
        self.link = link
        self.token_s = token_s
        self.requests: list[Request] = []
        self.noise = noise
        self._names = itertools.count()
        self._prefill = PrefillRate()
        self._newly_begun: list[str] = []
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._in_step = False
        self.new_agent()

    def new_agent(self) -> None:
        """An agent that knows nothing of the link and of the engine."""
        tiers = [] if self.link is None else [(self.link, REDIS)]
        self.world = World(tiers, slots=4096, now=self.clock.now)
        self.computing = Computing()

    # The user

    def ask(self, tokens: int, more_tokens: int = 0) -> Request:
        name = f"request {next(self._names)}"
        request = Request(name, tokens, self.clock.now_s, more_tokens)
        self.requests.append(request)
        self._waiting.append(request)
        self._wake()
        return request

    def wait(self, *requests: Request) -> None:
        """Until each of the requests, or every one so far, has ended."""
        awaited = requests or self.requests
        self.clock.run(self.world, lambda: all(each.is_ended for each in awaited))

    def pause(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        self.clock.at(until_s, lambda: None)
        self.clock.run(self.world, lambda: self.clock.now_s >= until_s)

    def seconds(self, tokens: int) -> float:
        """What it takes to compute a prompt, without noise."""
        return STEP_S * -(-tokens // BUDGET_TOKENS) + tokens * self.token_s

    # The scheduler

    def _wake(self) -> None:
        if not self._in_step:
            self._step()

    def _step(self) -> None:
        now_s, budget, prompt_tokens = self.clock.now_s, BUDGET_TOKENS, 0
        planned: list[tuple[Request, int]] = []
        for request in self._running:
            left = request.num_prompt_tokens - request.num_computed_tokens
            planned.append((request, max(1, min(left, budget))))
            budget -= planned[-1][1]
            prompt_tokens += min(left, planned[-1][1]) if left > 0 else 0
            if budget <= 0:
                break
        for request in [*self._waiting]:
            if budget <= 0:
                break
            if not request.is_asked:
                self._look_up(request)
            if request.loaded is None:
                continue
            self._waiting.remove(request)
            self._prefill.begun.begin(request)
            self._newly_begun.append(request.request_id)
            if request.loaded:
                request.num_computed_tokens = request.loaded * CHUNK_TOKENS
                self.clock.after(COPY_S, lambda each=request: self._loaded(each))  # type: ignore[misc]
                continue
            self._running.append(request)
            planned.append((request, min(request.num_prompt_tokens, budget)))
            budget -= planned[-1][1]
            prompt_tokens += planned[-1][1]
        if not planned:
            return
        for request, tokens in planned:
            request.num_computed_tokens += tokens
        self._prefill.scheduled(prompt_tokens, now_s)
        self._in_step = True
        took_s = (STEP_S + prompt_tokens * self.token_s) * self.noise()
        self.clock.after(took_s, lambda: self._ended(planned))

    def _loaded(self, request: Request) -> None:
        self._running.append(request)
        self._wake()

    def _ended(self, planned: list[tuple[Request, int]]) -> None:
        self._prefill.ended(self.clock.now_s)
        self._in_step = False
        for request, _ in planned:
            if request.num_computed_tokens < request.num_prompt_tokens:
                continue
            if not request.first_token_s:
                request.first_token_s = self.clock.now_s
            if request.num_computed_tokens >= request.num_prompt_tokens + request.more_tokens:
                request.is_ended = True
                self._running.remove(request)
                self._prefill.begun.end(request.request_id)
                self._send(lambda each=request: self.computing.ended(each.request_id))
        self._step()

    # Its messages and the agent

    def _send(self, message: Callable[..., Any]) -> None:
        self.clock.after(MESSAGE_S, message)

    def _look_up(self, request: Request) -> None:
        request.is_asked = True
        chunks = request.num_prompt_tokens // CHUNK_TOKENS
        if self.link is None or not chunks:
            request.loaded = 0
            return
        token_s, begun = self._prefill.token_s, self._newly_begun
        busy_s = self._prefill.busy_s(self.clock.now_s)
        self._newly_begun = []

        def told() -> None:
            self.computing.told(token_s, busy_s, begun, self.clock.now_s)
            asked = LookupRequest(
                [FORM], block_hashes(request.request_id, chunks), self.clock.now_s + 10.0,
                0, CHUNK_TOKENS, computing=self.computing,
            )  # fmt: skip
            PrefixLookup(self.world.cache, asked, found).start()

        def found(lookup: PrefixLookup) -> None:
            tokens = (chunks - lookup.bound) * CHUNK_TOKENS
            self.computing.answered(request.request_id, tokens, self.clock.now_s)
            self.world.release(lookup.parts.take().values())
            self._send(lambda: answered(lookup.bound))

        def answered(chunks: int) -> None:
            request.loaded = chunks
            self._wake()

        self._send(told)
