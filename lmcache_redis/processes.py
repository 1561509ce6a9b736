"""Processes as ``/proc`` (Linux) shows them, how to end one, and how many files this one may open.

A process is identified by its id and its start time, because the kernel reuses ids. A process in
another PID namespace is invisible.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys


def process_start_time(pid: int) -> int | None:
    """Start time in clock ticks since boot: field 22 of ``/proc/PID/stat``; None if unreadable."""
    try:
        return int(stat_of(pid)[19])
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


def _runs(pid: int, start_time: int) -> bool:
    stat = stat_of(pid)
    return int(stat[19]) == start_time and stat[0] not in (b"Z", b"X")


def stat_of(pid: int) -> list[bytes]:
    """The fields of ``/proc/PID/stat`` from field 3 (state, parent, ...) on. Raises OSError."""
    with open(f"/proc/{int(pid)}/stat", "rb") as stat:
        # Field 2 is the command in parentheses, which may itself hold spaces and parentheses.
        return stat.read().rpartition(b")")[2].split()


def raise_descriptor_limit() -> None:
    """Lets this process have as many open files as it may: the soft limit becomes the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_descriptors() -> int:
    """How many files this process may still open; 0 if it cannot even count them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # without that of the list
    except OSError:
        return 0
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(0, limit - used)
