"""Counters, log lines, threads for calls to tiers."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lmcache_redis.gateway.shared import CallThreads, Counters, QuietLog
from tests.gateway.serving import WAIT_S, DictBackend, Serving
from tests.gateway.wire import KEY


def test_a_flood_is_one_line_and_its_size(caplog: pytest.LogCaptureFixture) -> None:
    log = QuietLog(logging.getLogger(__name__), silence_s=3600)
    for number in range(100):
        log.warning("a", "number %d", number)
    log.warning("b", "another kind")
    assert caplog.messages == ["number 0", "another kind"]
    log = QuietLog(logging.getLogger(__name__), silence_s=0.05)
    for _ in range(3):
        log.warning("a", "again %s", "%s")
    log._kinds["a"] = (0.0, log._kinds["a"][1])  # as if the time had passed
    log.warning("a", "again %s", "%s")
    assert caplog.messages[2:] == ["again %s", "again %s (2 more like it since the last such line)"]


def test_the_figures_have_names() -> None:
    assert Counters(puts=3).snapshot()["puts"] == 3
    with Serving(DictBackend()) as serving:
        stats = serving.stats()
    assert set(stats) == {*Counters().snapshot(), "open_connections", "slots", "slots_in_use"}


class FullBackend(DictBackend):
    """Takes nothing."""

    def put_bytes(self, *args: object, **more: object) -> bool:  # type: ignore[override]
        return False


def test_what_is_not_stored_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with Serving(FullBackend()) as serving, serving.client() as client:
        for _ in range(5):
            client.put(KEY, b"1234567")
        assert client.get(KEY) is None
        assert serving.stats()["not_stored"] == 5
    (line,) = caplog.messages
    assert "7 bytes is not stored" in line


def test_calls_give_results_and_errors() -> None:
    async def work() -> None:
        threads = CallThreads(3, "test")
        results = await asyncio.gather(*(threads.call(divmod, n, 7) for n in range(100)))
        assert results == [divmod(n, 7) for n in range(100)]
        with pytest.raises(ZeroDivisionError):
            await threads.call(divmod, 1, 0)
        threads.end()
        threads.end()
        with pytest.raises(RuntimeError, match="ended"):
            await threads.call(divmod, 1, 1)

    asyncio.run(work())
    for each in threading.enumerate():
        if each.name.startswith("test-"):
            each.join(WAIT_S)
            assert not each.is_alive()


def test_calls_that_wait_at_the_end_are_cancelled() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> str:
        entered.set()
        assert go_on.wait(WAIT_S)
        return "back"

    async def work() -> None:
        threads = CallThreads(1, "test")
        hung = asyncio.ensure_future(threads.call(hang))
        while not entered.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(threads.call(divmod, 9, 4))
        await asyncio.sleep(0)
        threads.end()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go_on.set()
        assert await hung == "back"

    asyncio.run(work())


@pytest.mark.servers
def test_a_process_ends_though_a_call_does_not_return() -> None:
    code = """
import asyncio, threading
from lmcache_redis.gateway.shared import CallThreads
entered = threading.Event()
async def work():
    threads = CallThreads(1, "test")
    asyncio.ensure_future(threads.call(lambda: (entered.set(), threading.Event().wait())))
    while not entered.is_set():
        await asyncio.sleep(0.001)
    threads.end()
asyncio.run(work())
print("ended")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
