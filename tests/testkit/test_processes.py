# SPDX-License-Identifier: Apache-2.0
"""No process outlives the block: neither children nor the orphans that they leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testkit import processes

pytestmark = pytest.mark.servers

# A child that ends at once and leaves an orphan behind, as an engine's root process may.
SCRIPT = """
import subprocess, sys, time
from testkit import processes
from testkit.processes import ended_in_order

processes._GRACE_S = 0.2
with ended_in_order():
    ended = subprocess.run(
        ["sh", "-c", "sleep 300 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True
    )
    left = subprocess.Popen(["sleep", "300"])
    print(ended.stdout.strip(), left.pid, flush=True)
    if sys.argv[1] == "raise":
        raise LookupError
    if sys.argv[1] == "wait":
        time.sleep(300)
"""


def start(how: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("raise", 1)])
def test_the_end_of_the_block_ends_all_that_began_in_it(how: str, status: int) -> None:
    process, pids = start(how)
    with process:
        assert process.wait(30) == status
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)]
)
def test_a_signal_ends_the_block_and_all_that_began_in_it(number: int, status: int) -> None:
    process, pids = start("wait")
    with process:
        process.send_signal(number)
        assert process.wait(30) == status
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_processes_that_were_there_before_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    before = subprocess.Popen(["sleep", "300"])
    try:
        with processes.ended_in_order():
            inside = subprocess.Popen(["sleep", "300"])
        assert not Path(f"/proc/{inside.pid}").exists()
        assert inside.wait(10) is not None
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()
