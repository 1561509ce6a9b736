from __future__ import annotations

import logging

import pytest

from lmcache_redis.resp import loops
from lmcache_redis.resp.loops import Backoff, LoopThread


def test_pauses_double_up_to_the_longest_and_start_anew() -> None:
    backoff = Backoff(0.1, 1.0)
    for nominal in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert nominal / 2 <= backoff.next_s() <= nominal
    backoff.reset()
    assert backoff.next_s() <= 0.1
    assert len({Backoff(0.1, 1.0).next_s() for _ in range(20)}) == 20


def test_a_thread_goes_on_after_exceptions_and_notes_them_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(loops.time, "sleep", pauses.append)
    steps = [MemoryError(), RuntimeError("can't start new thread"), True, ValueError(), False]

    def step() -> bool:
        result = steps.pop(0)
        if isinstance(result, Exception):
            raise result
        return bool(result)

    thread = LoopThread("lmcr-test", step)
    assert thread.join(0.0)
    with caplog.at_level(logging.ERROR):
        thread.start()
        assert thread.join(10)
    assert steps == []
    assert len(pauses) == 3
    assert pauses[2] <= pauses[0] * 2
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        MemoryError,
        ValueError,
    ]
