"""The batches that are sent to an agent, and their pace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lmcache_redis.admin.pace import Pace
from lmcache_redis.chunks.names import opaque_pages
from lmcache_redis.cli.warming import WarmReport, take_batch, warm_agent
from lmcache_redis.client.control import AgentUnreachable
from lmcache_redis.errors import LMCacheRedisError
from lmcache_redis.messages import MAX_WARM_CHUNKS, WarmChunk, WarmOutcome

RATE = 4000
BATCH_BYTES = RATE // 4


def chunks(count: int, nbytes: int = 400) -> list[WarmChunk]:
    metadata = opaque_pages(nbytes).serialize()
    return [
        WarmChunk("model", 0, bytes(32), number.to_bytes(4, "big"), metadata)
        for number in range(count)
    ]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds

    def pace(self) -> Pace:
        return Pace(RATE, self, self.sleep)


class Agent:
    """Answers as ``answer`` says, and notes when it was asked for what."""

    def __init__(self, clock: Clock, answer: Callable[[WarmChunk], WarmOutcome]) -> None:
        self.asked: list[tuple[float, list[WarmChunk]]] = []
        self._clock = clock
        self._answer = answer

    def warm(self, batch: Sequence[WarmChunk]) -> Sequence[WarmOutcome]:
        self.asked.append((self._clock(), [*batch]))
        self._clock.now_s += 0.01
        return [self._answer(chunk) for chunk in batch]


def warmed(
    agent: Any, clock: Clock, some: Sequence[WarmChunk], limit_bytes: int | None = None
) -> WarmReport:
    report = WarmReport()
    warm_agent(agent, some, limit_bytes, clock.pace(), report)
    return report


def test_all_are_loaded_in_order_and_no_faster_than_the_rate() -> None:
    clock, some = Clock(), chunks(25)
    agent = Agent(clock, lambda chunk: "loaded")
    report = warmed(agent, clock, some)
    assert [chunk for _, batch in agent.asked for chunk in batch] == some
    assert report.chunks == {"loaded": 25}
    assert (report.loaded_bytes, report.left) == (25 * 400, 0)
    # Before any batch, what was loaded since any earlier one fits the time between them.
    for at, (began_s, _) in enumerate(agent.asked):
        for later, (then_s, _) in enumerate(agent.asked[at + 1 :], start=at + 1):
            nbytes = sum(c.chunk_bytes for _, batch in agent.asked[at:later] for c in batch)
            assert nbytes <= RATE * (then_s - began_s) + 1e-6


def test_what_is_not_loaded_takes_no_time() -> None:
    clock = Clock()
    agent = Agent(clock, lambda chunk: "held")
    warmed(agent, clock, chunks(100))
    assert clock.now_s == pytest.approx(100 + 0.01 * len(agent.asked))


def test_lost_time_is_not_made_up_for() -> None:
    clock = Clock()
    pace = clock.pace()
    pace.begin()
    pace.ended(RATE)
    clock.now_s += 60
    pace.begin()
    assert clock.now_s == 160
    pace.ended(RATE)
    pace.begin()
    assert clock.now_s == 161


def test_it_ends_when_the_pool_is_full() -> None:
    clock, some = Clock(), chunks(10)
    agent = Agent(clock, lambda chunk: "loaded" if chunk in some[:3] else "full")
    report = warmed(agent, clock, some)
    assert report.chunks == {"loaded": 3}
    assert (report.left, report.is_full, report.is_limited) == (7, True, False)
    assert len(agent.asked) == 2


def test_what_had_to_wait_for_engines_is_sent_again() -> None:
    clock, some = Clock(), chunks(6)
    busy = iter([False, True, True, False, True])
    agent = Agent(clock, lambda chunk: "busy" if next(busy, False) else "loaded")
    seen: list[bool] = []
    report = WarmReport()
    warm_agent(agent, some, None, clock.pace(), report, lambda: seen.append(report.is_waiting))  # type: ignore[arg-type]
    assert report.chunks == {"loaded": 6}
    assert (report.loaded_bytes, report.left) == (6 * 400, 0)
    assert agent.asked[1][1] == some[1:3]
    assert seen == [True, True, True, False, False]


@pytest.mark.parametrize(("limit_bytes", "loaded"), [(0, 0), (399, 0), (1200, 3), (1300, 3)])
def test_a_limit(limit_bytes: int, loaded: int) -> None:
    clock = Clock()
    report = warmed(Agent(clock, lambda chunk: "loaded"), clock, chunks(10), limit_bytes)
    assert report.chunks["loaded"] == loaded
    assert (report.left, report.is_full, report.is_limited) == (10 - loaded, False, True)


def test_what_the_pool_has_does_not_count_against_the_limit() -> None:
    clock, some = Clock(), chunks(10)
    agent = Agent(clock, lambda chunk: "held" if chunk in some[:4] else "loaded")
    assert warmed(agent, clock, some, 800).chunks == {"held": 4, "loaded": 2}


def test_an_agent_that_can_load_nothing() -> None:
    clock = Clock()
    agent = Agent(clock, lambda chunk: "failed")
    with pytest.raises(LMCacheRedisError, match="could not load any"):
        warmed(agent, clock, chunks(100))
    assert len(agent.asked) == 2


def test_single_failures_are_reported() -> None:
    clock, some = Clock(), chunks(40)
    agent = Agent(clock, lambda chunk: "failed" if chunk in some[::2] else "loaded")
    assert warmed(agent, clock, some).chunks == {"failed": 20, "loaded": 20}


def test_an_agent_that_is_lost() -> None:
    clock, some = Clock(), chunks(10)
    report = WarmReport()

    def answer(chunk: WarmChunk) -> WarmOutcome:
        if chunk is some[4]:
            raise AgentUnreachable("gone")
        return "loaded"

    with pytest.raises(AgentUnreachable):
        warm_agent(Agent(clock, answer), some, None, clock.pace(), report)  # type: ignore[arg-type]
    assert report.chunks == {"loaded": 4}
    assert report.left == 6


def test_batches() -> None:
    left = deque(chunks(6))
    assert len(take_batch(left, 1000, None)) == 2
    assert len(take_batch(left, 1, None)) == 1
    assert len(take_batch(left, 10_000, 800)) == 2
    assert take_batch(left, 10_000, 399) == []
    assert len(take_batch(left, 10_000, None)) == 1
    assert take_batch(left, 10_000, None) == []
    assert len(take_batch(deque(chunks(2 * MAX_WARM_CHUNKS)), 10**9, None)) == MAX_WARM_CHUNKS
