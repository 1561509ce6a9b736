"""Threads for calls to tiers: as of any executor, but nobody waits for them at the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from lmcache_redis.gateway.threads import CallThreads


def test_calls_give_results_and_errors() -> None:
    threads = CallThreads(3, "test")
    futures = [threads.submit(divmod, number, 7) for number in range(100)]
    assert [future.result(10) for future in futures] == [divmod(n, 7) for n in range(100)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(10)
    threads.shutdown()
    threads.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("test-")]
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(divmod, 1, 1)


@pytest.mark.parametrize("cancel", [True, False])
def test_what_waits_at_the_shutdown(cancel: bool) -> None:
    threads = CallThreads(1, "test")
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> str:
        entered.set()
        assert go_on.wait(10)
        return "back"

    hung = threads.submit(hang)
    waiting = threads.submit(divmod, 9, 4)
    assert entered.wait(10)
    threads.shutdown(wait=False, cancel_futures=cancel)
    go_on.set()
    assert hung.result(10) == "back"
    if cancel:
        with pytest.raises(CancelledError):
            waiting.result(10)
    else:
        assert waiting.result(10) == (2, 1)
    threads.shutdown(wait=True, cancel_futures=True)
    assert not [each for each in threading.enumerate() if each.name.startswith("test-")]


def test_a_process_ends_though_a_call_does_not_return() -> None:
    code = """
import threading
from lmcache_redis.gateway.threads import CallThreads
threads, entered = CallThreads(1, "test"), threading.Event()
threads.submit(lambda: (entered.set(), threading.Event().wait()))
entered.wait()
threads.shutdown(wait=False, cancel_futures=True)
print("ended")
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
