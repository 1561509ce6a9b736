# SPDX-License-Identifier: Apache-2.0
"""A scheduler's watch, at a socket that stands in for an agent's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from lmcache_redis import messages as m
from lmcache_redis.chunks.names import Reach
from lmcache_redis.client.link import AgentLink
from lmcache_redis.client.scheduler import ChunkWatch, RankPlace, Ranks
from tests.client.stand_in import WAIT_S, Agent
from tests.servers import wait_until

A, B = b"a" * 32, b"b" * 32


def part(worker: int, group: int, *, kv_rank: int | None = None) -> m.RemoteParts:
    rank = worker if kv_rank is None else kv_rank
    return m.RemoteParts(worker, rank, bytes([group]) * 32, Reach())


PARTS = tuple(part(worker, group) for worker in range(2) for group in range(2))


@pytest.fixture
def ranks() -> Ranks:
    ranks = Ranks(2)
    ranks.reported({0: RankPlace("agent", PARTS[:2]), 1: RankPlace("agent", PARTS[2:])})
    ranks.own_agent("agent")
    return ranks


@pytest.fixture
def watch(agent: Agent, ranks: Ranks) -> Iterator[ChunkWatch]:
    link = AgentLink(agent.endpoint, m.Hello(0, "e", "m", 2, None, "0"), dead_after_s=WAIT_S)
    watch = ChunkWatch(link, ranks)
    assert watch.take() is None, "no agent yet"
    agent.welcome(link)
    yield watch
    link.close()


def is_lost(told: m.Changes | None) -> bool:
    return told is not None and told.lost and told.changes == ()


def news(watch: ChunkWatch) -> m.Changes:
    wait_until(lambda: watch.has_news, "news")
    taken = watch.take()
    assert taken is not None
    return taken


def test_one_question_is_open_at_a_time(watch: ChunkWatch, agent: Agent) -> None:
    assert is_lost(watch.take())
    assert watch.groups == (0, 1, 0, 1)
    assert watch.take() is None
    assert not watch.has_news
    for number, lost in enumerate((False, True)):
        (question,) = agent.receive()
        assert question == m.Watch(question.call_id, PARTS)
        changes = (m.Change(number, "h", True, (A, B)), m.Change(3, "r", False, (A,)))
        told = m.Changes(question.call_id, changes, lost)
        agent.answer(told)
        assert news(watch) == told
        assert [each.tier_name for each in changes] == ["host", "redis"]
        assert watch.take() is None


def test_an_agent_that_refuses_is_asked_once(
    watch: ChunkWatch, agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    watch.take()
    (question,) = agent.receive()
    agent.answer(m.Failure(question.call_id, m.FAILED, "our own bug"))
    assert is_lost(news(watch))
    assert [watch.take() for _ in range(3)] == [None] * 3
    # Where vLLM was imported before, its loggers say more.
    assert len([each for each in caplog.records if each.levelno >= logging.WARNING]) == 1
    assert not watch.has_news


def test_a_worker_that_registers_elsewhere_ends_the_watch(
    watch: ChunkWatch, agent: Agent, ranks: Ranks
) -> None:
    watch.take()
    agent.receive()
    ranks.reported({1: RankPlace("another agent", PARTS[2:])})
    assert is_lost(watch.take())
    assert watch.groups == ()
    assert watch.take() is None
    ranks.reported({1: RankPlace("agent", PARTS[2:])})
    assert is_lost(watch.take())
    (question,) = agent.receive()
    assert isinstance(question, m.Watch)


def test_ranks_that_hold_equal_bytes_share_a_part() -> None:
    ranks = Ranks(2)
    ranks.own_agent("agent")
    assert ranks.local_parts() == {}
    ranks.reported({0: RankPlace("agent", (part(0, 0, kv_rank=9), part(0, 1)))})
    assert ranks.local_parts() == {}
    ranks.reported({1: RankPlace("agent", (part(1, 0, kv_rank=9), part(1, 1)))})
    assert ranks.local_parts() == {part(0, 0, kv_rank=9): 0, part(0, 1): 1, part(1, 1): 1}
    ranks.reported({0: None})
    assert ranks.local_parts() == {}
