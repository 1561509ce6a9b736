# SPDX-License-Identifier: Apache-2.0
"""Calls to a cache that another thread owns: results, errors, and the end of the thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from lmcache_redis.objects import in_memory
from lmcache_redis.objects.backend import CacheThread

WAIT_S = 10.0


@pytest.fixture
def owner() -> Iterator[CacheThread]:
    thread = CacheThread([in_memory(1000)])
    yield thread
    thread.close(1.0)


def test_a_call_runs_on_the_thread_and_has_its_result(owner: CacheThread) -> None:
    name = owner.call(lambda done: done(threading.current_thread().name))
    assert name.result(WAIT_S) == "lmcr-cache"
    later: list[Callable[[int], None]] = []
    call = owner.call(later.append)
    owner.call(lambda done: done(None)).result(WAIT_S)
    assert not call.done()
    owner.call(lambda done: done(later[0](7)))
    assert call.result(WAIT_S) == 7


def test_an_error_is_that_of_one_call(owner: CacheThread) -> None:
    with pytest.raises(LookupError):
        owner.call(lambda done: done({}[1])).result(WAIT_S)
    assert owner.call(lambda done: done(1)).result(WAIT_S) == 1


def test_calls_without_an_answer_fail_at_the_end(owner: CacheThread) -> None:
    unanswered = owner.call(lambda done: None)
    owner.close(1.0)
    with pytest.raises(RuntimeError, match="closed"):
        unanswered.result(WAIT_S)
    with pytest.raises(RuntimeError, match="closed"):
        owner.call(lambda done: done(1))
    owner.close(1.0)
