"""Other processes as ``/proc`` (Linux) shows them, and how to end those that we started.

A process is identified by its id and its start time, because the kernel reuses ids. A process in
another PID namespace is invisible.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 2.0
_POLL_S = 0.02


def process_start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot: field 22 of ``/proc/PID/stat``; None if unreadable."""
    try:
        return int(_stat(pid)[19])
    except OSError:
        return None


def is_running(pid: int, start_time: int) -> bool:
    """Whether exactly this process exists. A zombie does not count: it has released its memory.

    False also if ``/proc`` cannot be read.
    """
    try:
        return _runs(pid, start_time)
    except OSError:
        return False


def has_ended(pid: int, start_time: int) -> bool:
    """Whether exactly this process is known to have ended.

    False if ``/proc`` cannot be read for any other reason, such as too many open files.
    """
    try:
        return not _runs(pid, start_time)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM, then SIGKILL if the process has not ended after ``grace_s`` seconds."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """No process that is started in the block outlives it. SIGTERM ends the block as Ctrl-C does.

    The root of a process tree may end before the rest of the tree. Linux then makes this process
    the parent of the rest (PR_SET_CHILD_SUBREAPER, prctl(2)), so that it can be found and ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    children_before = _children()

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end_children(spared=children_before)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _end_children(spared: set[int]) -> None:
    """Waits a moment for the children to end; then kills them and the children that they leave."""
    deadline_s = time.monotonic() + _GRACE_S
    while left := _children() - spared:
        for pid in left:
            if time.monotonic() > deadline_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)


def _children() -> set[int]:
    """The processes whose parent this process is, zombies included."""
    children = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(_stat(int(name))[1]) == os.getpid():
                children.add(int(name))
    return children


def _runs(pid: int, start_time: int) -> bool:
    stat = _stat(pid)
    return int(stat[19]) == start_time and stat[0] not in (b"Z", b"X")


def _stat(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from field 3 (state, parent, ...) on. Raises OSError."""
    with open(f"/proc/{int(pid)}/stat", "rb") as stat:
        # Field 2 is the command in parentheses, which may itself hold spaces and parentheses.
        return stat.read().rpartition(b")")[2].split()
