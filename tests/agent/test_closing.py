# SPDX-License-Identifier: Apache-2.0
"""Threads that close memory: what is overdue, and what a close that does not return holds up."""

from __future__ import annotations

import threading
import time

import pytest

from lmcache_redis.agent.closing import ClosingThreads
from tests.servers import wait_until

LATER_S = 100.0


def later() -> float:
    return time.monotonic() + LATER_S


def test_only_the_driver_is_late(caplog: pytest.LogCaptureFixture) -> None:
    """Calls in progress may take their time. It is said once, and when it is over."""
    closing, ended, closed = ClosingThreads(), threading.Event(), threading.Event()
    closing.start("worker 0", ended.wait, closed.wait)
    other = threading.Event()
    closing.start("worker 1", lambda: None, lambda: other.set() is None)
    assert other.wait(10)
    assert closing.overdue(later()) == ""
    assert not closing.join(0.01)
    ended.set()
    wait_until(lambda: closing.overdue(later()) == "worker 0")
    assert closing.overdue(later()) == "worker 0"
    assert closing.overdue(time.monotonic() - LATER_S) == ""
    assert not closing.join(LATER_S)
    closed.set()
    wait_until(lambda: closing.join(10))
    assert closing.overdue(later()) == ""
    wait_until(lambda: "closed after all" in caplog.text)
    assert caplog.text.count("worker 0 cannot be closed") == 1
    assert "worker 1" not in caplog.text


def test_what_waits_for_a_thread_is_closed_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    closing, closed = ClosingThreads(), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuses)
        closing.start("worker 0", lambda: None, lambda: closed.set() is None)
        assert closing.overdue(later()) == ""
        assert not closing.join(0.01)
    assert closing.overdue(time.monotonic()) == ""
    assert closed.wait(10)
    assert closing.join(10)


def test_a_close_that_fails_is_overdue_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its memory stays taken as well."""
    closing = ClosingThreads()
    closing.start("worker 0", lambda: None, lambda: False)
    wait_until(lambda: closing.overdue(time.monotonic()) == "worker 0")
    assert "worker 0 cannot be closed: the driver refused" in caplog.text
    assert "after all" not in caplog.text
    assert closing.join(10), "its thread has ended"
