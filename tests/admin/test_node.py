# SPDX-License-Identifier: Apache-2.0
"""What `doctor` finds on a node: rules, and the facts of real processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmcache_redis.admin.node import NodeFacts, Process, judge_node, read_process, shm_of
from lmcache_redis.admin.rules import CRITICAL, HINT, OK, WARNING, Severity
from lmcache_redis.chunks.cutting import stripe_payload_bytes
from lmcache_redis.chunks.frame import ChunkFrame, describe_header
from lmcache_redis.chunks.names import opaque_pages
from tests.harness import wait_until

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
    first, *others = judge_node(facts)
    assert (first.severity, first.topic) == (severity, topic)
    assert seen in first.seen
    assert first.why
    assert first.change
    assert {finding.severity for finding in others} <= {OK}


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
