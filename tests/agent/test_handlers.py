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


def test_no_engine_sends_such_a_name_of_a_tenant(here: Joining) -> None:
    with pytest.raises(WireError, match="no engine sends this name"):
        here.look_up(here.join(None), tenant="a name\n")


def test_each_question_of_a_session_is_answered(here: Joining) -> None:
    here.hold_a_chunk()
    scheduler = here.engine()
    here.look_up(scheduler)
    here.run(lambda: here.answers)
    for question in (
        m.HoldStores(1, held=False), m.ReleaseLocks(1, "r", HASHES[3:4]),
        m.ReleaseLocks(1, "unknown", HASHES[3:4]), m.EndSession(1, "r"), m.EndSession(1, "unknown"),
    ):  # fmt: skip
        here.handlers.answer(scheduler, question, here.answers.append)
    assert here.answers[1:] == [m.Done(0), m.Done(0, 2), m.Done(0), m.Done(0), m.Done(0)]
    assert here.agent.cache.metrics.snapshot()["sessions_ended"] == 1


def test_what_comes_while_it_stops_is_a_miss_or_dropped(here: Joining) -> None:
    scheduler = here.engine()
    here.handlers.is_stopping = True
    here.look_up(scheduler)
    store = m.Store(1, "r", HASHES[:2], tuple(range(8)), 1 << 62)
    (worker, *_) = (each for each in here.peers if each.registration)
    here.handlers.answer(worker, store, here.answers.append)
    assert here.answers == [m.LookupResult(0, 0), m.StoreResult(0, 0, 0, 2)]
    assert here.agent.cache.metrics.snapshot()["drop_shutdown"] == 2


def test_nothing_of_a_distrusted_layout_is_loaded(here: Joining) -> None:
    here.engine()
    (worker, *_) = (each for each in here.peers if each.registration)
    here.agent.trust.differed(worker.registration.forms[0].fingerprint, HASHES[0])
    load = m.Retrieve(1, "r", HASHES[:2], tuple(range(8)), 0, 1 << 62)
    here.handlers.answer(worker, load, here.answers.append)
    assert here.answers == [m.RetrieveResult(0, (0, 1))]
    parts = here.agent.sessions.history.request((worker.engine_id, "r")).parts
    assert parts.failed == 2
    assert "a canary has found other KV in this layout" in parts.because


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
