# SPDX-License-Identifier: Apache-2.0
"""Which questions are answered, to whom, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent.handlers import check_blocks
from lmcache_redis.errors import WireError
from tests.agent.joining import HASHES, Joining


@pytest.fixture
def here(joining: Callable[..., Joining]) -> Joining:
    return joining()


def test_every_question_has_a_handler(here: Joining) -> None:
    """HELLO is answered before there is a peer."""
    tables = {*here.handlers._of_tools} | {*here.handlers._of_peers}
    assert tables == {*get_args(m.Question)} - {m.Hello}


@pytest.mark.parametrize("question", [m.Ping(1), m.GetChunkSize(1), m.Trust(1)], ids=str)
def test_tools_need_no_hello(here: Joining, question: m.Question) -> None:
    here.handlers.answer(None, question, here.answers.append)
    assert not isinstance(here.answers[0], m.Failure)


def test_others_say_hello_first(here: Joining) -> None:
    here.handlers.answer(None, m.Lookup(1, "r", (HASHES[3],)), here.answers.append)
    assert here.answers == [m.Failure(0, m.UNKNOWN_PEER, "say HELLO first")]
    assert not len(here.agent.sessions)


def test_hashes_of_one_length(here: Joining) -> None:
    with pytest.raises(WireError, match="differ in length"):
        here.handlers.answer(here.join(None), m.Lookup(1, "r", (b"a", b"ab")), here.answers.append)


def test_a_lost_scheduler_loses_its_sessions_alone(here: Joining) -> None:
    scheduler, worker = here.join(None), here.join(0)
    other = here.join(1, unnamed=True)
    for peer in (scheduler, other):
        here.agent.sessions.open((peer.engine_id, "r"), time.monotonic())
    here.handlers.forget(worker, "it left")
    assert len(here.agent.sessions) == 2
    here.handlers.forget(scheduler, "it left")
    assert [session.key for session in here.agent.sessions] == [(other.engine_id, "r")]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group": 1}, "names group 1, its worker has 1"),
        ({"block_ids": (1, 2, 3)}, "2 chunks need 4 block ids, not 3"),
        ({"block_ids": (1, 2, 3, 8)}, "outside the 8 blocks"),
        ({"block_ids": (-1, 2, 3, 4)}, "outside the 8 blocks"),
    ],
)
def test_blocks_that_do_not_exist(changes: dict[str, Any], reason: str) -> None:
    layout = SimpleNamespace(
        num_blocks=8, device="cpu", blocks_per_part=lambda tokens: tokens // 16
    )
    registration: Any = SimpleNamespace(chunk_tokens=32, device=SimpleNamespace(layouts=[layout]))
    good: dict[str, Any] = {"hashes": (b"a", b"b"), "block_ids": (0, 7, 1, 6), "lease_ns": 1}
    check_blocks(registration, m.Store(0, "r", **good))
    layout.device = "cuda"
    check_blocks(registration, m.Store(0, "r", **good, after=1))
    with pytest.raises(WireError, match="needs a ticket"):
        check_blocks(registration, m.Store(0, "r", **good))
    layout.device = "cpu"
    with pytest.raises(WireError, match=reason):
        check_blocks(registration, m.Store(0, "r", **good | changes))
