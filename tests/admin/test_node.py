# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds on a node: rules, and the facts of processes and of GPUs.

GPUs are those that the driver of the tests shows.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin import node
from lmcache_redis.admin.node import (
    ADVICE,
    GpuFacts,
    NodeFacts,
    Process,
    VisibleGpu,
    judge_gpus,
    judge_node,
    look_at_gpus,
    read_process,
    shm_of,
    uses_mps,
)
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Finding, Severity, advised
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import ChunkFrame, describe_header
from lmcache_redis.chunks.names import opaque_pages
from lmcache_redis.device import driver
from tests import cuda_driver
from tests.servers import wait_until

GIB = 1 << 30
AGENT = Process(10, 1000, "p")
ENGINE = replace(AGENT, pid=20)
REPORT: Mapping[str, Any] = {
    "version": "1.0",
    "pid": 10,
    "chunk_size_tokens": 256,
    "redis": {"server": "cache:6379", "up": True, "reason": ""},
    "pool": {"slots": 4096, "slot_bytes": 1 << 20},
    "engines": [
        {
            "model": "org/model",
            "pid": 20,
            "ready": True,
            "chunk_tokens": 256,
            "groups": [{"part_bytes": 16 << 20}],
        }
    ],
}
WELL = NodeFacts(
    report=REPORT,
    version="1.0",
    gpus=None,
    agent=AGENT,
    engines=(ENGINE,),
    shm_bytes=16 * GIB,
    shm_free_bytes=8 * GIB,
    clock_ahead_s=0.1,
    stored=(),
)


def reported(**changed: Any) -> NodeFacts:
    return replace(WELL, report={**deepcopy(dict(REPORT)), **changed})


def engine(**changed: Any) -> NodeFacts:
    return reported(engines=[{**REPORT["engines"][0], **changed}])


def stored(*chunk_bytes: int, slot_bytes: int = 1 << 20) -> NodeFacts:
    """Redis has a chunk of each size, cut for such slots."""
    headers = []
    for size in chunk_bytes:
        metadata = opaque_pages(size).serialize()
        frame = ChunkFrame(
            bytes(32), bytes(32), size, stripe_payload_bytes(size, slot_bytes), metadata
        )
        header = frame.header(0, bytes(16), 0, 0)
        headers.append(("org/model", describe_header(header)))
    return replace(WELL, stored=tuple(headers))


def test_what_packing_would_save_is_said_if_it_is_much() -> None:
    found = replace(WELL, savings={"org/model": 0.29, "other": 0.06, "noise": 0.0})
    (hint,) = [each for each in judge_node(found) if each.topic == "compression"]
    assert hint.severity is HINT
    assert hint.seen == "off; a stripe of org/model would have 29% fewer bytes"
    assert "--compress lossless" in hint.change[0]


def test_a_node_as_it_should_be() -> None:
    found = judge_node(WELL)
    assert {finding.severity for finding in found} == {OK}
    assert {finding.topic for finding in found} == {
        "Redis", "versions", "clocks", "engines", "/dev/shm",
        "namespaces",
    }  # fmt: skip


OTHER_PID = replace(ENGINE, pid_namespace="x")
HIDDEN = replace(ENGINE, pid_namespace=None)


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "seen"),
    [
        (
            reported(redis={"server": "cache:6379", "up": False, "reason": "refused"}),
            CRITICAL, "Redis", "the agent cannot use cache:6379: refused",
        ),
        (replace(WELL, version="1.1"), WARNING, "versions", "agent is 1.0, the package here 1.1"),
        (replace(WELL, clock_ahead_s=-61.0), HINT, "clocks", "61.0 s behind"),
        (engine(ready=False), WARNING, "engines", "0 of 1 registered workers are ready"),
        (reported(engines=[]), HINT, "engines", "none is registered"),
        (replace(WELL, shm_bytes=64 << 20), WARNING, "/dev/shm", "of 64 MiB are free"),
        (replace(WELL, shm_free_bytes=1 << 20), WARNING, "/dev/shm", "1 MiB of 16 GiB are free"),
        (replace(WELL, engines=(OTHER_PID,)), CRITICAL, "namespaces", "20 is in another pid"),
        (replace(WELL, engines=(replace(ENGINE, uid=1001),)), CRITICAL, "users", "as user 1001"),
        (
            stored(4 << 20, slot_bytes=512 << 10),
            WARNING, "slot size", "chunks of org/model cut for another --slot-bytes",
        ),
        (
            stored(4 << 20, 1 << 20),
            HINT, "chunk sizes", "several sizes: 1 MiB, 4 MiB",
        ),
    ],
)  # fmt: skip
def test_findings(facts: NodeFacts, severity: Severity, topic: str, seen: str) -> None:
    assert_finding(judge_node(facts), severity, topic, seen)


def assert_finding(found: Iterable[Finding], severity: Severity, topic: str, seen: str) -> None:
    first, *others = found
    assert (first.severity, first.topic) == (severity, topic)
    assert seen in first.seen
    assert first.why
    assert first.change
    assert {each.severity for each in others} <= {OK}


def test_what_is_fine() -> None:
    for facts in (
        replace(WELL, engines=(HIDDEN,)),
        replace(WELL, agent=None),
        replace(WELL, agent=replace(AGENT, uid=0)),
        replace(WELL, shm_bytes=None, shm_free_bytes=None),
        replace(WELL, clock_ahead_s=None),
        stored(4 << 20),
    ):
        assert {finding.severity for finding in judge_node(facts)} == {OK}


@pytest.mark.servers
def test_processes_are_read() -> None:
    ours = read_process(os.getpid())
    assert ours is not None
    assert ours.uid == os.getuid()
    assert ours.pid_namespace == os.readlink("/proc/self/ns/pid")
    words = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c")
    small = "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec sleep 60"
    with subprocess.Popen([*words, small]) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

        def asleep() -> int | None:
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep"):
                    return int(pid)
            return None

        try:
            wait_until(
                lambda: parent.poll() is not None or asleep(), "a process in its own namespaces"
            )
            if parent.poll() is not None:
                pytest.skip("this user cannot make namespaces")
            pid = asleep()
            assert pid is not None
            other, shm = read_process(pid), shm_of(pid)
        finally:
            parent.kill()
    assert other is not None
    assert other.pid_namespace != ours.pid_namespace
    assert shm == (1 << 20, 1 << 20), "what the engine sees, not this process"
    assert read_process(parent.pid) is None


# ------------------------------------------------------------------- GPUs

MIB = 1 << 20
H100 = VisibleGpu("b0c5", "NVIDIA H100 80GB HBM3", 0)
WELL_GPUS = GpuFacts("", 12080, (H100,), {10: False, 20: False})
POOL: Mapping[str, Any] = {
    "slots": 64, "slot_bytes": MIB, "locked_bytes": 64 * MIB, "lock_failure": "",
}  # fmt: skip


def pooled(**changed: Any) -> Mapping[str, Any]:
    return {"pool": {**POOL, **changed}}


def with_gpu(**changed: Any) -> GpuFacts:
    return replace(WELL_GPUS, gpus=(replace(H100, **changed),))


def of_gpus(facts: GpuFacts | None, report: Mapping[str, Any]) -> list[Finding]:
    return advised(judge_gpus(facts, report), ADVICE)


def test_gpus_as_they_should_be() -> None:
    found = [*judge_gpus(WELL_GPUS, pooled())]
    assert {each.severity for each in found} == {OK}
    assert [each.topic for each in found] == ["GPU driver", "GPUs", "pinned pool"]
    assert [*judge_gpus(None, {})] == [], "no GPU node"
    small = [*judge_gpus(replace(WELL_GPUS, kernel=(6, 12)), pooled())][-1]
    assert (small.severity, small.topic) == (OK, "pinned pool")
    assert "kernel 6.12 pins 2 GiB at once" in small.seen
    both = [*judge_gpus(replace(WELL_GPUS, mps_clients={10: True, 20: True}), pooled())]
    assert (OK, "MPS") in [(each.severity, each.topic) for each in both]


@pytest.mark.parametrize(
    ("facts", "severity", "topic", "seen"),
    [
        (GpuFacts("there is no NVIDIA driver here"), CRITICAL, "GPU driver", "no NVIDIA driver"),
        (replace(WELL_GPUS, cuda_version=11080), CRITICAL, "GPU driver", "serves CUDA 11.8"),
        (replace(WELL_GPUS, gpus=()), WARNING, "GPUs", "none is visible here"),
        (with_gpu(compute_mode=3), CRITICAL, "compute mode", "b0c5 is exclusive"),
        (with_gpu(compute_mode=2), CRITICAL, "compute mode", "b0c5 is prohibited"),
        (with_gpu(name="NVIDIA H100 MIG 1g.10gb"), HINT, "MIG", "an instance of a GPU"),
        (
            replace(WELL_GPUS, mps_clients={10: True, 20: False}),
            CRITICAL, "MPS", "clients of MPS: process 10; not: process 20",
        ),
    ],
)  # fmt: skip
def test_gpu_findings(facts: GpuFacts, severity: Severity, topic: str, seen: str) -> None:
    assert_finding(of_gpus(facts, pooled()), severity, topic, seen)


def test_a_pool_that_is_not_pinned_says_why() -> None:
    failed = pooled(locked_bytes=2 * MIB, lock_failure="CUDA error 2")
    seen = "2 MiB of 64 MiB: CUDA error 2"
    assert_finding(of_gpus(WELL_GPUS, failed), WARNING, "pinned pool", seen)


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
