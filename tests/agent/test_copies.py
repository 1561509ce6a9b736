# SPDX-License-Identifier: Apache-2.0
"""The copy threads: which copies wait for which, and what a device that hangs blocks."""

from __future__ import annotations

import math
import os
import threading
import time
from typing import Any

import pytest

from lmcache_redis.agent.copies import CPU, REGISTERING, CopyOutcome, CopyThreads
from lmcache_redis.errors import DeviceError, GpuLost


def test_every_copy_is_reported_once_whatever_it_does() -> None:
    copies = CopyThreads(1)
    outcomes: dict[str, CopyOutcome] = {}
    reported = threading.Event()

    def report(name: str, last: bool = False) -> object:
        def told(outcome: CopyOutcome) -> None:
            assert name not in outcomes
            outcomes[name] = outcome
            if last:
                reported.set()

        return told

    def fails() -> CopyOutcome:
        raise DeviceError("bounds")

    def breaks() -> CopyOutcome:
        raise ZeroDivisionError

    copies.put("scatter", "cpu", fails, report("fails"))  # type: ignore[arg-type]
    copies.put("scatter", "cpu", breaks, report("breaks"))  # type: ignore[arg-type]
    copies.put("scatter", "cpu", lambda: CopyOutcome.DONE, report("done", last=True))  # type: ignore[arg-type]
    assert reported.wait(10)
    copies.close(10)
    copies.put("scatter", "cpu", lambda: CopyOutcome.DONE, report("late"))  # type: ignore[arg-type]
    assert outcomes == {
        "fails": CopyOutcome.FAILED,
        "breaks": CopyOutcome.FAILED,
        "done": CopyOutcome.DONE,
        "late": CopyOutcome.CANCELLED,
    }


def test_a_lost_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    woken: list[bool] = []
    copies = CopyThreads(2, lambda: woken.append(True))
    outcomes: list[CopyOutcome] = []
    reported = threading.Semaphore(0)

    def report(outcome: CopyOutcome) -> None:
        outcomes.append(outcome)
        reported.release()

    def lost(code: int) -> CopyOutcome:
        raise GpuLost(code, f"CUDA error {code}")

    assert copies.lost is None
    for place in ("GPU-1", "GPU-1", "GPU-2"):
        copies.put("scatter", place, lambda: lost(700), report)
        assert reported.acquire(timeout=10)
    assert copies.close(10)
    assert outcomes == [CopyOutcome.LOST] * 3
    assert (copies.lost.code, woken) == (700, [True])
    (said,) = caplog.records
    assert said.levelname == "ERROR"
    assert "CUDA error 700" in said.message


def test_a_scatter_never_waits_for_gathers() -> None:
    copies = CopyThreads(1)
    running, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def wait() -> CopyOutcome:
        running.set()
        go_on.wait(10)
        return CopyOutcome.DONE

    def named(name: str) -> CopyOutcome:
        order.append(name)
        return CopyOutcome.DONE

    copies.put("gather", "cpu", wait, lambda outcome: None)
    assert running.wait(10)
    copies.put("gather", "cpu", lambda: named("gather"), lambda outcome: ended.set())
    scattered = threading.Event()
    copies.put("scatter", "cpu", lambda: named("scatter"), lambda outcome: scattered.set())
    assert scattered.wait(10)
    assert copies.backlog == 1
    go_on.set()
    assert ended.wait(10)
    assert order == ["scatter", "gather"]
    running.clear()
    go_on.clear()
    copies.put("gather", "cpu", wait, lambda outcome: None)
    assert running.wait(10)
    cancelled: list[CopyOutcome] = []
    copies.put("gather", "cpu", lambda: named("never"), cancelled.append)
    go_on.set()
    copies.close(10)
    assert cancelled in ([CopyOutcome.CANCELLED], [CopyOutcome.DONE])
    assert ("never" in order) == (cancelled == [CopyOutcome.DONE])


def test_places_do_not_wait_for_each_other() -> None:
    copies = CopyThreads(1)
    running, go_on, there = threading.Event(), threading.Event(), threading.Event()

    def wait() -> CopyOutcome:
        running.set()
        go_on.wait(10)
        return CopyOutcome.DONE

    outcomes: list[CopyOutcome] = []
    copies.put("scatter", "GPU-1", wait, outcomes.append)
    assert running.wait(10)
    copies.put("scatter", "GPU-1", lambda: CopyOutcome.DONE, outcomes.append)
    copies.put("scatter", "GPU-2", lambda: CopyOutcome.DONE, lambda outcome: there.set())
    assert there.wait(10), "one GPU waited for the other"
    assert outcomes == []
    go_on.set()
    copies.close(10)
    assert len(outcomes) == 2
    copies.put("gather", "GPU-3", lambda: CopyOutcome.DONE, outcomes.append)
    assert outcomes[-1] is CopyOutcome.CANCELLED


@pytest.mark.parametrize(
    ("kind", "place", "nicer"), [("scatter", CPU, 0), ("gather", CPU, 10), ("gather", "GPU-1", 0)]
)
def test_only_gathers_on_its_cores_give_way_to_the_engine(
    kind: Any, place: str, nicer: int
) -> None:
    copies, done = CopyThreads(1), threading.Event()
    nice: list[int] = []

    def look() -> CopyOutcome:
        nice.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return CopyOutcome.DONE

    copies.put(kind, place, look, lambda outcome: done.set())
    assert done.wait(10)
    copies.close(10)
    assert nice == [min(os.getpriority(os.PRIO_PROCESS, 0) + nicer, 19)]


class Hanging:
    """A device whose calls do not return until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Semaphore(0), threading.Event()

    def __call__(self) -> CopyOutcome:
        self.entered.release()
        self.released.wait(60)
        return CopyOutcome.DONE

    def hold(self, copies: CopyThreads, place: str, threads: int) -> list[CopyOutcome]:
        outcomes: list[CopyOutcome] = []
        for _ in range(threads):
            copies.put("scatter", place, self, outcomes.append)
            assert self.entered.acquire(timeout=10)
        return outcomes


def test_calls_behind_a_hung_device_end_with_their_leases() -> None:
    copies, gpu = CopyThreads(2), Hanging()
    held = gpu.hold(copies, "GPU-1", 2)
    told: dict[str, CopyOutcome] = {}
    now_ns = time.monotonic_ns()
    for name, until_ns in (("late", now_ns - 1), ("in time", now_ns + 10**12), ("any", math.inf)):
        copies.put(
            "scatter",
            "GPU-1",
            lambda: CopyOutcome.DONE,
            lambda outcome, name=name: told.update({name: outcome}),  # type: ignore[misc]
            until_ns,
        )
    assert told == {}
    copies.drop_late()
    assert told == {"late": CopyOutcome.CANCELLED}
    assert copies.backlog == 2
    assert held == [], "what a device has begun is its own until it comes back"
    gpu.released.set()
    assert copies.close(10)
    assert len(told) == 3


def test_a_hung_device_delays_neither_others_nor_the_end() -> None:
    copies, gpu = CopyThreads(2), Hanging()
    gpu.hold(copies, "GPU-1", 2)
    there = threading.Event()
    copies.put("gather", "GPU-1", lambda: CopyOutcome.DONE, lambda outcome: there.set())
    assert there.wait(10), "a gather waited for scatters"
    queued: list[CopyOutcome] = []
    copies.put("scatter", "GPU-1", lambda: CopyOutcome.DONE, queued.append)
    assert not copies.close(0.05)
    assert queued == [CopyOutcome.CANCELLED]
    gpu.released.set()
    assert copies.close(10)


def test_a_gpu_that_hangs_in_mapping_delays_no_other() -> None:
    copies, gpu = CopyThreads(1), Hanging()
    gpu.hold(copies, REGISTERING, 2)
    there = threading.Event()
    copies.put("scatter", REGISTERING, lambda: CopyOutcome.DONE, lambda outcome: there.set())
    assert there.wait(10)
    gpu.released.set()
    assert copies.close(10)


def test_memory_is_closed_after_its_calls_and_waited_for() -> None:
    copies, outcomes, called = CopyThreads(1), list[CopyOutcome](), list[str]()
    released = threading.Event()

    class Device:
        def end_calls(self) -> None:
            called.append("end_calls")

        def close(self) -> None:
            released.wait(30)
            called.append("close")

    device: Any = Device()
    copies.close_memory("worker 0", device, outcomes.append)
    assert not copies.close(0.0)
    released.set()
    assert copies.close(30)
    assert (called, outcomes) == (["end_calls", "close"], [CopyOutcome.DONE])
    copies.close_memory("worker 1", device, outcomes.append)
    assert outcomes[1:] == [CopyOutcome.CANCELLED]
    assert len(called) == 2
