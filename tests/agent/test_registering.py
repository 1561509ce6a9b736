# SPDX-License-Identifier: Apache-2.0
"""Registrations of one worker take effect one after the other, and leave nothing mapped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from lmcache_redis import messages as m
from lmcache_redis.agent import registering
from lmcache_redis.chunks.keys import share_rank
from lmcache_redis.chunks.names import Reach
from lmcache_redis.device.layout import Segment
from lmcache_redis.errors import WireError
from tests.agent.joining import LAYOUT, Joining, group_of


@pytest.fixture
def here(joining: Callable[..., Joining]) -> Joining:
    return joining()


def test_two_registrations_at_once_leave_one_mapping(here: Joining) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.register(worker, answers.append)
    here.register(worker, answers.append)
    here.map_memory.set()
    here.run(lambda: len(answers) == 2)
    assert answers == [m.Done(0), m.Done(0)]
    # The first is closed before the second is answered, maybe while that is being opened.
    assert sorted(here.opened) == ["closed 1", "opened 1", "opened 2"]
    assert worker.registration is not None
    here.handlers.forget(worker, "it left")
    here.run(lambda: "closed 2" in here.opened)


def test_an_unregistration_waits_for_the_mapping(here: Joining) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.register(worker)
    here.handlers.answer(worker, m.UnregisterKVCache(2), answers.append)
    assert not answers
    here.map_memory.set()
    here.run(lambda: answers)
    assert answers == [m.Done(0)]
    assert here.opened == ["opened 1", "closed 1"]
    assert worker.registration is None


def test_a_worker_that_left_registers_no_more(here: Joining) -> None:
    worker = here.join(0)
    here.register(worker)
    here.register(worker)
    here.handlers.forget(worker, "it left")
    here.map_memory.set()
    here.run(lambda: "closed 1" in here.opened)
    assert here.opened == ["opened 1", "closed 1"]
    assert worker.registration is None


def test_the_answer_comes_when_all_former_mappings_are_closed(here: Joining) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.unmap_memory.clear()
    here.map_memory.set()
    for number in range(1, 4):
        here.register(worker, answers.append)
        here.run(lambda n=number: f"opened {n}" in here.opened and not worker.mapping)
        assert answers == [m.Done(0)]
    here.handlers.answer(worker, m.UnregisterKVCache(2), answers.append)
    assert answers == [m.Done(0)]
    here.unmap_memory.set()
    here.run(lambda: len(answers) == 4)
    assert sorted(here.opened[3:]) == ["closed 1", "closed 2", "closed 3"]
    counted = here.agent.cache.metrics.snapshot()
    assert (counted["registrations"], counted["unregistrations"]) == (3, 3)
    # Nothing is left open: the next answer waits for nothing.
    here.handlers.answer(worker, m.UnregisterKVCache(2), answers.append)
    assert len(answers) == 5


def test_a_mapping_that_cannot_be_closed_is_never_said_to_be(here: Joining) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.map_memory.set()
    here.register(worker)
    here.run(lambda: worker.registration)
    here.broken = True
    here.handlers.answer(worker, m.UnregisterKVCache(2), answers.append)
    assert here.agent.copies.close(10)
    here.loop.run_posted()
    assert answers == []


def test_a_registration_in_progress_may_hold_up_the_process(here: Joining) -> None:
    def says() -> bool:
        pongs: list[Any] = []
        here.handlers.answer(None, m.Ping(1), pongs.append)
        return bool(pongs[0].mapping)

    workers = [here.join(worker_id) for worker_id in range(2)]
    assert not says()
    for worker in workers:
        here.register(worker)
        assert says()
    here.map_memory.set()
    here.run(lambda: all(each.registration for each in workers))
    assert not says()


HUGE = replace(LAYOUT, segments=(Segment(0, 0, 1 << 28, 1 << 28),))
NO_BLOCKS = replace(LAYOUT, block_size_tokens=0)
BIG = replace(LAYOUT, segments=(Segment(0, 0, 20_000, 20_000),))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([], "0 groups; there may be 1 to 256"),
        ([group_of(0)] * 257, "257 groups; there may be 1 to 256"),
        ([replace(group_of(0), fingerprint=bytes(32))], "different fingerprints of one layout"),
        ([group_of(0, BIG)], "does not fit the host pool"),
        ([group_of(0)] * 17, "does not fit the host pool"),
        ([group_of(0)] * 256, "does not fit the host pool"),
        ([replace(group_of(0), kv_rank=share_rank(8, 2, 4))], "of 4 shares has a layout of 1"),
        ([group_of(0), group_of(0, NO_BLOCKS)], "of whole blocks"),
        ([replace(group_of(0), layout=HUGE)], "chunks of this KV cache cannot be cached"),
    ],
)
def test_what_cannot_be_cached_is_refused(here: Joining, groups: list[m.KVGroup], why: str) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.register_groups(worker, groups, answers.append)
    (answer,) = answers
    assert isinstance(answer, m.Failure)
    assert answer.code == m.REFUSED
    assert why in answer.reason
    assert not worker.mapping


def test_as_many_groups_as_the_pool_has_slots(
    here: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, registering.__name__)
    worker = here.join(0)
    here.map_memory.set()
    window = replace(LAYOUT, segments=(Segment(0, 0, 1 << 10, 1 << 10),), reach=Reach("window", 64))
    here.register_groups(worker, [*[group_of(0)] * 15, group_of(0, window)], lambda answer: None)
    here.run(lambda: worker.registration)
    assert "registered worker 0 of engine engine (model): chunks of 0.0 MiB (" in caplog.text
    assert caplog.text.count("; chunks of 0.0 MiB (stripes: 1, reach: window),") == 1
    assert worker.registration is not None
    assert len(worker.registration.forms) == 16


def test_memory_that_cannot_be_mapped_is_refused(
    here: Joining, caplog: pytest.LogCaptureFixture
) -> None:
    worker = here.join(0)
    answers: list[m.Answer] = []
    here.broken = True
    here.map_memory.set()
    here.register(worker, answers.append)
    here.run(lambda: answers)
    assert answers == [m.Failure(0, m.REFUSED, "this memory cannot be mapped")]
    assert "refused the KV cache of worker 0 of engine engine (model)" in caplog.text
    assert worker.registration is None


@pytest.mark.parametrize("worker_id", [None, -1, 2])
def test_only_workers_register(here: Joining, worker_id: int | None) -> None:
    with pytest.raises(WireError, match="only a worker whose rank is within its world"):
        here.register_groups(here.join(worker_id), [group_of(0)], lambda answer: None)


def test_a_worker_without_an_engine_is_not_registered(here: Joining) -> None:
    worker = here.join(0)
    worker.hello = replace(worker.hello, engine_id="")
    with pytest.raises(WireError, match="without an engine id"):
        here.register(worker)
