"""Registrations of one worker take effect one after the other, and leave nothing mapped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_redis import messages as m
from lmcache_redis.agent import registering
from tests.agent.joining import Joining


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    here = Joining()
    monkeypatch.setattr(registering, "open_device", here.open_device)
    yield here
    here.close()


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
