# SPDX-License-Identifier: Apache-2.0
"""Running, stopped, ended and reused process ids, told apart by /proc."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_redis.processes import (
    NamedThread,
    end_process,
    ended_how,
    free_descriptors,
    has_ended,
    is_running,
    memory_limit_bytes,
    process_start_time,
    raise_descriptor_limit,
    stat_of,
)
from tests.servers import wait_until

NO_PID = 2**22 + 1  # above the largest id that Linux gives


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.servers
def test_a_process_runs_until_it_ends(child: subprocess.Popen[bytes]) -> None:
    started = process_start_time(child.pid)
    assert started is not None
    for state in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(child.pid, state)
        assert is_running(child.pid, started)
        assert not has_ended(child.pid, started)
    # Another process with a reused id.
    assert not is_running(child.pid, started + 1)
    assert has_ended(child.pid, started + 1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    for _ in ("a zombie", "reaped"):
        assert not is_running(child.pid, started)
        assert has_ended(child.pid, started)
        child.wait()


_LEADERLESS = """
import ctypes, os, threading
threading.Thread(target=lambda: os._exit(len(os.read(0, 1)))).start()
print(flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # of this thread
"""


@pytest.mark.servers
def test_a_process_runs_until_its_last_thread_ends() -> None:
    """As after SIGKILL while a thread is in a driver's call: the leader is a zombie by then."""
    words = [sys.executable, "-c", _LEADERLESS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = process_start_time(process.pid)
        assert started is not None
        wait_until(lambda: stat_of(process.pid)[0] == b"Z", "a zombie leader")
        assert is_running(process.pid, started)
        assert not has_ended(process.pid, started)
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: has_ended(process.pid, started), "the end of the last thread")
        assert not is_running(process.pid, started)


def test_there_is_no_such_process() -> None:
    assert process_start_time(NO_PID) is None
    assert not is_running(NO_PID, 1)
    assert has_ended(NO_PID, 1)


def test_a_process_that_cannot_be_read_has_not_ended() -> None:
    """Out of file descriptors: blocks that the agent may still write are not released."""
    pid = os.getpid()
    started = process_start_time(pid)
    assert started is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = process_start_time(pid), is_running(pid, started), has_ended(pid, started)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == (None, False, False)


@pytest.mark.servers
@pytest.mark.parametrize(
    ("handler", "number"), [("SIG_DFL", signal.SIGTERM), ("SIG_IGN", signal.SIGKILL)]
)
def test_a_process_that_ignores_sigterm_is_killed(handler: str, number: signal.Signals) -> None:
    script = f"import signal; signal.signal(15, signal.{handler}); print(flush=True); input()"
    words = [sys.executable, "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end_process(process, 0.2 if number == signal.SIGKILL else 60.0)
    assert process.returncode == -number


@pytest.mark.parametrize(
    ("returncode", "said"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-99, "signal 99")],
)
def test_an_end_in_words(returncode: int, said: str) -> None:
    assert ended_how(returncode).endswith(said)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        # version 2: a group of its own, its parent's limit, and a container's view
        ("0::/pod/box", {"pod/box/memory.max": 64}, 64),
        ("0::/pod/box", {"pod/box/memory.max": 64, "pod/memory.max": 32}, 32),
        ("0::/pod/box", {"pod/box/memory.max": "max", "pod/memory.max": 32}, 32),
        ("0::/", {"memory.max": 48}, 48),
        ("0::/../../other", {"memory.max": 48}, 48),
        # version 1, and both at once
        ("4:cpu,memory:/box", {"memory/box/memory.limit_in_bytes": 64}, 64),
        ("4:memory:/docker/1f", {"memory/memory.limit_in_bytes": 40}, 40),
        ("4:memory:/a\n0::/a", {"memory/a/memory.limit_in_bytes": 64, "a/memory.max": 8}, 8),
        # none
        ("0::/pod/box", {"pod/box/memory.max": "max"}, None),
        ("4:memory:/", {"memory/memory.limit_in_bytes": 1 << 43}, None),
        ("4:cpuset:/box", {"memory/box/memory.limit_in_bytes": 64}, None),
        ("nonsense", {}, None),
        (None, {}, None),
    ],
)
def test_memory_is_that_of_the_control_group(
    tmp_path: Path, groups: str | None, limits: dict[str, int | str], expected: int | None
) -> None:
    if groups is not None:
        (tmp_path / "cgroup").write_text(f"{groups}\n")
    for name, limit in limits.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit if isinstance(limit, str) else limit * MIB}\n")
    found = memory_limit_bytes(tmp_path / "cgroup", tmp_path / "fs")
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found == (machine if expected is None else expected * MIB)


def test_open_files_are_limited_as_little_as_may_be(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        before = free_descriptors()
        with (tmp_path / "file").open("w"):
            assert free_descriptors() == before - 1
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("name", "in_kernel"),
    [
        ("lmcr-get-0", "lmcr-get-0"),
        ("lmcache-redis-link", "lmcr-link"),
        ("lmcache-redis-disk-write-3", "disk-write-3"),
        ("lmcache-redis-scatter-registering-11", "scatter-regi-11"),
        ("lmcache-redis-prefault-of-all", "prefault-of-all"),
    ],
)
def test_the_kernel_has_the_names_of_threads(name: str, in_kernel: str) -> None:
    names: list[str] = []
    thread = NamedThread(
        name, lambda: names.append(Path("/proc/thread-self/comm").read_text().strip())
    )
    thread.start()
    thread.join()
    assert (thread.name, thread.daemon) == (name, True)
    assert names == [in_kernel]


def test_a_thread_runs_where_it_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied")

    ran: list[bool] = []
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", refuse)
        thread = NamedThread("lmcr-test", lambda: ran.append(True))
        thread.start()
        thread.join()
    assert ran == [True]
