# SPDX-License-Identifier: Apache-2.0
"""What a scheduler knows of the workers of its engine on other nodes."""

from __future__ import annotations

import pytest

from lmcache_redis.chunks.names import Reach
from lmcache_redis.client import scheduler as scheduler_module
from lmcache_redis.client.scheduler import RankPlace, Ranks
from lmcache_redis.messages import RemoteParts


def place(agent_id: str, worker_id: int) -> RankPlace:
    return RankPlace(agent_id, (RemoteParts(worker_id, 7, b"f" * 32, Reach()),))


def remote(ranks: Ranks) -> list[int]:
    return [part.worker_id for part in ranks.remote()]


def test_workers_with_another_agent_are_remote() -> None:
    ranks = Ranks(3)
    ranks.own_agent("here")
    assert remote(ranks) == []
    ranks.reported({0: place("here", 0), 1: place("there", 1)})
    ranks.reported({2: place("elsewhere", 2)})
    assert remote(ranks) == [1, 2]
    ranks.reported({1: None})  # it has lost its agent
    assert remote(ranks) == [2]
    ranks.reported({1: place("another", 1)})
    assert remote(ranks) == [1, 2]


def test_workers_of_an_agent_that_was_restarted_stay_local() -> None:
    ranks = Ranks(1)
    ranks.own_agent("before")
    ranks.reported({0: place("before", 0)})
    ranks.own_agent("after")
    assert remote(ranks) == []


def test_a_lookup_waits_for_the_first_reports_of_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Ranks(1).known(), "one worker is expected at the scheduler's agent"
    ranks = Ranks(2)
    assert not ranks.known()
    ranks.reported({0: None})
    assert not ranks.known()
    ranks.reported({1: None})
    assert ranks.known()

    silent = Ranks(2)
    assert not silent.known()
    monkeypatch.setattr(scheduler_module, "_REPORTED_WITHIN_S", 0.0)
    assert silent.known()
