# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds of GPUs: rules, and the facts that the driver of the tests shows."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin import node
from lmcache_redis.admin.node import (
    ADVICE,
    GpuFacts,
    VisibleGpu,
    judge_gpus,
    look_at_gpus,
    uses_mps,
)
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Severity
from lmcache_redis.device import driver
from tests import cuda_driver
from tests.servers import wait_until

MIB = 1 << 20
H100 = VisibleGpu("b0c5", "NVIDIA H100 80GB HBM3", 0)
WELL = GpuFacts("", 12080, (H100,), {10: False, 20: False})
POOL: Mapping[str, Any] = {
    "slots": 64, "slot_bytes": MIB, "locked_bytes": 64 * MIB, "lock_failure": "",
}  # fmt: skip


def pooled(**changed: Any) -> Mapping[str, Any]:
    return {"pool": {**POOL, **changed}}


def with_gpu(**changed: Any) -> GpuFacts:
    return replace(WELL, gpus=(replace(H100, **changed),))


def test_gpus_as_they_should_be() -> None:
    found = [*judge_gpus(WELL, pooled())]
    assert {each.severity for each in found} == {OK}
    assert [each.topic for each in found] == ["GPU driver", "GPUs", "pinned pool"]
    assert [*judge_gpus(None, {})] == [], "no GPU node"
    small = [*judge_gpus(replace(WELL, kernel=(6, 12)), pooled())][-1]
    assert (small.severity, small.topic) == (OK, "pinned pool")
    assert "kernel 6.12 pins 2 GiB at once" in small.seen
    both = [*judge_gpus(replace(WELL, mps_clients={10: True, 20: True}), pooled())]
    assert (OK, "MPS") in [(each.severity, each.topic) for each in both]


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "seen"),
    [
        (GpuFacts("there is no NVIDIA driver here"), CRITICAL, "GPU driver", "no NVIDIA driver"),
        (replace(WELL, cuda_version=11080), CRITICAL, "GPU driver", "serves CUDA 11.8"),
        (replace(WELL, gpus=()), WARNING, "GPUs", "none is visible here"),
        (with_gpu(compute_mode=3), CRITICAL, "compute mode", "b0c5 is exclusive"),
        (with_gpu(compute_mode=2), CRITICAL, "compute mode", "b0c5 is prohibited"),
        (with_gpu(name="NVIDIA H100 MIG 1g.10gb"), HINT, "MIG", "an instance of a GPU"),
        (
            replace(WELL, mps_clients={10: True, 20: False}),
            CRITICAL, "MPS", "clients of MPS: process 10; not: process 20",
        ),
    ],
)  # fmt: skip
def test_gpu_findings(facts: GpuFacts, severity: Severity, topic: str, seen: str) -> None:
    assert_finding(judge_gpus(facts, pooled()), severity, topic, seen)


def assert_finding(found: Iterator[Any], severity: Severity, topic: str, seen: str) -> None:
    first, *others = sorted(found, key=lambda each: each.severity)
    assert (first.severity, first.topic) == (severity, topic)
    assert seen in first.seen
    why, *change = ADVICE[topic]
    assert why
    assert change
    assert {each.severity for each in others} <= {OK}


def test_a_pool_that_is_not_pinned_says_why() -> None:
    failed = pooled(locked_bytes=2 * MIB, lock_failure="CUDA error 2")
    seen = "2 MiB of 64 MiB: CUDA error 2"
    assert_finding(judge_gpus(WELL, failed), WARNING, "pinned pool", seen)


# ------------------------------------------------------------------- the facts


@pytest.fixture
def stub() -> Iterator[None]:
    if (reason := cuda_driver.missing()) is not None:
        pytest.skip(reason)
    cuda_driver.load()
    cuda_driver.reset()
    yield
    cuda_driver.reset()


@pytest.mark.usefixtures("stub")
def test_facts_of_the_driver() -> None:
    cuda_driver.set("driver_version", 12040)
    cuda_driver.set("compute_mode", 3)
    found = look_at_gpus([os.getpid()])
    assert found is not None
    assert (found.problem, found.cuda_version) == ("", 12040)
    (seen,) = found.gpus
    assert seen.compute_mode == 3
    assert len(seen.uuid) == 36
    assert found.mps_clients == {os.getpid(): False}
    assert found.kernel >= (3, 0)
    assert cuda_driver.counts() == {}, "doctor takes nothing of a GPU"
    topics = {each.topic for each in judge_gpus(found, pooled()) if each.severity is CRITICAL}
    assert topics == {"compute mode"}


@pytest.mark.usefixtures("stub")
def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It may be installed on a node that has none, where nothing is wrong."""
    cuda_driver.fail("cuInit", 100, times=0)
    monkeypatch.setattr(node, "_CONTROL", tmp_path / "nvidiactl")
    assert look_at_gpus([]) is None
    (tmp_path / "nvidiactl").touch()
    found = look_at_gpus([])
    assert found is not None
    assert "no GPU is visible" in found.problem


@pytest.mark.usefixtures("stub")
def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answer, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(node, "_DRIVER_DEADLINE_S", 0.05)
    monkeypatch.setattr(driver, "driver_version", lambda: answer.wait(10))
    found = look_at_gpus([])
    answer.set()
    wait_until(lambda: threading.active_count() <= before, "the end of its thread")
    assert found is not None
    assert "has not answered" in found.problem


@pytest.mark.servers
def test_clients_of_mps_are_told_by_their_directory(tmp_path: Path) -> None:
    served = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    with subprocess.Popen(["sleep", "60"], env=served) as client:
        try:
            assert uses_mps(client.pid) is False, "nothing serves there"
            (tmp_path / "control").touch()
            # A process that has just started has no environment yet.
            wait_until(lambda: uses_mps(client.pid), "a client of MPS")
            assert uses_mps(os.getpid()) is False
        finally:
            client.kill()
    assert uses_mps(client.pid) is None
